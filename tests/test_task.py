import pytest

from slipstream import Task
from slipstream.errors import UserError
from slipstream.task import load_tasks

KEY = "tasks.train"


def jsonl(tmp_path, *lines: str) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def python(tmp_path, source: str) -> str:
    path = tmp_path / "rows.py"
    path.write_text("from slipstream import Task\n" + source)
    return f"{path}:tasks"


def test_rows_of_a_file(tmp_path):
    chat = '[{"role": "user", "content": "Hi."}]'
    spec = jsonl(
        tmp_path,
        '{"id": "a", "prompt": "1 + 1?", "answer": "2", "level": 3, "cases": [{"in": 1}]}',
        "",
        '{"id": 7, "prompt": ' + chat + ', "answer": 2}',
        '{"prompt": "?"}',
    )
    first, second, third = load_tasks(spec, KEY, seed=0)
    assert first == Task(id="a", prompt="1 + 1?", answer="2", extra={"level": 3, "cases": [{"in": 1}]})
    assert (second.id, second.answer, second.messages()) == ("7", "2", [{"role": "user", "content": "Hi."}])
    assert (third.id, third.answer, third.extra) == ("rows.jsonl line 4", "", {})
    assert third.messages() == [{"role": "user", "content": "?"}]
    assert load_tasks(spec, KEY, seed=0, limit=2) == [first, second]


def test_a_function_gets_the_seed_and_may_go_on_for_ever(tmp_path):
    spec = python(
        tmp_path,
        "def tasks(seed):\n"
        "    yield Task(id='first', prompt=f'seed {seed}')\n"
        "    n = 0\n"
        "    while True:\n"
        "        yield {'prompt': 'more', 'n': (n := n + 1)}\n",
    )
    first, second, third = load_tasks(spec, KEY, seed=5, limit=3)
    assert first.prompt == "seed 5"
    assert (second.extra, third.extra) == ({"n": 1}, {"n": 2})
    assert second.id == "rows.py:tasks row 2"


def test_a_function_may_return_a_list(tmp_path):
    assert len(load_tasks(python(tmp_path, "def tasks(seed): return [{'prompt': 'x'}] * 3"), KEY, seed=0)) == 3


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (['{"prompt": "x"}', '{"prompt": "x"'], "rows.jsonl line 2 is not JSON"),
        (['{"question": "x", "answer": "y"}'], r'rows.jsonl line 1 has no "prompt" \(it has question, answer\)'),
        (['{"prompt": ""}'], 'line 1 has an empty "prompt"'),
        (['{"prompt": []}'], 'line 1 has an empty "prompt"'),
        (['{"prompt": 3}'], "line 1: Expected"),
        (['{"prompt": [{"content": "x"}]}'], 'line 1: each message of "prompt" needs a "role"'),
        (["[1]"], "line 1 is no object"),
        (
            ['{"id": "a", "prompt": "x"}', "", '{"id": "a", "prompt": "y"}'],
            "line 3: id 'a' is that of rows.jsonl line 1 too",
        ),
        ([""], "has no tasks"),
    ],
)
def test_bad_rows_are_named_by_file_and_line(tmp_path, lines, says):
    with pytest.raises(UserError, match=says) as refused:
        load_tasks(jsonl(tmp_path, *lines), KEY, seed=0)
    assert str(refused.value).startswith(KEY)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def task(seed): return []", r"rows.py has no 'tasks'; did you mean .*task"),
        ("tasks = 3", "it is no function"),
        ("def tasks(seed): return 3", "returned int; yield tasks"),
        ("def tasks(seed):\n    yield {'prompt': 'x'}\n    raise KeyError('oops')", "line 4 raised KeyError: 'oops'"),
        ("def tasks(): return []", r"raised TypeError: tasks\(\) takes 0"),
        ("def tasks(seed): yield {'prompt': 'x', 'when': object()}", "row 1 cannot be written as JSON"),
        ("def tasks(seed): yield Task(id='a', prompt='')", 'row 1 has an empty "prompt"'),
        ("def tasks(seed): return []", "has no tasks"),
    ],
)
def test_bad_functions(tmp_path, source, says):
    with pytest.raises(UserError, match=says) as refused:
        load_tasks(python(tmp_path, source), KEY, seed=0)
    assert str(refused.value).startswith(KEY)


def test_missing_files(tmp_path):
    with pytest.raises(UserError, match="there is no such file"):
        load_tasks(str(tmp_path / "rows.jsonl"), KEY, seed=0)
    with pytest.raises(UserError, match="there is no file"):
        load_tasks(f"{tmp_path}/rows.py:tasks", KEY, seed=0)
    with pytest.raises(UserError, match=r"write it as FILE\.py:NAME"):
        load_tasks("rows.txt", KEY, seed=0)
