"""What a request of any API comes to, and what the model's answer is before an API writes it.

Invariant: an Asked is complete: its messages are as chat templates take them, with one assistant message a turn; what
we do not do is refused here, by name, and never left out silently.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from slipstream.agent_loop.text import Messages

Body = dict[str, Any]  # JSON as the API writes it


class Refused(Exception):
    """A request that is answered with an error. `code` is OpenAI's word for it, where it has one."""

    def __init__(self, status: int, says: str, code: str = "") -> None:
        super().__init__(says)
        self.status, self.says, self.code = status, says, code


class ToolShown(msgspec.Struct):
    """A tool that the agent runs itself."""

    name: str
    schema: dict[str, Any]


class Asked(msgspec.Struct, kw_only=True):
    messages: Messages
    tools: list[ToolShown]
    most: int | None = None  # tokens of the answer
    stream: bool = False
    usage: bool = True  # whether a streamed answer tells what it used
    model: str = ""
    previous: str = ""  # the answer that these messages follow, where the API lets us remember


class CallMade(msgspec.Struct, frozen=True):
    id: str
    name: str
    arguments: str  # a JSON object


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    number: int  # of the turn, in its trajectory
    text: str
    calls: list[CallMade]
    cut: bool
    prompt_tokens: int
    sampled_tokens: int
    created: int  # Unix time


class Api(msgspec.Struct, frozen=True):
    """One API: reads a request, writes an answer, a stream of events, an error."""

    read: Callable[[bytes], Asked]
    answer: Callable[[Reply, Asked], Body]
    events: Callable[[Reply, Asked], list[bytes]]
    error: Callable[[Refused], Body]
    remembered_as: Callable[[Reply], str] | None = None  # where a later request may say what it follows


def tool_shown(name: str, description: str | None, parameters: dict[str, Any] | None) -> ToolShown:
    schema = {"type": "object", "properties": {}, **(parameters or {})}
    return ToolShown(name, {"name": name, "description": description or "", "parameters": schema})


def assistant(text: str, calls: list[CallMade]) -> dict[str, Any]:
    """A turn of the model. Raises Refused where the arguments of a call are no object."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _object(call)}}
            for call in calls
        ]
    return message


def _object(call: CallMade) -> str:
    arguments = call.arguments or "{}"
    if not is_object(arguments):
        raise Refused(400, f"the arguments of the call {call.id} of {call.name} are no JSON object: {arguments[:200]}")
    return arguments


def is_object(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return True


def tool_result(identity: str, text: str) -> dict[str, Any]:
    """Of a call made before; `name_results` finds out of which."""
    return {"role": "tool", "content": text, "tool_call_id": identity}


def name_results(messages: Messages) -> None:
    """Templates want a result's tool by its name. Raises Refused where there is no such call before it."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or []}
        if message["role"] != "tool":
            continue
        if message["tool_call_id"] not in names:
            identity = message["tool_call_id"]
            raise Refused(400, f"a tool's result names the call {identity!r}, which no message before it has")
        message["name"] = names[message["tool_call_id"]]


def decoded(body: bytes, kind: type[Any]) -> Any:
    """Raises Refused, naming the field that is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Refused(400, f"the request cannot be read: {error}") from error


def refuse(**given: object) -> None:
    """Options that would change what is sampled from, or that one stream cannot be cut into."""
    for name, value in given.items():
        if value not in (None, False, [], ""):
            raise Refused(400, f"{name} is not supported while training: leave it out", "unsupported_parameter")


def event(body: Body, name: str = "") -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(body) + b"\n\n"
