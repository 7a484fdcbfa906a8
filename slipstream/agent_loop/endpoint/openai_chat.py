"""OpenAI's chat completions."""

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
from slipstream.agent_loop.text import Messages


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: str = "{}"
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Call(msgspec.Struct):
    id: str
    function: _Function


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str = ""


class _Tool(msgspec.Struct):
    function: _Function


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Format(msgspec.Struct):
    type: str = "text"


class _Request(msgspec.Struct):
    messages: list[_Message]
    model: str = ""
    tools: list[_Tool] | None = None
    tool_choice: Any = "auto"
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    stop: Any = None
    logprobs: bool | None = None
    functions: Any = None
    response_format: _Format | None = None


def text_of(content: str | list[_Part] | None, parts: tuple[str, ...] = ("text",)) -> str:
    if isinstance(content, list):
        if other := next((part for part in content if part.type not in parts or part.text is None), None):
            raise Refused(400, f"a content part of type {other.type!r}: only text is supported")
        return "".join(part.text or "" for part in content)
    return content or ""


def read(body: bytes) -> Asked:
    request: _Request = decoded(body, _Request)
    if request.tool_choice not in ("auto", "none", None):
        raise Refused(400, "tool_choice is auto or none while training", "unsupported_parameter")
    if request.response_format is not None and request.response_format.type != "text":
        raise Refused(400, "response_format is text while training", "unsupported_parameter")
    refuse(
        n=None if request.n == 1 else request.n,
        stop=request.stop,
        logprobs=request.logprobs,
        functions=request.functions,
    )
    messages: Messages = []
    for message in request.messages:
        text = text_of(message.content)
        if message.role == "tool":
            messages.append(tool_result(message.tool_call_id, text))
        elif message.role == "assistant":
            calls = [
                CallMade(each.id, each.function.name, each.function.arguments) for each in message.tool_calls or []
            ]
            messages.append(assistant(text, calls))
        else:
            messages.append({"role": "system" if message.role == "developer" else message.role, "content": text})
    functions = [] if request.tool_choice == "none" else [each.function for each in request.tools or []]
    return Asked(
        messages=checked(messages),
        tools=[tool_shown(each.name, each.description, each.parameters) for each in functions],
        most=limit(request.max_completion_tokens or request.max_tokens),
        stream=bool(request.stream),
        usage=request.stream_options is not None and request.stream_options.include_usage,
        model=request.model,
    )


def checked(messages: Messages) -> Messages:
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise Refused(400, "messages end with a user's or a tool's message: the model's turn is not begun for it")
    return messages


def limit(most: int | None) -> int | None:
    if most is not None and most < 1:
        raise Refused(400, f"at most {most} tokens: ask for 1 or more")
    return most


def reply_id(reply: Reply) -> str:
    return f"chatcmpl-{reply.number}"


def _call(call: CallMade) -> Body:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish(reply: Reply) -> str:
    return "length" if reply.cut else "tool_calls" if reply.calls else "stop"


def _usage(reply: Reply) -> Body:
    total = reply.prompt_tokens + reply.sampled_tokens
    return {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.sampled_tokens, "total_tokens": total}


def answer(reply: Reply, asked: Asked) -> Body:
    message: Body = {"role": "assistant", "content": reply.text or None if reply.calls else reply.text}
    if reply.calls:
        message["tool_calls"] = [_call(each) for each in reply.calls]
    return {
        "id": reply_id(reply),
        "object": "chat.completion",
        "created": reply.created,
        "model": asked.model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(reply)}],
        "usage": _usage(reply),
    }


def events(reply: Reply, asked: Asked) -> list[bytes]:
    head: Body = {
        "id": reply_id(reply),
        "object": "chat.completion.chunk",
        "created": reply.created,
        "model": asked.model,
    }

    def chunk(delta: Body, finish: str | None = None) -> bytes:
        return event({**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]})

    found = [chunk({"role": "assistant", "content": ""})]
    if reply.text:
        found.append(chunk({"content": reply.text}))
    found += [chunk({"tool_calls": [{"index": at, **_call(each)}]}) for at, each in enumerate(reply.calls)]
    found.append(chunk({}, _finish(reply)))
    if asked.usage:
        found.append(event({**head, "choices": [], "usage": _usage(reply)}))
    return [*found, b"data: [DONE]\n\n"]


def error(refused: Refused) -> Body:
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    return {"error": {"message": refused.says, "type": kind, "param": None, "code": refused.code or None}}


API = Api(read=read, answer=answer, events=events, error=error)
