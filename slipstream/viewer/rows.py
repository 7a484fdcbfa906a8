"""What the page knows of a trajectory: a line to list and filter by, and its tokens.

Invariant: numbers of tokens are whole ten-thousandths, over the sampled tokens in the order of the stream; null is a
number that was not recorded, or is not finite.
"""

# pyarrow has no types.
# pyright: standard, reportMissingTypeStubs=false

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from slipstream.observe.steps import Learnt
from slipstream.queue.tasks import is_heldout
from slipstream.queue.wire import SPAN_KINDS, bits, versions
from slipstream.viewer.pieces import Cluster, Pieces
from slipstream.viewer.story import Story

SCALE = 10_000
SNIPPET = 160  # characters of a question or an answer in the list
SEARCHED = 8_000  # characters of a trajectory that the search looks into

Numbers = list[int | None]


class Line(msgspec.Struct):
    """A trajectory in the list."""

    lease: int
    group: int
    heldout: bool
    task: str
    attempt: int
    outcome: str
    fate: str
    reward: float | None
    turns: int
    calls: int
    errors: int
    tools: list[str]
    sampled: int
    tokens: int
    step: int | None
    stale: int | None  # of its oldest sampled token, when its fate was decided
    question: str
    answer: str


class Tokens(msgspec.Struct):
    """A trajectory in full."""

    lease: int
    ids: list[int]
    clusters: list[Cluster]
    spans: list[tuple[str, int, int, int]]  # kind, turn, start, length
    runs: list[tuple[int, int]]  # length, version
    engine: Numbers
    learner: Numbers | None
    weights: Numbers | None
    kept: str | None  # a 0 or 1 for each sampled token
    judged: int | None
    fate: dict[str, int]  # sampled tokens
    advantage: float | None
    parts: dict[str, float | None]
    seconds: dict[str, float]
    error: str


class _Function(msgspec.Struct):
    name: str = ""


class _Call(msgspec.Struct):
    function: _Function = msgspec.field(default_factory=_Function)


class _Message(msgspec.Struct):
    role: str = ""
    content: Any = None
    tool_calls: list[_Call] | None = None


class _Detail(msgspec.Struct):
    messages: list[_Message] = []
    error: str = ""


def shown(row: Any, story: Story, learnt: Learnt | None, pieces: Pieces) -> tuple[Line, Tokens, str]:
    """`row`: a record batch of one trajectory. The last is what the search looks into."""
    value = {name: row.column(name)[0].as_py() for name in _PLAIN}
    ids: list[int] = row.column("token_ids")[0].values.to_numpy().tolist()
    sampled = bits(row.column("sampled")).astype(bool)
    of_sampled = versions(row)[sampled]
    detail = _detail(value["detail"])
    spans = [(str(SPAN_KINDS[s["kind"]]), s["turn"], s["start"], s["length"]) for s in value["spans"]]
    question, answer = _question(detail), _answer(detail)
    stale = None if story.judged is None or not len(of_sampled) else max(0, story.judged - int(of_sampled.min()))
    line = Line(
        lease=value["lease"],
        group=value["group"],
        heldout=is_heldout(value["group"]),
        task=value["task"],
        attempt=value["attempt"],
        outcome=value["outcome"],
        fate=story.named(value["group"]),
        reward=_finite(value["reward"]),
        turns=value["turns"],
        calls=value["tool_calls"],
        errors=value["tool_errors"],
        tools=sorted({call.function.name for message in detail.messages for call in message.tool_calls or []}),
        sampled=len(of_sampled),
        tokens=len(ids),
        step=story.step,
        stale=stale,
        question=question[:SNIPPET],
        answer=answer[:SNIPPET],
    )
    logprobs = row.column("logprobs")[0].values.to_numpy()
    tokens = Tokens(
        lease=value["lease"],
        ids=ids,
        clusters=pieces.clusters(ids),
        spans=spans,
        runs=[(run["length"], run["version"]) for run in value["version_runs"]],
        engine=_scaled(logprobs[sampled]),
        learner=None if learnt is None else _scaled(learnt.logprobs),
        weights=None if learnt is None else _scaled(learnt.weights),
        kept=None if learnt is None else "".join("01"[flag] for flag in learnt.kept.tolist()),
        judged=story.judged,
        fate=_counts(story),
        advantage=None if learnt is None else _finite(learnt.advantage),
        parts={name: _finite(part) for name, part in value["reward_parts"]},
        seconds={
            "generate": value["s_generate"],
            "tools": value["s_tool"],
            "wait": value["s_wait"],
            "all": max(0.0, value["t_done"] - value["t_leased"]),
        },
        error=detail.error,
    )
    said = pieces.text(ids[spans[0][3] if spans and spans[0][0] == "prompt" else 0 :])
    return line, tokens, f"{value['task']}\n{question}\n{said}"[:SEARCHED]


_PLAIN = (
    *("lease", "group", "task", "attempt", "outcome", "reward", "reward_parts", "turns", "tool_calls", "tool_errors"),
    *("spans", "version_runs", "t_leased", "t_done", "s_generate", "s_tool", "s_wait", "detail"),
)


def _scaled(values: np.ndarray) -> Numbers:
    """-0.12345 is -1235."""
    finite = np.isfinite(values)
    whole = np.rint(np.where(finite, values, 0).astype(np.float64).clip(-1e6, 1e6) * SCALE).astype(np.int64).tolist()
    if finite.all():
        return whole
    return [number if there else None for number, there in zip(whole, finite.tolist(), strict=True)]


def _counts(story: Story) -> dict[str, int]:
    if story.fate is None:
        return {}
    counts = msgspec.to_builtins(story.fate)
    return {name: count for name, count in counts.items() if name not in ("lease", "outcome") and count}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _detail(raw: bytes | None) -> _Detail:
    """Empty when there is none, or an agent of the user's own kept messages of another shape."""
    if raw:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeError):
            return msgspec.json.decode(raw, type=_Detail)
        with contextlib.suppress(msgspec.MsgspecError, UnicodeError):
            return _Detail(error=msgspec.json.decode(raw, type=_Error).error)
    return _Detail()


class _Error(msgspec.Struct):
    error: str = ""


def _question(detail: _Detail) -> str:
    """The last that was said before the model spoke."""
    asked = ""
    for message in detail.messages:
        if message.role == "assistant":
            break
        asked = _text(message.content)
    return asked


def _answer(detail: _Detail) -> str:
    last = detail.messages[-1] if detail.messages else _Message()
    return _text(last.content) if last.role == "assistant" else ""


def _text(content: Any) -> str:
    return " ".join(" ".join(_texts(content)).split())


def _texts(content: Any) -> Iterator[str]:
    """A message's content is a text, or parts of which some have a text."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from (part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
