"""Which task comes next, by what became of its groups."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_made import make_config, make_row, make_tasks

from slipstream.queue import events as ev
from slipstream.queue.group import NEWEST, TaskRecord
from slipstream.queue.ledger import Ledger
from slipstream.queue.messages import Fate
from slipstream.queue.sampler import EASY, HARD, RARELY, PassRatePools, Pool, pool_of
from slipstream.queue.state import LedgerState
from slipstream.queue.tasks import TaskOrder
from slipstream.trajectory import Outcome

PLACE = ev.Place(0, 16, 100)
TASKS = 6
RATES = st.sampled_from([0.0, HARD, 0.5, EASY, 1.0])


class Course:
    """Groups one after the other, whose tasks come out as they are told."""

    def __init__(self, tasks: int, seed: int = 0) -> None:
        self.pools, self.seed, self.tasks = PassRatePools(make_tasks(tasks), seed), seed, make_tasks(tasks)
        self.records: dict[str, TaskRecord] = {}
        self.groups = 0

    def next(self) -> str:
        task = self.pools.next(self.groups)
        assert task is not None
        record = self.records.setdefault(task.id, TaskRecord())
        record.opened = self.groups
        self.pools.saw(task.id, record)
        self.groups += 1
        return task.id

    def comes_out(self, task: str, rate: float) -> None:
        self.records[task].rate_group(rate)
        self.pools.saw(task, self.records[task])


@given(st.integers(0, 99), st.lists(st.tuples(RATES, st.booleans()), max_size=40))
@settings(max_examples=50, deadline=None)
def test_one_that_is_told_the_records_goes_on_as_the_first_one(seed: int, turns: list[tuple[float, bool]]) -> None:
    course = Course(TASKS, seed)
    open_ones: list[str] = []
    for rate, ends in turns:
        open_ones.append(course.next())
        if ends:
            course.comes_out(open_ones.pop(0), rate)
    other = Course(TASKS, seed)
    other.records = msgspec.msgpack.decode(msgspec.msgpack.encode(course.records), type=dict[str, TaskRecord])
    for task in sorted(other.records):
        other.pools.saw(task, other.records[task])
    other.groups = course.groups
    assert [other.next() for _ in range(20)] == [course.next() for _ in range(20)]


@given(st.integers(0, 99), st.dictionaries(st.integers(0, TASKS - 1), RATES))
@settings(max_examples=30, deadline=None)
def test_every_task_comes_again_and_its_pool_says_how_often(seed: int, rates: dict[int, float]) -> None:
    """Rates that never change: each task of a pool has as many turns as the others, to one."""
    course = Course(TASKS, seed)
    turns = 600
    counts: Counter[str] = Counter()
    for turn in range(turns):
        task = course.next()
        counts[task] += turn >= TASKS * 5  # all are known by then
        course.comes_out(task, rates.get(int(task[1:]), 0.5))
    by_pool = {pool: [counts[task] for task, r in course.records.items() if pool_of(r) is pool] for pool in Pool}
    assert len(counts) == TASKS
    for members in by_pool.values():
        assert not members or max(members) - min(members) <= 1
    rare, normal = by_pool[Pool.EASY] + by_pool[Pool.HARD], by_pool[Pool.NORMAL]
    if rare and normal:
        assert sum(rare) / len(rare) == pytest.approx(RARELY * sum(normal) / len(normal), rel=0.75)


def test_a_task_goes_back_to_the_others_once_it_is_learnt_or_lost() -> None:
    assert NEWEST == 0.5
    record = TaskRecord()
    pools = [pool_of(record)]
    for rate in (0.0, 1.0, 1.0, 0.0, 0.0):
        record.rate_group(rate)
        pools.append(pool_of(record))
    assert pools == [Pool.NORMAL, Pool.HARD, Pool.NORMAL, Pool.EASY, Pool.NORMAL, Pool.HARD]


def pools_ledger(**sections: dict[str, object]) -> Ledger:
    config = make_config(tasks={"sampler": "pools"}, staleness={"depth": 50}, **sections)
    return Ledger(config, TaskOrder(make_tasks(TASKS), seed=0))


def test_the_ledger_rates_whole_groups_by_what_was_scored() -> None:
    ledger = pools_ledger(rollout={"group": 4}, outcomes={"tool_failed": "mask"})
    leases = ledger.ask("a", 8, 1, 0.0).leases
    for lease, reward in zip(leases[:3], (1.0, 0.0, 7.5), strict=True):
        ledger.deliver(make_row(lease, [0], reward=reward), PLACE)
    record = ledger.state.tasks[leases[0].task.id]
    assert (record.opened, record.rated) == (0, 0)
    ledger.deliver(make_row(leases[3], [0], Outcome.TOOL_FAILED, None), PLACE)
    assert (record.rated, record.rate) == (1, pytest.approx(2 / 3))
    for lease in leases[4:]:  # no reward at all: nothing is known
        ledger.deliver(make_row(lease, [0], Outcome.TOOL_FAILED, None), PLACE)
    assert ledger.state.tasks[leases[4].task.id] == TaskRecord(opened=1)


def test_a_run_spends_its_groups_on_what_there_is_to_learn() -> None:
    """Of six tasks one has signal, three are solved and two are not to be solved; the queue is killed half way."""
    ledger = pools_ledger()
    log: list[ev.AnyEvent] = []
    opened: Counter[str] = Counter()
    for request in range(120):
        if request == 60:
            log += ledger.events
            state = LedgerState()
            for event in log:
                state.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=ev.AnyEvent))
            ledger = Ledger(ledger._config, ledger._order, state)
            ledger.resume(0.0)
        leases = ledger.ask("a", 2, request + 1, 0.0).leases
        task = leases[0].task.id
        opened[task] += 1
        for lease in leases:
            solved = task in ("t1", "t2", "t3") or (task == "t0" and lease.member == 0)
            ledger.deliver(make_row(lease, [0], reward=float(solved)), PLACE)
        (group,) = ledger.take(1, [])
        fates = [Fate(lease=lease, outcome="finished", zero_signal=1) for lease in group.leases]
        ledger.settle([group.group], fates, None)
    assert opened["t0"] > 40  # of 120; a shuffle gives 20
    assert all(opened[f"t{n}"] > 5 for n in range(1, 6))
