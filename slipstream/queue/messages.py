"""Control messages between a process and the queue: every request has an answer, or an `Refused` that says why.

Framing (DEALER to ROUTER): [request id (8 bytes), msgpack of one message, payload frames...]; the answer carries the
same request id. Payload frames are Arrow IPC buffers (`wire.py`) and travel without being copied.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from slipstream.observe.clock import ClockReading
from slipstream.task import Task
from slipstream.tooluse import ToolUse

# What a client may write: a number that is none of these is refused and gets no further than the decoder.
Version = Annotated[int, Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, Meta(ge=0, lt=1 << 40)]
Room = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
Name = Annotated[str, Meta(max_length=200)]


class Message(msgspec.Struct, tag=True, kw_only=True):
    """Base: the tag is the class name."""


# -- shared records ------------------------------------------------------------------------------------------------


class Lease(msgspec.Struct, kw_only=True):
    """The right (and duty) to produce one trajectory."""

    lease: int
    group: int
    member: int  # 0 .. group size - 1
    attempt: int  # 0 first, +1 for each time the lease was granted anew
    task: Task
    seed: int  # differs for every (run seed, group, member, attempt)
    min_version: int  # the engine must have loaded at least these weights before the first token
    deadline_s: float  # seconds from the grant until it returns to the queue
    heldout: bool = False  # an evaluation: scored and counted, never trained on
    parked: bool = False  # another had come some way with it: AskParked says how far


class TensorInfo(msgspec.Struct, array_like=True, frozen=True):
    name: str
    dtype: str  # "float32", "bfloat16"
    shape: list[int]


class Weights(msgspec.Struct, kw_only=True):
    """One published version and how to fetch it."""

    version: Version
    location: str  # a safetensors file; on /dev/shm for the shared-memory transport
    checksum: str  # blake2b-128 over the tensors' bytes in the order of `tensors`
    tensors: list[TensorInfo]


class Fate(msgspec.Struct, kw_only=True):
    """What became of one delivered trajectory's sampled tokens. The counts sum to all it had."""

    lease: int
    outcome: str  # of the trajectory: what its failed tokens are counted under
    trained: Count = 0
    masked_stale: Count = 0  # over the cutoff K
    masked_mismatch: Count = 0  # cut by a correction's mask rule
    zero_signal: Count = 0  # its group's rewards were all equal
    discarded_stale: Count = 0  # the whole trajectory was dropped as too old
    failed: Count = 0  # its outcome's policy is "mask", or it was retried


class RollouterBeat(msgspec.Struct, kw_only=True):
    """One rollouter's state, sent with each heartbeat."""

    name: Name
    version: int  # -1 before the first weights are there
    running: Count  # trajectories
    leases: list[int]
    tokens_in_flight: list[Count]  # sampled so far, by lease
    tokens_generated: Count  # since start
    pause_ms: list[float]  # weight-load pauses since the last beat
    clock: ClockReading
    tools: Annotated[list[ToolUse], Meta(max_length=1000)] = []


# -- requests ------------------------------------------------------------------------------------------------------


class Hello(Message):
    role: str  # "rollouter" | "learner" | "observer"
    name: Name
    pid: int
    version: Version = 0  # learner: the version its checkpoint holds; the queue rewinds to it


class Ask(Message):
    """A rollouter has room. Answered at once with leases, or after `wait_s` with none and the reason."""

    name: Name
    room: Room
    wait_s: float


class Deliver(Message):
    """Payload: the frames of `encode(trajectories)`."""

    name: Name


class Park(Message):
    """How far a running trajectory has come. Payload: the frames of `encode([trajectory])`."""

    name: Name


class AskParked(Message):
    """Payload of the answer: what was parked for this lease, which the asker has."""

    name: Name
    lease: int


class DropParked(Message):
    """The trajectory of this lease is made from its beginning."""

    name: Name
    lease: int


class GiveBack(Message):
    """Leases that end without a trajectory."""

    name: Name
    leases: list[int]
    reason: Name


class Beat(Message):
    beat: RollouterBeat


class LearnerBeat(Message):
    """What the learner does, said every second while it does it."""

    clock: ClockReading


class StepPace(msgspec.Struct, kw_only=True):
    """What a step says of whether generation is far enough ahead, or too far."""

    waited: float  # share of its time in which the learner waited for data
    ess: float | None  # of its correction weights, as a fraction of the tokens; None when not finite


class Publish(Message):
    """The learner's new weights. From here on the gate counts from `weights.version`."""

    weights: Weights
    step: StepPace | None = None  # that made them; None for those that it starts with


class AskWeights(Message):
    """The newest weights; waits up to `wait_s` for a version newer than `newer_than`."""

    newer_than: int
    wait_s: float


class Take(Message):
    """The learner takes up to `room` complete groups; waits up to `wait_s` for the first.

    `held`: groups it took and has not settled. Others that were taken come back first, in their order, so that an
    answer that was lost on the way loses nothing.
    """

    room: Room
    held: list[int]
    wait_s: float


class Settle(Message):
    """Fates of all trajectories of groups that were taken. With `version` they were consumed by the step that makes
    that version; without, the groups are out of the batch (zero signal, all stale) and their capacity is refunded."""

    groups: list[int]
    fates: list[Fate]
    version: Version | None = None


class Checkpointed(Message):
    """Consumption up to `version` is final."""

    version: Version


class Evaluate(Message):
    """Grant every held-out task once at weights >= `version`, ahead of training leases."""

    version: Version


class Drain(Message):
    """Grant nothing more; running leases may finish. `done`: the run is over, rollouters leave."""

    done: bool = False


class AskStatus(Message):
    pass


class AskConfig(Message):
    """A process on another machine wants to join."""


# -- answers -------------------------------------------------------------------------------------------------------


class Refused(Message):
    why: str


class Ok(Message):
    pass


class Welcome(Message):
    run: str
    seed: int
    version: int
    weights: Weights | None


class RunConfig(Message):
    """JSON of the run's `Config`, with the paths as on the machine where it was read."""

    config: bytes


class Granted(Message):
    leases: list[Lease]
    why: str = ""  # when empty-handed: what is waited for, naming the knob
    done: bool = False  # the run is over


class Accepted(Message):
    leases: list[int]
    duplicates: list[int] = []


class Newest(Message):
    weights: Weights | None
    done: bool = False


class TakenGroup(msgspec.Struct, kw_only=True):
    group: int
    leases: list[int]
    frames: list[int]  # how many payload frames each trajectory's record batch has, in order


class Taken(Message):
    """Payload: all groups' frames, in order."""

    groups: list[TakenGroup]
    why: str = ""
    done: bool = False  # data exhausted and nothing in flight


class HeldoutResult(msgspec.Struct, kw_only=True):
    version: int
    tasks: int
    ended: int
    passed: int  # reward >= 1
    mean_reward: float
    tokens: int


class Accounts(msgspec.Struct, kw_only=True):
    """The accounting identity: generated = trained + masked_stale + masked_mismatch + zero_signal + discarded_stale
    + sum(failed) + in_flight. Counts are trajectories (`*_trajectories`) or sampled tokens."""

    generated: int = 0
    trained: int = 0
    masked_stale: int = 0
    masked_mismatch: int = 0
    zero_signal: int = 0
    discarded_stale: int = 0
    failed: dict[str, int] = {}  # by outcome
    in_flight: int = 0  # delivered, not yet settled

    def holds(self) -> bool:
        return self.generated == (
            self.trained
            + self.masked_stale
            + self.masked_mismatch
            + self.zero_signal
            + self.discarded_stale
            + sum(self.failed.values())
            + self.in_flight
        )


class LeaseCounts(msgspec.Struct, kw_only=True):
    """granted = delivered + returned (by reason) + running."""

    granted: int = 0
    delivered: int = 0
    returned: dict[str, int] = {}
    running: int = 0
    tokens_lost: int = 0  # sampled under leases that returned, as of their owner's last heartbeat, and not parked
    tokens_parked: int = 0  # of trajectories that go on
    duplicates: int = 0  # deliveries of leases that had ended; acknowledged, and dropped

    def holds(self) -> bool:
        return self.granted == self.delivered + sum(self.returned.values()) + self.running


class Status(Message):
    version: int
    tokens: Accounts
    trajectories: Accounts
    leases: LeaseCounts
    groups_ready: int
    bytes_held: int
    rollouters: list[RollouterBeat]
    heldout: list[HeldoutResult]
    why: str  # why nothing is granted now, "" if leases flow
    refused: int = 0  # requests that were malformed or contradicted the ledger
    bytes_most: int = 0  # at which no new group is opened (queue.memory_mb)
    learner: ClockReading | None = None  # of its last beat; None when there was none lately
    depth: float = 0.0  # of the gate, as it is now


Request = (
    Hello
    | Ask
    | Deliver
    | Park
    | AskParked
    | DropParked
    | GiveBack
    | Beat
    | LearnerBeat
    | Publish
    | AskWeights
    | Take
    | Settle
    | Checkpointed
    | Evaluate
    | Drain
    | AskStatus
    | AskConfig
)
Answer = Refused | Ok | Welcome | RunConfig | Granted | Accepted | Newest | Taken | Status
