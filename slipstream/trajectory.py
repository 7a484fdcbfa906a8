"""The record of one attempt at a task: one append-only token stream with masks, log-probabilities and versions.

Invariant: every per-token field has the same length, and `version_runs` covers the stream exactly. Where an attempt
has several conversations (branches), their streams stand one behind the other, each from its own first token on: a
span of kind `branch` begins every one but the first, and what it repeats of others is not sampled in it.
It lives beside the rooms and not in one, because the agent loop writes it, the queue carries it and the learner's
user reads it, and those rooms do not import each other.
"""

from array import array
from enum import StrEnum

import msgspec


class Outcome(StrEnum):
    """How a trajectory ended. A failure is not a zero: `outcomes.*` in the config says what each does."""

    FINISHED = "finished"
    TRUNCATED_TOKENS = "truncated_tokens"
    TRUNCATED_TURNS = "truncated_turns"
    TIMEOUT = "timeout"
    TOOL_FAILED = "tool_failed"
    REWARD_FAILED = "reward_failed"
    ENGINE_FAILED = "engine_failed"
    CANCELLED = "cancelled"
    INVALID = "invalid"


class SpanKind(StrEnum):
    """Who wrote a stretch of the stream."""

    PROMPT = "prompt"  # system prompt, tool schemas, the task, and the template around them
    SAMPLED = "sampled"  # tokens the policy sampled, its end of turn included
    TOOL = "tool"  # tool results and the template around them
    GLUE = "glue"  # template tokens that close or open a turn
    BRANCH = "branch"  # what a further branch begins with; attention sees nothing of the stream before it


class VersionRun(msgspec.Struct, array_like=True, frozen=True):
    """`length` consecutive tokens sampled by weights `version`; -1 where the tokens were not sampled."""

    length: int
    version: int


class Span(msgspec.Struct, array_like=True, frozen=True):
    """A stretch of the stream: tokens [start, start + length) of turn `turn`."""

    kind: SpanKind
    turn: int
    start: int
    length: int


class Trajectory(msgspec.Struct, kw_only=True):
    """One attempt at a task, ready for the wire. Seconds are wall-clock (`t_*`, Unix time) or durations (`s_*`).

    The per-token fields are flat buffers (buffer protocol), never lists of Python integers.
    """

    lease: int
    group: int
    task: str
    attempt: int
    token_ids: "array[int]"  # array('i'), [T]
    sampled: bytearray  # 0 or 1, [T]
    logprobs: "array[float]"  # array('f'), [T], of the distribution sampled from; 0 where not sampled
    version_runs: list[VersionRun]
    spans: list[Span]
    outcome: Outcome
    reward: float | None = None  # None: not scored
    reward_parts: dict[str, float] = msgspec.field(default_factory=dict)
    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    t_leased: float = 0.0
    t_first_token: float = 0.0
    t_done: float = 0.0
    s_generate: float = 0.0
    s_tool: float = 0.0
    s_wait: float = 0.0
    detail: bytes | None = None  # msgspec JSON of `TrajectoryDetail`


class TrajectoryDetail(msgspec.Struct, omit_defaults=True):
    """What a person wants to read of a trajectory: the messages as the agent saw them, and the error that ended it."""

    messages: list[dict[str, object]] = msgspec.field(default_factory=list)
    error: str = ""
