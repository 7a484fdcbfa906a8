"""A learner of two ranks on this machine, without a queue: processes that fork from a server with torch in it."""

import os
from collections.abc import Callable, Iterable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from slipstream.config import Config
from slipstream.learner.assembly import Parts, assemble, settle_torch
from slipstream.learner.checkpoint import load_newest
from slipstream.learner.gathering import follow_first, joined_ranks


def on_ranks(
    processes: ForkServerContext,
    size: int,
    config: Config,
    lead: Callable[..., None],
    *more: Any,
) -> None:
    """`lead(parts, *more)` on the first rank, the others follow."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children = [
        processes.Process(target=_rank, args=(rank, size, store.port, config, lead, more)) for rank in range(size)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    alive = [child for child in children if child.exitcode is None]
    for child in alive:
        child.kill()
    assert [child.exitcode for child in children] == [0] * size


def _rank(rank: int, size: int, port: int, config: Config, lead: Callable[..., None], more: tuple[Any, ...]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    settle_torch(config)
    with joined_ranks() as ranks:
        assert ranks is not None
        if rank:
            follow_first(ranks)
            return
        parts = assemble(ranks.agreed(config), ranks)
        lead(parts, *more)


def train(parts: Parts, groups: list[list[Any]], steps: Iterable[int]) -> list[Any]:
    """Steps of these numbers, all of the same groups."""
    from test_step import candidates

    stats = []
    for version in steps:
        made = parts.trainer.step(candidates(3, groups), 3 + version)
        assert made is not None
        stats.append(made)
    return stats


def train_and_tell(parts: Parts, groups: list[list[Any]], steps: Iterable[int], out: Path) -> None:
    stats = train(parts, groups, steps)
    torch.save((stats, parts.computes.tensors()), out)
    parts.computes.leave()


def go_on(parts: Parts, groups: list[list[Any]], steps: range, folder: Path) -> None:
    """From the newest checkpoint in `folder`, with another one at the end."""
    assert load_newest(folder, parts.computes.load) == steps.start
    train(parts, groups, steps)
    parts.computes.keep_in(folder, 1)
    parts.computes.save(steps.stop)
    parts.computes.leave()
    assert parts.worker.saver.final() is not None
