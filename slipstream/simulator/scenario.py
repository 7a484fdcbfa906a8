"""What is simulated: every knob of the virtual run, with a sentence that says what it stands for.

Invariant: a Scenario that `read_scenario` returns can be run: its values are in range and agree with each other.
"""

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import FieldInfo, fields

from slipstream.errors import UserError
from slipstream.simulator.durations import FORMS, Durations, constant, parse

TOKENS = 1000  # of a trajectory of mean latency, where only its latency is given


class Scenario(msgspec.Struct, kw_only=True, frozen=True):
    batch: Annotated[int, Meta(ge=1, description="groups in one optimizer step")] = 32
    depth: Annotated[
        Annotated[float, Meta(ge=0)] | Literal["auto"],
        Meta(description="batches that generation may run ahead; auto: staleness.depth = auto finds it"),
    ] = 2.0
    cutoff: Annotated[int, Meta(ge=0, description="no token older than this many versions is trained on")] = 8
    selection: Annotated[
        Literal["fifo", "window", "oldest", "fair"],
        Meta(description="which ready groups the learner gets: queue.selection"),
    ] = "oldest"
    group: Annotated[int, Meta(ge=1, description="trajectories of a group")] = 8
    batches: Annotated[int, Meta(ge=1, description="optimizer steps to simulate; the first tenth is not counted")] = 500
    rollouters: Annotated[int, Meta(ge=1, description="engines")] = 1
    concurrency: Annotated[int, Meta(ge=1, description="trajectories that one engine runs at once")] = 64
    latency: Annotated[Durations | None, Meta(description="seconds of a trajectory, whatever the load")] = None
    tokens: Annotated[
        Durations | None, Meta(description="or: sampled tokens of a trajectory; decode_s is their pace")
    ] = None
    decode_s: Annotated[float, Meta(gt=0, description="seconds of a decode step (a token of each running request)")] = (
        0.02
    )
    decode_request_s: Annotated[
        float, Meta(ge=0, description="seconds that each request adds to an engine's decode step")
    ] = 0.0
    prefill_s: Annotated[float, Meta(ge=0, description="seconds an engine stands still for a turn's new tokens")] = 0.0
    turns: Annotated[Durations, Meta(description="assistant turns of a trajectory")] = constant(1.0)
    tool_s: Annotated[Durations, Meta(description="seconds of the tools between two turns")] = constant(0.0)
    in_flight: Annotated[
        bool | None,
        Meta(description="running trajectories go on with new weights; default: true with tokens, false with latency"),
    ] = None
    step_s: Annotated[Durations, Meta(description="seconds of a step once its batch is complete")] = constant(1.0)
    group_s: Annotated[float, Meta(ge=0, description="seconds of the step's work on a group, done as it arrives")] = 0.0
    publish_s: Annotated[float, Meta(ge=0, description="seconds until new weights are with the rollouters")] = 0.0
    sync_s: Annotated[float, Meta(ge=0, description="seconds an engine stands still to load new weights")] = 0.0
    zero_signal: Annotated[float, Meta(ge=0, lt=1, description="share of groups whose rewards are all equal")] = 0.0
    failure: Annotated[float, Meta(ge=0, lt=1, description="share of trajectories that end as engine_failed")] = 0.0
    crash_s: Annotated[float, Meta(ge=0, description="mean seconds between two crashes of one rollouter; 0: none")] = (
        0.0
    )
    restart_s: Annotated[float, Meta(ge=0, description="seconds a crashed rollouter is away")] = 30.0
    seed: Annotated[int, Meta(ge=0, lt=2**32, description="decides all that is drawn")] = 0

    @property
    def updates_in_flight(self) -> bool:
        return self.latency is None if self.in_flight is None else self.in_flight

    @property
    def set_depth(self) -> float:
        """Of a scenario whose depth is a number, as a run's own always is."""
        assert self.depth != "auto"
        return self.depth

    @property
    def length(self) -> Durations:
        """Tokens of a trajectory; where only seconds are given, so many that a mean one has TOKENS."""
        return self.tokens if self.latency is None and self.tokens is not None else self._seconds

    @property
    def _seconds(self) -> Durations:
        assert self.latency is not None  # one of both is given
        return self.latency

    @property
    def slots(self) -> int:
        return self.rollouters * self.concurrency


def read_scenario(words: Sequence[str], start: Scenario | None = None) -> Scenario:
    """`key=value` words, over `start`. Raises UserError."""
    known = {field.name: field for field in fields(Scenario)}
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}=VALUE?" if near else f"write KEY=VALUE with one of {', '.join(known)}"
            raise UserError(f"{word!r}: is no key of the simulator; {hint}")
        values[key] = _value(known[key], text)
    scenario = msgspec.structs.replace(start or Scenario(), **values)
    if "latency" in values and "tokens" not in values:
        scenario = msgspec.structs.replace(scenario, tokens=None)
    elif "tokens" in values and "latency" not in values:
        scenario = msgspec.structs.replace(scenario, latency=None)
    if (scenario.latency is None) == (scenario.tokens is None):
        raise UserError("latency, tokens: give one of them, such as latency=lognormal:1.0,1.0 (mean, sigma)")
    for key in ("latency", "tokens"):
        if (times := getattr(scenario, key)) is not None and times.mean() <= 0:
            raise UserError(f"{key}: its mean is 0; write a distribution with a mean above 0")
    return scenario


def _value(field: FieldInfo, text: str) -> Any:
    if is_times(field):
        return parse(text, field.name)
    try:
        return msgspec.convert(text, field.type, strict=False)
    except msgspec.ValidationError as error:
        said = str(error)
        raise UserError(f"{field.name} = {text!r}: {said[:1].lower()}{said[1:]}; {_meaning(field)}") from error


def is_times(field: FieldInfo) -> bool:
    return "Durations" in str(field.type)


def _meaning(field: FieldInfo) -> str:
    return next(meta.description or "" for meta in field.type.__metadata__ if isinstance(meta, Meta))


def key_help() -> str:
    """All keys with defaults and meanings, for --help and the docs."""
    lines: list[str] = []
    for field in fields(Scenario):
        default = field.default
        shown = f"{default.mean():g}" if isinstance(default, Durations) else "" if default is None else str(default)
        name = f"{field.name}={shown}"
        lines.append(f"  {name:24} {_meaning(field)}")
    return "keys:\n" + "\n".join(lines) + f"\n\na distribution is {FORMS}"
