"""Tool calls in what a model said, Hermes style: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Invariant: every attempt at a call comes out as exactly one ToolCall, good or bad; a bad one has a reason that the model
can correct, and is never run. Calls inside `<think>` are thoughts.
"""

import re

import msgspec

MOST_CALLS = 16  # of one turn; what is over is answered with one error

_THINK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


class ToolCall(msgspec.Struct, frozen=True):
    """`arguments` is a JSON object as text. `problem`: why this call cannot be run ('' when it can)."""

    name: str
    arguments: str
    problem: str = ""


class Parsed(msgspec.Struct, frozen=True):
    """A sampled turn. `content` is its text without calls and thoughts."""

    content: str
    calls: list[ToolCall]


class _Body(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def parse_hermes(text: str) -> Parsed:
    """Content and calls of one turn's text (its stop token already gone)."""
    spoken = _THINK.sub("", text)
    calls = [_call(match) for match in _CALL.finditer(spoken)]
    if len(calls) > MOST_CALLS:
        over = ToolCall("", "{}", f"{len(calls)} calls in one turn; the first {MOST_CALLS} were run")
        calls = [*calls[:MOST_CALLS], over]
    return Parsed(_CALL.sub("", spoken).strip(), calls)


def _call(match: re.Match[str]) -> ToolCall:
    body = match.group(1).strip()
    if not match.group(0).endswith("</tool_call>"):
        return ToolCall("", "{}", "a <tool_call> was not closed with </tool_call>")
    try:
        call = msgspec.json.decode(body, type=_Body)
    except msgspec.DecodeError as error:
        return ToolCall("", "{}", f"the call is not one JSON object with a name and arguments: {error}")
    arguments = bytes(call.arguments).strip()
    if arguments.startswith(b'"'):  # some models write the object as a string; it is decoded once, not again and again
        arguments = msgspec.json.decode(arguments, type=str).strip().encode()
    if not arguments.startswith(b"{"):
        return ToolCall(call.name, "{}", "arguments must be a JSON object, such as {}")
    return ToolCall(call.name, arguments.decode())
