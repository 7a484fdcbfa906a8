"""What can happen to the ledger. An event says what was decided; applying it decides nothing.

Invariant: the ledger's state is a function of its events in order: replaying a journal gives the state back.
"""

import msgspec

from slipstream.queue.messages import Fate
from slipstream.trajectory import Outcome


class Event(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """Base: the tag is the class name."""


class Opened(Event):
    """A group was opened: training on task number `task`, or held-out at `version`."""

    group: int
    task: int
    members: int
    heldout: int | None = None  # the version evaluated, None for training


class Granted(Event):
    lease: int
    group: int
    member: int
    attempt: int
    owner: str
    at: float  # Unix time
    deadline: float  # Unix time


class Locator(msgspec.Struct, array_like=True, frozen=True):
    """Where the journal holds a delivered trajectory."""

    segment: int
    offset: int
    length: int


class Delivered(Event):
    lease: int
    tokens: int
    outcome: Outcome
    reward: float | None
    where: Locator | None = None


class Duplicate(Event):
    lease: int


class Returned(Event):
    lease: int
    reason: str
    tokens: int = 0


class Taken(Event):
    groups: list[int]


class Untaken(Event):
    """Groups the learner does not hold any more come back, ahead of the others."""

    groups: list[int]


class Settled(Event):
    groups: list[int]
    fates: list[Fate]
    version: int | None = None


class Published(Event):
    version: int


class Checkpointed(Event):
    version: int


class Rewound(Event):
    """The learner is at `version` again: what was consumed for later ones is ready again, in the same order."""

    version: int


class Evaluated(Event):
    """An evaluation was asked for: `tasks` held-out tasks at `version`."""

    version: int
    tasks: int


class Drained(Event):
    done: bool


LedgerEvent = (
    Opened
    | Granted
    | Delivered
    | Duplicate
    | Returned
    | Taken
    | Untaken
    | Settled
    | Published
    | Checkpointed
    | Rewound
    | Evaluated
    | Drained
)
