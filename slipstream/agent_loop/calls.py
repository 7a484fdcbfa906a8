"""Tool calls in what a model said.

Invariant: every attempt at a call comes out as exactly one ToolCall, good or bad; a bad one has a problem that the
model can correct, and is never run. Calls inside `<think>` are thoughts: they are not run either, and are a problem
only when the turn says nothing else.
"""

import re
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from slipstream.tools import Shown

MOST_CALLS = 32  # of one turn; what is over is answered with one error

_THINK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


class ToolCall(msgspec.Struct, frozen=True):
    """`arguments` is a JSON object as text. `problem`: why this call cannot be run ('' when it can)."""

    name: str
    arguments: str
    problem: str = ""
    id: str = ""  # where the model's format has one


class Parsed(msgspec.Struct, frozen=True):
    """A sampled turn. `content` is its text without calls and thoughts."""

    content: str
    tool_calls: list[ToolCall]

    @property
    def errors(self) -> list[str]:
        return [call.problem for call in self.tool_calls if call.problem]


class Reader(Protocol):
    """A format that calls are written in."""

    def calls(self, text: str, tools: Sequence[Shown]) -> list[ToolCall]: ...

    def content(self, text: str) -> str: ...


def parse_turn(text: str, reader: Reader, tools: Sequence[Shown], *, opened: bool = False) -> Parsed:
    """Content and calls of one turn's text (its stop token already gone). `opened`: the prompt began with <think>."""
    text = "<think>" + text if opened else text
    spoken = _THINK.sub("", text)
    calls, content = reader.calls(spoken, tools), reader.content(spoken)
    if not calls and not content and reader.calls(text.replace("<think>", ""), tools):
        calls = [bad("a call inside <think> is not run; close </think> before it")]
    return Parsed(content, capped(calls))


def capped(calls: list[ToolCall]) -> list[ToolCall]:
    """The first calls of a turn, and one problem for all that is over."""
    if len(calls) <= MOST_CALLS:
        return calls
    return [*calls[:MOST_CALLS], bad(f"{len(calls)} calls in one turn; only the first {MOST_CALLS} were taken")]


def bad(problem: str, name: str = "") -> ToolCall:
    return ToolCall(name, "{}", problem)


def checked(name: str, arguments: str, identity: str = "") -> ToolCall:
    """A call whose arguments are one JSON object, or a problem."""
    if not arguments.startswith("{"):
        return bad('the arguments are not a JSON object, such as {"key": "value"}', name)
    return ToolCall(name, arguments, id=identity)


class _Body(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"")
    id: str = ""


def one_object(text: str, key: Literal["arguments", "parameters"] = "arguments") -> ToolCall:
    """A call that is written as one JSON object with a name and, under `key`, its arguments."""
    try:
        call = msgspec.json.decode(text.strip(), type=_Body)
        given = call.parameters if key == "parameters" else call.arguments
        arguments = bytes(given).strip() or b"{}"
        if arguments.startswith(b'"'):  # some models write the object as a string: decoded once, not again and again
            arguments = msgspec.json.decode(arguments, type=str).strip().encode()
        return checked(call.name, arguments.decode(), call.id)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return bad(f"the call is not one JSON object with a name and {key}: {error}")
