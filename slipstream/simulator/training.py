"""The learner on a virtual clock: takes groups from the real ledger, judges them, settles them.

Invariant: it does what `learner.process` does, in its order: a group is judged when it is taken, what is out of the
batch is refunded at once, and a new version is published before its groups are settled. The ledger checks the fates.
"""

from collections import deque
from collections.abc import Callable
from typing import Literal

from slipstream.queue.group import Delivery
from slipstream.queue.ledger import Ledger
from slipstream.queue.messages import Fate, Refused, StepPace, Weights
from slipstream.simulator.tally import Tally
from slipstream.staleness import over_cutoff


class Training:
    def __init__(self, ledger: Ledger, tally: Tally, batch: int, cutoff: int, has_signal: Callable[[], bool]) -> None:
        self._ledger, self._tally = ledger, tally
        self._size, self._cutoff, self._has_signal = batch, cutoff, has_signal
        self._batch: list[int] = []  # groups of the step that is being made
        self._taken: deque[int] = deque()  # and not judged yet
        self.version = 0
        self.publish()

    @property
    def missing(self) -> int:
        """Groups until the batch is complete."""
        return self._size - len(self._batch)

    def judge(self) -> Literal["none", "batch", "refunded"]:
        """What became of the next group that is ready. One at a time: the learner works on it before the next one."""
        if not self._taken:
            self._take()
        if not self._taken:
            return "none"
        group = self._taken.popleft()
        deliveries = list(self._ledger.state.groups[group].deliveries())
        if not self._has_signal():
            kind = "zero_signal"
        elif all(self._fresh(delivery) == 0 for delivery in deliveries):
            kind = "discarded_stale"
            self._count(deliveries, self.version)
        else:
            self._batch.append(group)
            return "batch"
        self._settle([group], [_dropped(delivery, kind) for delivery in deliveries], None)
        return "refunded"

    def _take(self) -> None:
        if self.missing and self._ledger.state.ready:
            self._taken.extend(taken.group for taken in self._ledger.take(self.missing, self._batch))

    def _fresh(self, delivery: Delivery) -> int:
        """How many of its tokens this step may train on."""
        if delivery.verdict == "mask":
            return 0
        return delivery.tokens - over_cutoff(delivery.versions, self.version, self._cutoff)

    def step(self, waited: float) -> None:
        """The batch is trained on: the next version is there. `waited`: share of the step's time, for data."""
        self.version += 1
        self.publish(StepPace(waited=waited, ess=None))
        fates: list[Fate] = []
        for group in self._batch:
            deliveries = list(self._ledger.state.groups[group].deliveries())
            self._count(deliveries, self.version - 1)
            fates += [self._trained(delivery) for delivery in deliveries]
        self._settle(self._batch, fates, self.version)
        self._ledger.checkpointed(self.version)
        self._batch = []

    def publish(self, step: StepPace | None = None) -> None:
        self._ledger.publish(Weights(version=self.version, location="", checksum="", tensors=[]), step)

    def _trained(self, delivery: Delivery) -> Fate:
        if delivery.verdict == "mask":
            return _dropped(delivery, "zero_signal")
        old = over_cutoff(delivery.versions, self.version - 1, self._cutoff)
        return Fate(lease=delivery.lease, outcome=delivery.outcome, trained=delivery.tokens - old, masked_stale=old)

    def _settle(self, groups: list[int], fates: list[Fate], version: int | None) -> None:
        answer = self._ledger.settle(groups, fates, version)
        if isinstance(answer, Refused):
            raise AssertionError(answer.why)

    def _count(self, deliveries: list[Delivery], version: int) -> None:
        """For the step that follows `version`."""
        for delivery in deliveries:
            if delivery.verdict == "mask":
                continue
            aged = ((version - run.version, run.length) for run in delivery.versions)
            ages = [(age, count) for age, count in aged if age <= self._cutoff]
            self._tally.settled(delivery.tokens, sum(count for _, count in ages), ages)


def _dropped(delivery: Delivery, kind: str) -> Fate:
    name = "failed" if delivery.verdict == "mask" else kind
    return Fate(lease=delivery.lease, outcome=delivery.outcome, **{name: delivery.tokens})
