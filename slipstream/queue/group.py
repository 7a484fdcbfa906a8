"""What the ledger keeps of a group: its members, what fills their slots, and how far it has come.

Invariant: a slot is filled by at most one delivery; only `state.py` changes what stands here.
"""

from collections.abc import Iterator
from enum import StrEnum

import msgspec

from slipstream.queue import events as ev
from slipstream.queue.messages import Fate
from slipstream.trajectory import Outcome, VersionRun

NEWEST = 0.5  # what the newest group counts for in a task's rate


class Phase(StrEnum):
    OPEN = "open"  # members are being made
    READY = "ready"
    TAKEN = "taken"  # the learner has it
    CONSUMED = "consumed"  # by a step whose checkpoint is not written yet


class Slot(msgspec.Struct, array_like=True, frozen=True):
    group: int
    member: int


class Running(msgspec.Struct, array_like=True, frozen=True):
    """A lease that has not ended."""

    slot: Slot
    attempt: int
    owner: str


class Delivery(msgspec.Struct):
    """A trajectory that fills its slot."""

    lease: int
    tokens: int
    versions: list[VersionRun]
    outcome: Outcome
    verdict: str
    place: ev.Place
    fate: Fate | None = None


class Parked(msgspec.Struct, array_like=True, frozen=True):
    """How far a trajectory had come that has not ended."""

    tokens: int  # sampled
    place: ev.Place


class Member(msgspec.Struct):
    attempt: int = 0  # of the next grant, or of the running lease
    retries: int = 0  # of outcomes whose policy is "retry"
    delivery: Delivery | None = None
    closed: bool = False  # its group went on without it
    parked: Parked | None = None  # where the next lease, or the running one's successor, goes on


class Group(msgspec.Struct):
    group: int
    task: str
    members: list[Member]
    phase: Phase = Phase.OPEN
    taken: int = 0  # its turn among all that were taken
    version: int = 0  # of the step that consumed it
    rated: bool = False  # its rewards go into its task's record
    scored: int = 0  # of its members
    reward: float = 0.0  # of those, in all; each counts as 0 to 1

    def deliveries(self) -> Iterator[Delivery]:
        return (member.delivery for member in self.members if member.delivery)

    def oldest_version(self) -> int:
        """Of its sampled tokens."""
        return min((run.version for delivery in self.deliveries() for run in delivery.versions), default=0)


class TaskRecord(msgspec.Struct):
    """How a task's groups came out."""

    opened: int = -1  # the last of them
    rated: int = 0  # groups that had a reward
    rate: float = 0.0  # mean reward (each 0 to 1) of a group; older groups count less

    def rate_group(self, mean: float) -> None:
        self.rate = mean if not self.rated else self.rate + NEWEST * (mean - self.rate)
        self.rated += 1


class HeldoutTally(msgspec.Struct):
    tasks: int
    ended: int = 0
    passed: int = 0
    scored: int = 0
    reward: float = 0.0
    tokens: int = 0


def held(group: Group) -> int:
    """Bytes of the group's trajectories."""
    return sum(delivery.place.length for delivery in group.deliveries())
