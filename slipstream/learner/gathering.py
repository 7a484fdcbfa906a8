"""How the ranks of a sharded learner come together: under torchrun, or started by the first of them.

Invariant: either way each process finds its rank in the environment variables that torchrun sets. Ranks that the first
one started die with it, and it does not survive one that ends before it was told to.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from slipstream.learner.assembly import settle_torch, worker_of
from slipstream.learner.ranks import Ranks, follow
from slipstream.parent import SUPERVISOR, die_with_supervisor
from slipstream.process import before_torch

log = logging.getLogger(__name__)

LEAVE_SECONDS = 30.0  # for the others to end after they were told to leave


@contextmanager
def joined_ranks(number: int = 1) -> Generator[Ranks | None]:
    """The group that the environment names, or one of `number` processes that are started here; None for one alone."""
    with ExitStack() as others:
        if "WORLD_SIZE" not in os.environ and number > 1:
            others.enter_context(_started(number))
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            yield None
            return
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        try:
            yield Ranks(device)
        finally:
            dist.destroy_process_group()


@contextmanager
def _started(number: int) -> Generator[None]:
    """This process is the first of `number` on this machine, as if torchrun had started them all."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {
        "WORLD_SIZE": str(number),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already
        "RANK": "0",
        "LOCAL_RANK": "0",
    }
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    others: list[subprocess.Popen[bytes]] = []
    leaving = threading.Event()
    try:
        for rank in range(1, number):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), SUPERVISOR: str(os.getpid())}
            other = subprocess.Popen([sys.executable, "-m", __name__], env=os.environ | own)
            others.append(other)
            threading.Thread(target=_end_with, args=(rank, other, leaving), daemon=True).start()
        yield
        leaving.set()
        for other in others:
            other.wait(LEAVE_SECONDS)
    finally:
        leaving.set()
        for other in others:
            other.kill()


def _end_with(rank: int, other: "subprocess.Popen[bytes]", leaving: threading.Event) -> None:
    """A collective that waits for a process that is gone may wait for minutes, and cannot be told."""
    code = other.wait()
    if not leaving.is_set() and code:
        log.error("rank %d of the learner ended with exit code %d; so do all", rank, code)
        logging.shutdown()
        os._exit(1)


def follow_first(ranks: Ranks) -> None:
    """A rank but the first: it is told everything, also when to leave."""
    for number in (signal.SIGTERM, signal.SIGINT):  # which are sent to all; the first rank saves, and tells the others
        signal.signal(number, signal.SIG_IGN)
    config = ranks.agreed(None)
    settle_torch(config)
    follow(worker_of(config, ranks), ranks)


def main() -> None:
    die_with_supervisor()
    before_torch()
    with joined_ranks() as ranks:
        assert ranks is not None
        follow_first(ranks)


if __name__ == "__main__":
    main()
