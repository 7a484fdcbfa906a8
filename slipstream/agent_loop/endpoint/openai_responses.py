"""OpenAI's responses: items instead of messages, and conversations that the server remembers."""

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
    tool_result,
    tool_shown,
)
from slipstream.agent_loop.endpoint.openai_chat import checked, error, limit
from slipstream.agent_loop.text import Messages


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


class _Item(msgspec.Struct):
    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | list[_Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: str | list[_Part] = ""


class _Tool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Format(msgspec.Struct):
    type: str = "text"


class _Text(msgspec.Struct):
    format: _Format | None = None


class _Request(msgspec.Struct):
    input: str | list[_Item]
    model: str = ""
    instructions: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = "auto"
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    text: _Text | None = None
    stream: bool | None = None
    background: bool | None = None


def _words(content: str | list[_Part] | None) -> str:
    if isinstance(content, list):
        if other := next((part for part in content if not part.type.endswith("text") or part.text is None), None):
            raise Refused(400, f"a content part of type {other.type!r}: only text is supported")
        return "".join(part.text or "" for part in content)
    return content or ""


def _messages(items: list[_Item]) -> Messages:
    """What the model said between two messages of others is one turn. A result may be of a call made earlier."""
    messages: Messages = []
    text, calls = "", list[CallMade]()
    for item in [*items, None]:
        if item is not None and item.type == "reasoning":
            continue
        if item is not None and item.type == "function_call":
            calls.append(CallMade(item.call_id, item.name, item.arguments))
            continue
        if item is not None and item.role == "assistant":
            text += _words(item.content)
            continue
        if text or calls:
            messages.append(assistant(text, calls))
            text, calls = "", []
        if item is None:
            break
        if item.type == "function_call_output":
            output = _words(item.output)
            messages.append(tool_result(item.call_id, output))
        else:
            role = "system" if item.role in ("system", "developer") else item.role
            messages.append({"role": role, "content": _words(item.content)})
    return messages


def read(body: bytes) -> Asked:
    request: _Request = decoded(body, _Request)
    if request.tool_choice not in ("auto", "none", None):
        raise Refused(400, "tool_choice is auto or none while training", "unsupported_parameter")
    if request.text is not None and request.text.format is not None and request.text.format.type != "text":
        raise Refused(400, "text.format is text while training", "unsupported_parameter")
    if request.background:
        raise Refused(400, "background is not supported: wait for the answer", "unsupported_parameter")
    items = [_Item(content=request.input)] if isinstance(request.input, str) else request.input
    system: Messages = [{"role": "system", "content": request.instructions}] if request.instructions else []
    tools = [] if request.tool_choice == "none" else request.tools or []
    if other := next((each for each in tools if each.type != "function"), None):
        raise Refused(400, f"a tool of type {other.type!r} would run elsewhere: leave it out", "unsupported_parameter")
    return Asked(
        messages=checked([*system, *_messages(items)]),
        tools=[tool_shown(each.name, each.description, each.parameters) for each in tools],
        most=limit(request.max_output_tokens),
        stream=bool(request.stream),
        model=request.model,
        previous=request.previous_response_id or "",
    )


def reply_id(reply: Reply) -> str:
    return f"resp_{reply.number}"


def _items(reply: Reply, status: str = "completed") -> list[Body]:
    found: list[Body] = []
    if reply.text or not reply.calls:
        part = {"type": "output_text", "text": reply.text, "annotations": []}
        identity = f"msg_{reply.number}"
        found.append({"type": "message", "id": identity, "role": "assistant", "status": status, "content": [part]})
    for at, call in enumerate(reply.calls):
        found.append(
            {
                "type": "function_call",
                "id": f"fc_{reply.number}_{at}",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": status,
            }
        )
    return found


def answer(reply: Reply, asked: Asked) -> Body:
    status = "incomplete" if reply.cut else "completed"
    return {
        "id": reply_id(reply),
        "object": "response",
        "created_at": reply.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if reply.cut else None,
        "instructions": None,
        "metadata": {},
        "model": asked.model,
        "output": _items(reply, status),
        "parallel_tool_calls": True,
        "previous_response_id": asked.previous or None,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": reply.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.sampled_tokens,
        },
    }


def events(reply: Reply, asked: Asked) -> list[bytes]:
    whole = answer(reply, asked)
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    found: list[Body] = [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]
    for at, item in enumerate(whole["output"]):
        found += _item_events(at, item)
    found.append({"type": f"response.{whole['status']}", "response": whole})
    return [event({**body, "sequence_number": number}, body["type"]) for number, body in enumerate(found)]


def _item_events(at: int, item: Body) -> list[Body]:
    where: Body = {"item_id": item["id"], "output_index": at}
    if item["type"] == "message":
        (part,) = item["content"]
        place = {**where, "content_index": 0}
        empty = {**item, "status": "in_progress", "content": []}
        inner: list[Body] = [
            {"type": "response.content_part.added", **place, "part": {**part, "text": ""}},
            {"type": "response.output_text.delta", **place, "delta": part["text"], "logprobs": []},
            {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []},
            {"type": "response.content_part.done", **place, "part": part},
        ]
    else:
        empty = {**item, "status": "in_progress", "arguments": ""}
        inner = [
            {"type": "response.function_call_arguments.delta", **where, "delta": item["arguments"]},
            {
                "type": "response.function_call_arguments.done",
                **where,
                "name": item["name"],
                "arguments": item["arguments"],
            },
        ]
    return [
        {"type": "response.output_item.added", "output_index": at, "item": empty},
        *inner,
        {"type": "response.output_item.done", "output_index": at, "item": item},
    ]


API = Api(read=read, answer=answer, events=events, error=error, remembered_as=reply_id)
