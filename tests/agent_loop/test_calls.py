import pytest

from slipstream.agent_loop.calls import MOST_CALLS, Parsed, parse_turn
from slipstream.agent_loop.formats import HERMES


def parse_hermes(text: str, opened: bool = False) -> Parsed:
    return parse_turn(text, HERMES, [], opened=opened)


GOOD = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def test_content_and_calls():
    parsed = parse_hermes(f"<think>hm</think>Well.\n{GOOD}\n{GOOD}")
    assert parsed.content == "Well."
    assert [(call.name, call.arguments, call.problem) for call in parsed.tool_calls] == [("f", '{"a": 1}', "")] * 2
    assert parsed.errors == []


def test_no_arguments_are_an_empty_object():
    assert parse_hermes('<tool_call>{"name": "f"}</tool_call>').tool_calls[0].arguments == "{}"


def test_arguments_written_as_text_are_decoded_once():
    text = r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\\\"x\\\"\"}"}</tool_call>'
    assert parse_hermes(text).tool_calls[0].arguments == r'{"a": "\"x\""}'


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ('{"name": "f", "arguments": {', "not one JSON object"),
        ('{"name": "f", "arguments": {}}{"name": "g", "arguments": {}}', "not one JSON object"),
        ('{"name": "f", "arguments": {"a": 1}{"a": 2}}', "not one JSON object"),
        ('{"name": "f", "arguments": [1, 2]}', "not a JSON object"),
        ('{"name": "f", "arguments": null}', "not a JSON object"),
        ('{"name": "f", "arguments": "5 + 1"}', "not a JSON object"),
        ('{"arguments": {}}', "name"),
        ('{"name": 3, "arguments": {}}', "name"),
        ("[1]", "not one JSON object"),
        ("f(1)", "not one JSON object"),
        ("", "not one JSON object"),
        ("[" * 100_000, "not one JSON object"),
    ],
)
def test_a_bad_call_has_one_problem(body, names):
    parsed = parse_hermes(f"<tool_call>{body}</tool_call>")
    assert len(parsed.tool_calls) == 1
    assert names in parsed.errors[0]


def test_an_unclosed_call_is_a_problem_and_the_next_still_counts():
    parsed = parse_hermes('<tool_call>{"name": "f", "arguments": {}}' + GOOD)
    assert "not closed" in parsed.tool_calls[0].problem
    assert parsed.tool_calls[1].problem == ""


def test_a_thought_call_is_not_run():
    assert parse_hermes(f"<think>maybe {GOOD}</think>answer").tool_calls == []
    assert parse_hermes(f"maybe {GOOD}</think>answer", opened=True).tool_calls == []
    assert parse_hermes(f"<think>maybe {GOOD}</think>answer").content == "answer"


@pytest.mark.parametrize("text", [f"<think>maybe {GOOD}</think>", f"<think>maybe {GOOD}"])
def test_a_thought_call_with_nothing_else_is_a_problem(text):
    parsed = parse_hermes(text)
    assert len(parsed.tool_calls) == 1
    assert "<think>" in parsed.errors[0]


def test_calls_of_one_turn_are_capped():
    parsed = parse_hermes(GOOD * 1000)
    assert len(parsed.tool_calls) == MOST_CALLS + 1
    assert len(parsed.errors) == 1
    assert "1000 calls" in parsed.errors[0]
