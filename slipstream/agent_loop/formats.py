"""How chat templates write tool calls, and how to read what a model makes of it.

Invariant: every attempt at a call in a turn's text comes out as exactly one ToolCall, good or bad, in the order in
which they stand; what is left is the turn's content. Written after the templates that models are published with.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from slipstream.agent_loop.calls import ToolCall, bad, checked, one_object
from slipstream.tools import Shown

Read = Callable[[str, Sequence[Shown]], list[ToolCall]]  # of one match's text


class Format(msgspec.Struct, frozen=True):
    """`mark`: what only this format's template writes around a call. `attempt`: a call, or the beginning of one."""

    name: str
    mark: re.Pattern[str]
    attempt: re.Pattern[str]
    read: Read

    def calls(self, text: str, tools: Sequence[Shown]) -> list[ToolCall]:
        return [call for match in self.attempt.finditer(text) for call in self.read(match.group(0), tools)]

    def content(self, text: str) -> str:
        return self.attempt.sub("", text).strip()


def detect(rendered: str) -> Format:
    """The format of a turn with a call as a template renders it; Hermes where none is to be seen."""
    return next((each for each in FORMATS if each.mark.search(rendered)), HERMES)


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.DOTALL)


# -- <tool_call>{"name": ..., "arguments": {...}}</tool_call> (Hermes, Qwen)


def _hermes(text: str, tools: Sequence[Shown]) -> list[ToolCall]:
    if not text.endswith("</tool_call>"):
        return [bad("a <tool_call> was not closed with </tool_call>")]
    return [one_object(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))]


_TAGGED = _pattern(r"<tool_call>.*?(?:</tool_call>|(?=<tool_call>)|\Z)")

# -- <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call> (Qwen3-Coder, Qwen3.5)

_FUNCTION = _pattern(r"<function=([^>\s]+)>(.*)</function>\s*(?:</tool_call>)?\s*\Z")
_PARAMETER = _pattern(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>")


def _coder(text: str, tools: Sequence[Shown]) -> list[ToolCall]:
    found = _FUNCTION.search(text)
    if found is None:
        return [bad("a call is <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>")]
    name, body = found.groups()
    if _PARAMETER.sub("", body).strip():
        return [bad("between <function=...> and </function> stand whole <parameter=KEY>...</parameter> alone", name)]
    return [_typed(name, _PARAMETER.findall(body), tools)]


# -- <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call> (GLM)

_ARGUMENT = _pattern(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*")


def _glm(text: str, tools: Sequence[Shown]) -> list[ToolCall]:
    if not text.endswith("</tool_call>"):
        return [bad("a <tool_call> was not closed with </tool_call>")]
    inside = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
    name, key, rest = inside.partition("<arg_key>")
    name = name.strip()
    if _ARGUMENT.sub("", key + rest).strip() or not name or len(name.split()) > 1:
        return [bad("a call is <tool_call>NAME, <arg_key>KEY</arg_key>, <arg_value>VALUE</arg_value>, </tool_call>")]
    return [_typed(name, [(k.strip(), v) for k, v in _ARGUMENT.findall(key + rest)], tools)]


def _typed(name: str, values: list[tuple[str, str]], tools: Sequence[Shown]) -> ToolCall:
    """Values are written bare: text where the schema wants text, else JSON."""
    schema = next((each.schema["parameters"]["properties"] for each in tools if each.name == name), dict[str, Any]())
    if len({key for key, _ in values}) < len(values):
        return bad("a parameter is given twice", name)
    arguments = {key: _bare(value, schema.get(key, {})) for key, value in values}
    return checked(name, json.dumps(arguments, ensure_ascii=False))


def _bare(value: str, schema: dict[str, Any]) -> Any:
    kinds = {each.get("type") for each in schema.get("anyOf", [schema])}
    text = "string" in kinds or any(isinstance(each, str) for each in schema.get("enum", []))
    if text and not ("null" in kinds and value.strip() == "null"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value  # the tool's own check says what it wanted


# -- {"name": ..., "parameters": {...}} and nothing else, several with ; between them (Llama 3)


def _llama(text: str, tools: Sequence[Shown]) -> list[ToolCall]:
    rest = text.strip().removeprefix("<|python_tag|>").strip()
    calls: list[ToolCall] = []
    while rest:
        try:
            _, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            return [*calls, bad('a call is one JSON object {"name": ..., "parameters": {...}}; write ; between two')]
        calls.append(one_object(rest[:end], "parameters"))
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return calls or [bad("there is no call after <|python_tag|>")]


# -- [TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}], or [TOOL_CALLS]NAME[ARGS]{...} (Mistral)

_MISTRAL_ONE = _pattern(r"\s*([^\[\]{}\s]+)\s*(?:\[CALL_ID\]([^\[\s]+)\s*)?(?:\[ARGS\])?\s*(\{.*)")


def _mistral(text: str, tools: Sequence[Shown]) -> list[ToolCall]:
    body = text.removeprefix("[TOOL_CALLS]").strip()
    if found := _MISTRAL_ONE.fullmatch(body):
        name, identity, arguments = found.groups()
        return [_arguments(name, arguments, identity or "")]
    try:
        several = msgspec.json.decode(body, type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        return [bad(f'after [TOOL_CALLS] stands a list of {{"name": ..., "arguments": {{...}}}}: {error}')]
    return [one_object(bytes(each).decode()) for each in several] or [bad("the list after [TOOL_CALLS] is empty")]


# -- <|tool call begin|>NAME<|tool sep|>{...}<|tool call end|> (DeepSeek)

_DEEPSEEK_ONE = _pattern(
    r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)(<｜tool▁call▁end｜>|(?=<｜tool▁call▁begin｜>)|\Z)"
)
_DEEPSEEK_FENCED = _pattern(r"\s*(\S+)\s*```(?:json)?\s*(.*?)\s*```\s*")


def _deepseek(text: str, tools: Sequence[Shown]) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for first, second, end in _DEEPSEEK_ONE.findall(text):
        if not end:
            calls.append(bad("a call was not closed with <｜tool▁call▁end｜>"))
        elif fenced := _DEEPSEEK_FENCED.fullmatch(second):  # the word "function" stands before the separator
            calls.append(_arguments(fenced[1], fenced[2]))
        else:
            calls.append(_arguments(first.strip(), second))
    return calls or [
        bad("a call is <｜tool▁call▁begin｜>, the name, <｜tool▁sep｜>, the arguments, <｜tool▁call▁end｜>")
    ]


# -- <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|> (Kimi K2)

_KIMI_ONE = _pattern(
    r"<\|tool_call_begin\|>(.*?)<\|tool_call_argument_begin\|>(.*?)(<\|tool_call_end\|>|(?=<\|tool_call_begin\|>)|\Z)"
)


def _kimi(text: str, tools: Sequence[Shown]) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for identity, arguments, end in _KIMI_ONE.findall(text):
        name = identity.strip().removeprefix("functions.").rpartition(":")[0]
        if not end:
            calls.append(bad("a call was not closed with <|tool_call_end|>", name))
        elif not name:
            calls.append(bad(f"a call begins with functions.NAME:NUMBER, not {identity.strip()[:100]!r}"))
        else:
            calls.append(_arguments(name, arguments, identity.strip()))
    return calls or [bad("a call is <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}")]


def _arguments(name: str, arguments: str, identity: str = "") -> ToolCall:
    """A name, and arguments that must be a JSON object."""
    try:
        msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        return bad(f"the arguments of {name} are no JSON: {error}", name)
    return checked(name, arguments.strip(), identity)


HERMES = Format("hermes", _pattern(r"<tool_call>\s*\{"), _TAGGED, _hermes)
FORMATS = (
    HERMES,
    Format(
        "qwen3-coder",
        _pattern(r"<function=\w+>"),
        _pattern(
            r"(?:<tool_call>\s*)?<function=.*?(?:</function>\s*</tool_call>|</function>|(?=<tool_call>)|\Z)|"
            + _TAGGED.pattern
        ),
        _coder,
    ),
    Format("glm", _pattern(r"<tool_call>\s*\w+\s*<arg_key>"), _TAGGED, _glm),
    Format("mistral", _pattern(r"\[TOOL_CALLS\]"), _pattern(r"\[TOOL_CALLS\].*?(?=\[TOOL_CALLS\]|\Z)"), _mistral),
    Format(
        "deepseek",
        _pattern(r"<｜tool▁call▁begin｜>"),
        _pattern(r"<｜tool▁calls▁begin｜>.*?(?:<｜tool▁calls▁end｜>|\Z)|<｜tool▁call▁begin｜>.*\Z"),
        _deepseek,
    ),
    Format(
        "kimi",
        _pattern(r"<\|tool_call_begin\|>"),
        _pattern(r"<\|tool_calls_section_begin\|>.*?(?:<\|tool_calls_section_end\|>|\Z)|<\|tool_call_begin\|>.*\Z"),
        _kimi,
    ),
    Format(
        "llama3",
        _pattern(r'\{\s*"name"\s*:\s*"\w+",\s*"parameters"\s*:'),
        _pattern(r"\A\s*(?:<\|python_tag\|>.*|\{\s*\"(?:name|parameters|type)\".*)\Z"),
        _llama,
    ),
)
