"""Anthropic's messages."""

from typing import Any, Literal

import msgspec

from slipstream.agent_loop.endpoint.asked import (
    Api,
    Asked,
    Body,
    CallMade,
    Refused,
    Reply,
    assistant,
    decoded,
    event,
    refuse,
    tool_result,
    tool_shown,
)
from slipstream.agent_loop.endpoint.openai_chat import checked, limit
from slipstream.agent_loop.text import Messages

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 500: "api_error"}


class _Block(msgspec.Struct):
    type: str
    text: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: "str | list[_Block] | None" = None


class _Message(msgspec.Struct):
    role: Literal["user", "assistant"]
    content: str | list[_Block]


class _Tool(msgspec.Struct):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = "custom"


class _Choice(msgspec.Struct):
    type: str = "auto"


class _Request(msgspec.Struct):
    messages: list[_Message]
    max_tokens: int
    model: str = ""
    system: str | list[_Block] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None


def _text(content: str | list[_Block] | None) -> str:
    """Thoughts that a client sends back are not the model's to read again."""
    if isinstance(content, list):
        if other := next((block for block in content if block.type not in ("text", "thinking")), None):
            raise Refused(400, f"a content block of type {other.type!r}: only text is supported here")
        return "".join(block.text for block in content if block.type == "text")
    return content or ""


def _messages_of(message: _Message) -> Messages:
    """A user's blocks in a row of one kind are one message; so are those of an assistant's turn."""
    blocks = [_Block("text", message.content)] if isinstance(message.content, str) else message.content
    if message.role == "assistant":
        calls = [
            CallMade(block.id, block.name, msgspec.json.encode(block.input).decode())
            for block in blocks
            if block.type == "tool_use"
        ]
        return [assistant(_text([block for block in blocks if block.type != "tool_use"]), calls)]
    results = [tool_result(block.tool_use_id, _text(block.content)) for block in blocks if block.type == "tool_result"]
    rest = [block for block in blocks if block.type != "tool_result"]
    return [*results, {"role": "user", "content": _text(rest)}] if rest or not results else results


def read(body: bytes) -> Asked:
    request: _Request = decoded(body, _Request)
    choice = request.tool_choice.type if request.tool_choice else "auto"
    if choice not in ("auto", "none"):
        raise Refused(400, "tool_choice is auto or none while training")
    refuse(stop_sequences=request.stop_sequences)
    messages: Messages = [{"role": "system", "content": _text(request.system)}] if request.system else []
    for message in request.messages:
        messages += _messages_of(message)
    tools = [] if choice == "none" else request.tools or []
    if other := next((each for each in tools if each.type not in ("custom", None)), None):
        raise Refused(400, f"the tool {other.name} is of type {other.type!r}, which would run elsewhere: leave it out")
    return Asked(
        messages=checked(messages),
        tools=[tool_shown(each.name, each.description, each.input_schema) for each in tools],
        most=limit(request.max_tokens),
        stream=bool(request.stream),
        model=request.model,
    )


def reply_id(reply: Reply) -> str:
    return f"msg_{reply.number}"


def _finish(reply: Reply) -> str:
    return "max_tokens" if reply.cut else "tool_use" if reply.calls else "end_turn"


def _blocks(reply: Reply) -> list[Body]:
    found: list[Body] = [{"type": "text", "text": reply.text}] if reply.text or not reply.calls else []
    for call in reply.calls:
        found.append({"type": "tool_use", "id": call.id, "name": call.name, "input": msgspec.Raw(call.arguments)})
    return found


def answer(reply: Reply, asked: Asked) -> Body:
    return {
        "id": reply_id(reply),
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "content": _blocks(reply),
        "stop_reason": _finish(reply),
        "stop_sequence": None,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.sampled_tokens},
    }


def events(reply: Reply, asked: Asked) -> list[bytes]:
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": 0}
    begun = {**answer(reply, asked), "content": [], "stop_reason": None, "usage": usage}
    found: list[Body] = [{"type": "message_start", "message": begun}]
    for at, block in enumerate(_blocks(reply)):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            text = bytes(block["input"]).decode()
            empty, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": text}
        found += [
            {"type": "content_block_start", "index": at, "content_block": empty},
            {"type": "content_block_delta", "index": at, "delta": delta},
            {"type": "content_block_stop", "index": at},
        ]
    ended = {"stop_reason": _finish(reply), "stop_sequence": None}
    found.append({"type": "message_delta", "delta": ended, "usage": {"output_tokens": reply.sampled_tokens}})
    found.append({"type": "message_stop"})
    return [event(body, str(body["type"])) for body in found]


def error(refused: Refused) -> Body:
    kind = KINDS.get(refused.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": refused.says}}


API = Api(read=read, answer=answer, events=events, error=error)
