"""The ledger's transitions, one small record each: what the journal writes and replays.

Invariant: an event holds everything its transition depends on (also what the config decided at the time), so that
applying the same events gives the same state without config, tasks or clocks.
"""

import msgspec

from slipstream.queue.messages import Fate, Weights
from slipstream.trajectory import Outcome, VersionRun


class Place(msgspec.Struct, array_like=True, frozen=True):
    """Where a trajectory's record lies in the journal: `length` payload bytes at `offset` of a segment."""

    segment: int
    offset: int
    length: int


class Grant(msgspec.Struct, array_like=True, frozen=True):
    lease: int
    group: int
    member: int
    attempt: int


class Event(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Base: the tag is the class name."""


class RunBegun(Event, frozen=True):
    """First in every log. `tasks` is a digest: group numbers mean nothing under other tasks."""

    run: str
    seed: int
    tasks: str


class Snapshot(Event, frozen=True):
    """First in a log that was compacted: what all events before it came to."""

    state: bytes  # msgpack of the `LedgerState`
    ends: dict[int, int]  # of the segments that stay: where their trajectories end
    gone_tokens: int  # sampled tokens, and
    gone_trajectories: int  # number, of the trajectories to train on that no event after it names


class GroupOpened(Event, frozen=True):
    group: int
    task: str
    size: int
    rated: bool = False  # how it comes out is kept, for a sampler that wants to know


class EvaluationOpened(Event, frozen=True):
    """A group of one for every held-out task, numbered from `first`."""

    version: int
    first: int
    tasks: list[str]


class LeasesGranted(Event, frozen=True):
    """`request`: the Ask that they answer; the same Ask sent again gets the same leases."""

    request: int
    owner: str
    grants: list[Grant]


class LeaseReturned(Event, frozen=True):
    lease: int
    reason: str
    tokens: int  # that its owner had sampled, as of the last heartbeat


class TrajectoryDelivered(Event, frozen=True):
    lease: int
    tokens: int  # sampled
    versions: list[VersionRun]  # sampled tokens by version
    outcome: Outcome
    reward: float | None
    verdict: str  # "train" | "mask" | "retry": what the outcome's policy came to
    place: Place


class TrajectoryParked(Event, frozen=True):
    """What a running lease has come to, so that another can go on from there."""

    lease: int
    tokens: int  # sampled
    place: Place


class ParkedDropped(Event, frozen=True):
    """Who has the lease cannot go on from what was parked, and begins anew."""

    lease: int


class GroupClosed(Event, frozen=True):
    """Its time is over and enough members ended: `late`, leases that run, end here, and what waits is not granted."""

    group: int
    late: list[int]
    tokens: int  # that the late ones' owners had sampled, as of the last heartbeat


class DuplicateArrived(Event, frozen=True):
    """A delivery for a lease that had ended; dropped."""

    lease: int


class GroupsTaken(Event, frozen=True):
    groups: list[int]


class GroupsUntaken(Event, frozen=True):
    """The learner does not hold them (the answer was lost): ready again, ahead of the others."""

    groups: list[int]


class FatesSettled(Event, frozen=True):
    """Whole groups. With a version: consumed by the step that makes it; without: refunded."""

    fates: list[Fate]
    version: int | None


class WeightsPublished(Event, frozen=True):
    weights: Weights


class DepthMoved(Event, frozen=True):
    """The autopilot's: groups are opened up to this depth from here on."""

    depth: float
    why: str


class RollouterJoined(Event, frozen=True):
    name: str
    request: int  # of its Hello: the same Hello sent again is no second process


class LearnerJoined(Event, frozen=True):
    """The learner starts at `version`: what was consumed for later ones, or taken only, is handed out again."""

    name: str
    request: int
    version: int
    unseen: int  # groups that its checkpoint has consumed and this ledger never saw


class ConsumptionFinal(Event, frozen=True):
    version: int


class Drained(Event, frozen=True):
    done: bool


AnyEvent = (
    RunBegun
    | GroupOpened
    | EvaluationOpened
    | LeasesGranted
    | LeaseReturned
    | TrajectoryDelivered
    | DuplicateArrived
    | GroupsTaken
    | GroupsUntaken
    | FatesSettled
    | WeightsPublished
    | DepthMoved
    | RollouterJoined
    | LearnerJoined
    | ConsumptionFinal
    | Drained
    | GroupClosed
    | Snapshot
    | TrajectoryParked
    | ParkedDropped
)
