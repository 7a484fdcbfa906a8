"""The tasks of a run: in their shuffled order, by name, and by dataset.

Invariant: the run's seed and the task list alone decide the order; training groups count from 0, held-out groups lie
above HELDOUT, apart for every evaluation.
"""

import hashlib
import random
from collections import Counter
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
        self.tasks, self.heldout, self._seed, self._epochs = tasks, heldout, seed, epochs
        self._by_id = {task.id: task for task in tasks}
        self._shuffled = lru_cache(maxsize=8)(self._shuffle)

    def train(self, group: int) -> Task | None:
        """None: the tasks are out."""
        epoch, index = divmod(group, len(self.tasks))
        if self._epochs is not None and epoch >= self._epochs:
            return None
        return self.tasks[self._shuffled(epoch)[index]]

    def named(self, group: int, task: str) -> Task:
        """The task with this id, of a group that was opened."""
        return self.heldout[(group - HELDOUT) % _PER_EVALUATION] if is_heldout(group) else self._by_id[task]

    def source(self, task: str) -> str:
        """Of a training task: the dataset that it comes from."""
        return self._by_id[task].source

    def shares(self) -> dict[str, float]:
        """What part of the training tasks each dataset has."""
        counts = Counter(task.source for task in self.tasks)
        return {source: count / len(self.tasks) for source, count in counts.items()}

    def digest(self) -> str:
        """Differs when the tasks, their order in the file, or the seed do."""
        ids = "\0".join([str(self._seed), *(task.id for task in self.tasks), "", *(task.id for task in self.heldout)])
        return hashlib.blake2b(ids.encode(), digest_size=16).hexdigest()

    def _shuffle(self, epoch: int) -> list[int]:
        order = list(range(len(self.tasks)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order
