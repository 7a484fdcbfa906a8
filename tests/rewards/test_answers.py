"""Short answers: only what is marked counts."""

import pytest

from slipstream import Task
from slipstream.rewards import function_calls, gsm8k, search_exact, search_f1


def task(answer="", **extra) -> Task:
    return Task(id="t", prompt="?", answer=answer, extra=extra)


@pytest.mark.parametrize(
    ("said", "is_right"),
    [
        ("so\n#### 1234", True),
        ("#### 1,234", True),
        ("#### $1,234.00.", True),
        ("####1234", True),
        ("#### 7\n#### 1234", True),
        ("#### 1234\n#### 7", False),  # the last counts
        ("1234", False),
        ("The answer is 1234.", False),
        ("#### 1234 or 7", False),
        ("#### 12,34", False),
        ("#### 1234\n1235", True),
        ("#### -1234", False),
        ("####", False),
        ("#### nan", False),
        ("", False),
    ],
)
def test_gsm8k(said, is_right):
    assert gsm8k(said, task("1234")) == is_right
    assert gsm8k(said, task("2 * 617 = <<2*617=1234>>1234\n#### 1,234")) == is_right


def test_gsm8k_without_a_number_to_compare_with_is_no_zero():
    with pytest.raises(ValueError, match="is no number"):
        gsm8k("#### 1", task("one"))


@pytest.mark.parametrize(
    ("said", "exact", "overlap"),
    [
        ("The Eiffel Tower!", True, 1.0),
        ("<answer>no</answer> then <answer> eiffel tower </answer>", True, 1.0),
        ("It is <answer>the tower</answer>", False, 2 / 3),
        ("Gustave Eiffel's tower", False, 2 * 1 / (3 + 2)),
        ("", False, 0.0),
        ("eiffel eiffel eiffel tower tower", False, 4 / 7),  # saying it again gains nothing
    ],
)
def test_search(said, exact, overlap):
    for gold in (task("Eiffel Tower"), task(answers=["La tour", "Eiffel Tower"])):
        assert search_exact(said, gold) == exact
        assert search_f1(said, gold) == pytest.approx(overlap)


@pytest.mark.parametrize("gold", [task(""), task(answers=["x", 3]), task(answers="x")])
def test_search_without_answers_is_no_zero(gold):
    with pytest.raises(ValueError, match="no answers"):
        search_f1("x", gold)


def calls(*made):
    functions = [{"type": "function", "function": {"name": name, "arguments": text}} for name, text in made]
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": functions}]


@pytest.mark.parametrize(
    ("made", "is_right"),
    [
        ([("f", '{"a": 1, "b": [1, {"c": true}]}'), ("g", "{}")], True),
        ([("g", "{}"), ("f", '{"b": [1.0, {"c": true}], "a": 1}')], True),
        ([("f", '{"a": 1, "b": [1, {"c": true}]}')], False),
        ([("g", "{}"), ("g", "{}"), ("f", '{"a": 1, "b": [1, {"c": true}]}')], False),
        ([("f", '{"a": true, "b": [1, {"c": true}]}'), ("g", "{}")], False),
        ([("f", '{"a": 1, "b": [1, {"c": 1}]}'), ("g", "{}")], False),
        ([("f", '{"a": "1", "b": [1, {"c": true}]}'), ("g", "{}")], False),
        ([("f", "{broken"), ("g", "{}")], False),
        ([], False),
    ],
)
def test_function_calls(made, is_right):
    wanted = [{"name": "f", "arguments": {"a": 1, "b": [1, {"c": True}]}}, {"name": "g"}]
    assert function_calls(calls(*made), task(calls=wanted)) == is_right


def test_no_calls_can_be_wanted_too_but_not_forgotten():
    assert function_calls(calls(), task(calls=[]))
    with pytest.raises(ValueError, match='"calls" is no list'):
        function_calls(calls(), task())
