"""Tool calls in each format that templates write: good ones, many, and every way of going wrong."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import Task, tool
from slipstream.agent_loop.bridge import BridgeRenderer
from slipstream.agent_loop.calls import Parsed, ToolCall, parse_turn
from slipstream.agent_loop.family import FamilyRenderer
from slipstream.agent_loop.formats import FORMATS, Format, detect
from slipstream.tools import Executor, Toolbox, ToolError, ToolResult


@tool
def take(text: str, count: int = 1, tags: list[str] | None = None) -> str:
    """Take something."""
    return f"{text} {count} {tags}"


def as_json(key: str) -> Callable[[str, dict[str, Any]], str]:
    return lambda name, arguments: json.dumps({"name": name, key: arguments})


def bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def xml(name: str, arguments: dict[str, Any]) -> str:
    parameters = "".join(f"<parameter={key}>\n{bare(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def glm(name: str, arguments: dict[str, Any]) -> str:
    pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{bare(v)}</arg_value>\n" for k, v in arguments.items())
    return f"<tool_call>{name}\n{pairs}</tool_call>"


SEP, BEGIN, END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"


class Written(msgspec.Struct):
    """How a model writes in a format: one call, several calls, and one that is cut or wrong."""

    format: str
    one: Callable[[str, dict[str, Any]], str]
    several: Callable[[list[str]], str] = "".join
    wrong: list[str] = []


def deepseek(name: str, arguments: dict[str, Any]) -> str:
    return f"{BEGIN}function{SEP}{name}\n```json\n{json.dumps(arguments)}\n```{END}"


def deepseek_31(name: str, arguments: dict[str, Any]) -> str:
    return f"{BEGIN}{name}{SEP}{json.dumps(arguments)}{END}"


def kimi(name: str, arguments: dict[str, Any]) -> str:
    body = json.dumps(arguments)
    return f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{body}<|tool_call_end|>"


def section(calls: list[str]) -> str:
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def deepseek_section(calls: list[str]) -> str:
    return "<｜tool▁calls▁begin｜>" + "\n".join(calls) + "<｜tool▁calls▁end｜>"


WAYS = {
    "hermes": Written(
        "hermes",
        lambda name, arguments: f"<tool_call>\n{as_json('arguments')(name, arguments)}\n</tool_call>",
        "\n".join,
        ['<tool_call>{"name": "take", "arguments": {', "<tool_call>{]</tool_call>", "<tool_call></tool_call>"],
    ),
    "qwen3-coder": Written(
        "qwen3-coder",
        xml,
        "\n".join,
        [
            "<tool_call>\n<function=take>\n<parameter=text>\nx",
            "<tool_call>\n<function=take>\nx\n</function>\n</tool_call>",
            "<tool_call>\n<function=take>\n<parameter=text>x</parameter><parameter=text>y</parameter></function></tool_call>",
            '<tool_call>{"name": "take"}</tool_call>',
        ],
    ),
    "glm": Written(
        "glm",
        glm,
        "\n".join,
        [
            "<tool_call>take\n<arg_key>text</arg_key>\n<arg_value>x",
            "<tool_call>take\n<arg_key>text</arg_key></tool_call>",
            "<tool_call></tool_call>",
        ],
    ),
    "llama3": Written(
        "llama3",
        as_json("parameters"),
        "; ".join,
        [
            '{"name": "take", "parameters": {"text": "x"',
            "<|python_tag|>",
        ],
    ),
    "llama3 with a tag": Written("llama3", as_json("parameters"), lambda calls: "<|python_tag|>" + ";".join(calls)),
    "mistral": Written(
        "mistral",
        as_json("arguments"),
        lambda calls: f"[TOOL_CALLS][{', '.join(calls)}]",
        ['[TOOL_CALLS][{"name": "take", "arguments": {', "[TOOL_CALLS]", "[TOOL_CALLS][]", "[TOOL_CALLS]take(1)"],
    ),
    "mistral 11": Written(
        "mistral",
        lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}",
        "".join,
        ['[TOOL_CALLS]take[ARGS]{"text": ', "[TOOL_CALLS]take[ARGS]"],
    ),
    "deepseek": Written(
        "deepseek",
        deepseek,
        deepseek_section,
        [f"<｜tool▁calls▁begin｜>{BEGIN}function{SEP}take\n```json\n{{", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"],
    ),
    "deepseek 3.1": Written("deepseek", deepseek_31, deepseek_section, [f"{BEGIN}take{SEP}{{{END}"]),
    "kimi": Written(
        "kimi",
        kimi,
        section,
        [
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.take:0<|tool_call_argument_begin|>{",
            "<|tool_calls_section_begin|><|tool_call_begin|>take<|tool_call_argument_begin|>{}<|tool_call_end|>",
            "<|tool_calls_section_begin|><|tool_calls_section_end|>",
        ],
    ),
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


def format_of(way: Written) -> Format:
    return next(each for each in FORMATS if each.name == way.format)


def read(way: Written, text: str) -> Parsed:
    return parse_turn(text, format_of(way), [take])


def arguments(call: ToolCall) -> Any:
    return json.loads(call.arguments)


FULL = {"text": 'a "b"\n{c} é', "count": 3, "tags": ["x", "y"]}


@ways
def test_a_call(way):
    parsed = read(way, way.several([way.one("take", FULL)]))
    (call,) = parsed.tool_calls
    assert (call.name, arguments(call), call.problem, parsed.content) == ("take", FULL, "", "")


@ways
def test_text_before_a_call_is_the_content(way):
    if way.format == "llama3":
        pytest.skip("there a turn is a call or text")
    parsed = read(way, "Let me see.\n" + way.several([way.one("take", FULL)]))
    assert (parsed.content, len(parsed.tool_calls), parsed.errors) == ("Let me see.", 1, [])


@ways
def test_twenty_parallel_calls(way):
    parsed = read(way, way.several([way.one("take", {"text": "x", "count": n}) for n in range(20)]))
    assert [arguments(call)["count"] for call in parsed.tool_calls] == list(range(20))
    assert parsed.errors == []


@ways
def test_a_wrong_call_is_one_problem(way):
    for text in way.wrong:
        parsed = read(way, text)
        assert len(parsed.tool_calls) == len(parsed.errors) == 1, text
        assert parsed.content == "", text


@ways
def test_a_cut_call_is_never_run(way):
    """Wherever it is cut."""
    whole = way.several([way.one("take", {"text": "x", "tags": ["y"]})])
    for end in range(1, len(whole)):
        for call in read(way, whole[:end]).tool_calls:
            assert call.problem or arguments(call) == {"text": "x", "tags": ["y"]}, whole[:end]


@ways
def test_a_thought_call_is_not_run(way):
    call = way.several([way.one("take", FULL)])
    assert read(way, f"<think>maybe {call}</think>answer") == Parsed("answer", [])


@ways
def test_plain_text_has_no_calls(way):
    for text in ("", "42", "Take {x}; [1, 2] and <b>", 'it\'s {"a": 1}'):
        assert read(way, text) == Parsed(text, [])


@ways
@given(data=st.data())
def test_any_text_is_read(way, data):
    scraps = [
        way.one("take", FULL),
        *way.wrong,
        "x",
        "{",
        "}",
        '"',
        "\n",
        "</tool_call>",
        "<tool_call>",
        SEP,
        END,
        BEGIN,
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(scraps), max_size=6)))
    for call in read(way, text).tool_calls:
        assert call.problem or isinstance(arguments(call), dict)


async def run(way: Written, name: str, given_arguments: dict[str, Any]) -> ToolResult:
    (call,) = read(way, way.several([way.one(name, given_arguments)])).tool_calls
    assert not call.problem
    async with Executor(Toolbox([take]), 5).session(Task(id="t", prompt="?")) as session:
        return await session.call(call.name, call.arguments)


@ways
async def test_what_the_model_is_shown(way):
    assert await run(way, "take", FULL) == ToolResult("a \"b\"\n{c} é 3 ['x', 'y']")
    assert await run(way, "take", {"text": "7"}) == ToolResult("7 1 None")  # text, not a number
    assert (await run(way, "nobody", FULL)).error is ToolError.UNKNOWN_TOOL
    wrong = await run(way, "take", {"text": "x", "count": "many"})
    assert wrong.error is ToolError.BAD_ARGUMENTS
    assert "Expected `int`, got `str`" in wrong.text
    assert "missing required field `text`" in (await run(way, "take", {"count": 1})).text
    assert "unknown field `size`" in (await run(way, "take", {"text": "x", "size": 1})).text


def test_what_stands_behind_a_llama_call_is_a_problem_and_the_call_still_counts():
    good, wrong = read(WAYS["llama3"], as_json("parameters")("take", {"text": "x"}) + " and so on").tool_calls
    assert (good.problem, arguments(good)) == ("", {"text": "x"})
    assert "write ; between two" in wrong.problem


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral"])
def test_arguments_as_a_text_are_decoded_once(name):
    way = WAYS[name]
    (call,) = read(way, way.several([way.one("take", json.dumps({"text": '"x"'}))])).tool_calls  # type: ignore[arg-type]
    assert (arguments(call), call.problem) == ({"text": '"x"'}, "")


# -- a template says which format its model writes

RENDERED = {
    "hermes": '<tool_call>\\n{"name": "\' + f.name + \'", "arguments": \' + f.arguments | tojson + \'}\\n</tool_call>',
    "qwen3-coder": "<tool_call>\\n<function=' + f.name + '>\\n<parameter=at>\\n' + f.arguments.at + "
    "'\\n</parameter>\\n</function>\\n</tool_call>",
    "glm": "<tool_call>' + f.name + '\\n<arg_key>at</arg_key>\\n<arg_value>' + f.arguments.at + "
    "'</arg_value>\\n</tool_call>",
    "llama3": '{"name": "\' + f.name + \'", "parameters": \' + f.arguments | tojson + \'}',
    "mistral": "[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments | tojson + '",
    "deepseek": f"{BEGIN}' + f.name + '{SEP}' + f.arguments | tojson + '{END}",
    "kimi": "<|tool_call_begin|>functions.' + f.name + ':0<|tool_call_argument_begin|>' + f.arguments | tojson + "
    "'<|tool_call_end|>",
}


@pytest.mark.parametrize("name", RENDERED)
def test_the_template_decides(train, name):
    call = "{% for c in m.tool_calls or [] %}{% set f = c.function %}{{ '" + RENDERED[name] + "' }}{% endfor %}"
    template = (
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        + call
        + "{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}"
    )
    renderer = BridgeRenderer(train(template))
    way = WAYS["mistral 11" if name == "mistral" else name]
    text = way.several([way.one("take", {"text": "x"}) for _ in range(1)])
    parsed = renderer.parse([*renderer.encode(text), renderer.stop_token_ids[0]], [take])
    assert [(each.name, arguments(each)) for each in parsed.tool_calls] == [("take", {"text": "x"})]


FAMILIES = {"qwen3": "hermes", "qwen3.5": "qwen3-coder", "llama-3": "llama3", "kimi-k2": "kimi"}
CONTROL = [
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    *("<|end_of_text|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "[EOS]", "[BOS]"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<tool_call>", "</tool_call>", "<think>", "</think>"),
    *("<tool_response>", "</tool_response>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_families_read_calls_alike(train, family):
    """Other families need more of their own vocabulary than a test's tokenizer has."""
    renderer = FamilyRenderer(train("hello", CONTROL), family, enveloped=True)
    way = WAYS[FAMILIES[family]]

    def read_tokens(text: str) -> Parsed:
        return renderer.parse([*renderer.encode(text), renderer.stop_token_ids[0]], [take])

    whole = way.several([way.one("take", FULL)])
    prompt = renderer.decode(renderer.start([{"role": "user", "content": "?"}], []))
    closed = "Well.</think>" if prompt.rstrip().endswith("<think>") else ""
    assert [arguments(call) for call in read_tokens(closed + whole).tool_calls] == [FULL]
    twenty = way.several([way.one("take", {"text": "x", "count": n}) for n in range(20)])
    assert len(read_tokens(closed + twenty).tool_calls) == 20
    assert read_tokens(("" if closed else "<think>") + f"maybe {whole}</think>answer") == Parsed("answer", [])
    for text in way.wrong:
        parsed = read_tokens(closed + text)
        assert len(parsed.tool_calls) == len(parsed.errors) == 1, text


def test_a_template_that_shows_no_call_is_taken_for_hermes():
    assert detect("<|im_start|>assistant\nYes.<|im_end|>").name == "hermes"
