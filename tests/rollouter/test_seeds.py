"""One run seed decides every task and every sampling seed, whoever asks first; no two samples share one."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from slipstream.agent_loop.episode import turn_seed
from slipstream.config import Config
from slipstream.queue.ledger import Ledger
from slipstream.queue.messages import Lease
from slipstream.queue.tasks import TaskOrder
from slipstream.task import Task

GROUP, BATCH, TURNS = 4, 3, 3
RAW: dict[str, Any] = {
    "model": {"path": "m"},
    "environment": {"path": "e.py:e"},
    "tasks": {"train": "t.jsonl"},
    "rollout": {"group": GROUP},
    "learner": {"batch": BATCH},
    "staleness": {"depth": 1.0},
}
TASKS = [Task(id=f"t{number}", prompt="?") for number in range(5)]
WHOLE = 2 * BATCH * GROUP  # leases of the two batches that depth 1 lets in before the first step


def granted(run_seed: int, asks: list[tuple[str, int]]) -> list[Lease]:
    """Leases in the order in which rollouters got them; each of `asks` is who, and for how many."""
    config = msgspec.convert({**RAW, "run": {"seed": run_seed}}, Config)
    ledger = Ledger(config, TaskOrder(TASKS, TASKS, seed=run_seed))
    leases: list[Lease] = []
    for request, (owner, room) in enumerate(asks):
        leases += ledger.ask(owner, room, request, now=0.0).leases
    while len(leases) < WHOLE:
        more = ledger.ask("last", WHOLE, len(asks), now=0.0).leases
        assert more
        leases += more
    return leases


def named(leases: list[Lease]) -> dict[tuple[int, int], tuple[str, int]]:
    return {(lease.group, lease.member): (lease.task.id, lease.seed) for lease in leases}


ASKS = st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(1, 7)), max_size=20)


@given(st.integers(0, 2**32 - 1), ASKS, ASKS)
def test_the_run_seed_decides_tasks_and_seeds_whoever_asks(
    run_seed: int, one: list[tuple[str, int]], other: list[tuple[str, int]]
) -> None:
    assert named(granted(run_seed, one)) == named(granted(run_seed, other))
    assert len(named(granted(run_seed, one))) == WHOLE
    again, different = granted(run_seed, []), granted(run_seed ^ 1, [])
    assert {lease.seed for lease in again}.isdisjoint(lease.seed for lease in different)


@given(st.integers(0, 2**32 - 1), ASKS)
def test_no_two_samples_of_all_rollouters_share_a_seed(run_seed: int, asks: list[tuple[str, int]]) -> None:
    """Neither those of one prompt, nor the turns of one trajectory: a seed is what a request is sampled with."""
    seeds = [turn_seed(lease.seed, turn) for lease in granted(run_seed, asks) for turn in range(TURNS)]
    assert len(set(seeds)) == WHOLE * TURNS
    assert len({seed % 2**63 for seed in seeds}) == WHOLE * TURNS  # as the engine is given them
