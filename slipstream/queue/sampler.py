"""Which task comes next: samplers behind one small protocol, which are told what the ledger knows of each task.

Invariant: a sampler remembers nothing but what it was told last of each task, and the ledger keeps just that. A new one
that is told the same goes on with the same tasks, so a queue that was killed loses nothing of a curriculum.
"""

import heapq
import random
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import Literal, Protocol

from slipstream.queue import events as ev
from slipstream.queue.group import TaskRecord
from slipstream.queue.state import LedgerState
from slipstream.queue.tasks import TaskOrder
from slipstream.task import Task

HARD, EASY = 0.25, 0.75  # mean rewards up to, and from which on, a group says little
RARELY = 0.2  # how often such a task comes, of how often a normal one does


class TaskSampler(Protocol):
    """A curriculum."""

    rates: bool  # whether it wants to be told anything

    def saw(self, task: str, record: TaskRecord) -> None:
        """What is known of a task now: at the start of all that are known, later of each that changed."""
        ...

    def next(self, group: int) -> Task | None:
        """The task of the next group, which has this number; None when the tasks are out. It may be asked again, and
        then says the same."""
        ...


def rated(event: ev.AnyEvent, state: LedgerState) -> str | None:
    """The task whose record an event may change, before it is applied."""
    match event:
        case ev.GroupOpened():
            return event.task
        case ev.GroupClosed():
            return state.groups[event.group].task
        case ev.TrajectoryDelivered():
            return state.groups[state.running[event.lease].slot.group].task
        case _:
            return None


class Shuffle:
    """All tasks once in each epoch, in an order that the seed decides."""

    rates = False

    def __init__(self, order: TaskOrder) -> None:
        self._order = order

    def saw(self, task: str, record: TaskRecord) -> None:
        pass

    def next(self, group: int) -> Task | None:
        return self._order.train(group)


class Pool(StrEnum):
    EASY = "easy"
    NORMAL = "normal"  # and what is not known yet
    HARD = "hard"


WEIGHTS = {Pool.EASY: RARELY, Pool.NORMAL: 1.0, Pool.HARD: RARELY}


def pool_of(record: TaskRecord) -> Pool:
    if not record.rated or HARD < record.rate < EASY:
        return Pool.NORMAL
    return Pool.EASY if record.rate >= EASY else Pool.HARD


class PassRatePools:
    """Tasks that are always solved, or never, come rarely; but they come, and go back to the others once that changes.

    Which pool is next is drawn, each with its weight times the tasks in it; of a pool, the task whose last turn is
    longest ago. So every task comes again, at the latest once all of its pool did.
    """

    rates = True

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self._tasks, self._seed = list(tasks), seed
        random.Random(f"{seed}/pools").shuffle(self._tasks)
        self._index = {task.id: index for index, task in enumerate(self._tasks)}
        self._places: list[tuple[Pool, int]] = [(Pool.NORMAL, -1)] * len(self._tasks)  # pool and last turn
        self._sizes = Counter({Pool.NORMAL: len(self._tasks)})
        # By last turn, then as shuffled. What a task's place does not say any more is passed over when it is met.
        self._turns: dict[Pool, list[tuple[int, int]]] = {pool: [] for pool in Pool}
        self._turns[Pool.NORMAL] = [(-1, index) for index in range(len(self._tasks))]

    def saw(self, task: str, record: TaskRecord) -> None:
        if (index := self._index.get(task)) is None:
            return
        place = pool_of(record), record.opened
        if place != self._places[index]:
            self._sizes[self._places[index][0]] -= 1
            self._sizes[place[0]] += 1
            self._places[index] = place
            heapq.heappush(self._turns[place[0]], (record.opened, index))

    def next(self, group: int) -> Task | None:
        pools = [pool for pool in Pool if self._sizes[pool]]
        weights = [WEIGHTS[pool] * self._sizes[pool] for pool in pools]
        (pool,) = random.Random(f"{self._seed}/{group}").choices(pools, weights)
        turns = self._turns[pool]
        while self._places[turns[0][1]] != (pool, turns[0][0]):
            heapq.heappop(turns)
        return self._tasks[turns[0][1]]


def sampler(name: Literal["shuffle", "pools"], order: TaskOrder, seed: int) -> TaskSampler:
    return PassRatePools(order.tasks, seed) if name == "pools" else Shuffle(order)
