"""Which task a group number stands for.

Invariant: the run's seed and the task list alone decide it; training groups count from 0, held-out groups lie above
HELDOUT, apart for every evaluation.
"""

import hashlib
import random
from collections.abc import Sequence
from functools import lru_cache

from slipstream.task import Task

HELDOUT = 1 << 60
_PER_EVALUATION = 1 << 24


def is_heldout(group: int) -> bool:
    return group >= HELDOUT


def heldout_group(version: int, index: int) -> int:
    return HELDOUT + version * _PER_EVALUATION + index


def heldout_version(group: int) -> int:
    return (group - HELDOUT) // _PER_EVALUATION


class TaskOrder:
    """The train tasks in a new seeded shuffle each epoch; `epochs` None never ends."""

    def __init__(
        self, tasks: Sequence[Task], heldout: Sequence[Task] = (), *, seed: int, epochs: int | None = None
    ) -> None:
        self._tasks, self.heldout, self._seed, self._epochs = tasks, heldout, seed, epochs
        self._shuffled = lru_cache(maxsize=8)(self._shuffle)

    def train(self, group: int) -> Task | None:
        """None: the tasks are out."""
        epoch, index = divmod(group, len(self._tasks))
        if self._epochs is not None and epoch >= self._epochs:
            return None
        return self._tasks[self._shuffled(epoch)[index]]

    def of(self, group: int) -> Task:
        """The task of a group that was opened."""
        task = self.heldout[(group - HELDOUT) % _PER_EVALUATION] if is_heldout(group) else self.train(group)
        assert task is not None
        return task

    def digest(self) -> str:
        """Differs when the tasks, their order in the file, or the seed do."""
        ids = "\0".join([str(self._seed), *(task.id for task in self._tasks), "", *(task.id for task in self.heldout)])
        return hashlib.blake2b(ids.encode(), digest_size=16).hexdigest()

    def _shuffle(self, epoch: int) -> list[int]:
        order = list(range(len(self._tasks)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order
