import json

import pyarrow
import pytest
from pyarrow import parquet

from slipstream import Task
from slipstream.errors import UserError
from slipstream.rows import Part, joined, parts
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
        (['{"prompt": 3}'], "line 1 has a wrong value: Expected"),
        (['{"prompt": [{"content": "x"}]}'], 'line 1 has a message in "prompt" without "role"'),
        (["[1]"], "line 1 is no object"),
        (
            ['{"id": "a", "prompt": "x"}', "", '{"id": "a", "prompt": "y"}'],
            "line 3 has the id 'a' of rows.jsonl line 1",
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


# -- Parquet and dataset folders

VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "6 * 7?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"split": "train", "index": 7},
}


def write_parquet(path, *rows) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return str(path)


def save_to_disk(folder, *rows, **state) -> str:
    """As `datasets` does."""
    folder.mkdir(parents=True)
    table = pyarrow.Table.from_pylist(list(rows))
    path = str(folder / "data-00000-of-00001.arrow")
    with pyarrow.OSFile(path, "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    files = [{"filename": "data-00000-of-00001.arrow"}]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_fingerprint": "x", "_split": None, **state}))
    return str(folder)


def test_verls_rows_in_parquet(tmp_path):
    (task,) = load_tasks(write_parquet(tmp_path / "train.parquet", VERL_ROW), KEY, seed=0)
    assert (task.id, task.answer) == ("train.parquet row 1", "42")
    assert task.messages() == [{"role": "user", "content": "6 * 7?"}]
    assert task.extra == {name: value for name, value in VERL_ROW.items() if name != "prompt"}


def test_a_folder_that_datasets_saved(tmp_path):
    spec = save_to_disk(tmp_path / "saved", {"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"})
    assert [(task.prompt, task.answer) for task in load_tasks(spec, KEY, seed=0)] == [("a", "1"), ("b", "2")]


def test_a_folder_of_parquet_files(tmp_path):
    for number in range(2):
        write_parquet(tmp_path / "data" / f"train-0000{number}-of-00002.parquet", {"prompt": f"{number}?"})
    assert [task.prompt for task in load_tasks(str(tmp_path), KEY, seed=0)] == ["0?", "1?"]


def test_folders_that_do_not_say_which_rows(tmp_path):
    write_parquet(tmp_path / "hub" / "train-0.parquet", {"prompt": "a"})
    write_parquet(tmp_path / "hub" / "test-0.parquet", {"prompt": "b"})
    with pytest.raises(UserError, match="has files of test, train; name one"):
        load_tasks(str(tmp_path / "hub"), KEY, seed=0)
    save_to_disk(tmp_path / "dict" / "train", {"prompt": "a"})
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match=r"has splits; name one of .*dict/train, .*dict/test"):
        load_tasks(str(tmp_path / "dict"), KEY, seed=0)
    with pytest.raises(UserError, match=r"save it after flatten_indices\(\)"):
        load_tasks(save_to_disk(tmp_path / "i", {"prompt": "a"}, _indices_files=[{"filename": "i"}]), KEY, seed=0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"neither a state\.json in it nor any \.parquet"):
        load_tasks(str(tmp_path / "empty"), KEY, seed=0)


def test_files_that_are_broken(tmp_path):
    (tmp_path / "x.parquet").write_text("no")
    with pytest.raises(UserError, match="is no Parquet that can be read"):
        load_tasks(str(tmp_path / "x.parquet"), KEY, seed=0)
    folder = save_to_disk(tmp_path / "saved", {"prompt": "a"})
    (tmp_path / "saved" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(UserError, match="is no dataset that can be read"):
        load_tasks(folder, KEY, seed=0)


# -- bad rows


def test_bad_rows_are_skipped_and_counted_where_that_is_wanted(tmp_path, caplog):
    bad = ['{"prompt": ', '{"answer": "x"}', '{"prompt": ""}', '{"id": "a", "prompt": "again"}', "[1]"]
    spec = jsonl(tmp_path, '{"id": "a", "prompt": "x"}', *bad, '{"id": "b", "prompt": "y"}')
    assert [task.id for task in load_tasks(spec, KEY, seed=0, bad_rows="skip")] == ["a", "b"]
    assert "tasks.train: 5 rows were skipped" in caplog.text
    assert "rows.jsonl line 2 is not JSON" in caplog.text
    with pytest.raises(UserError, match=r"has no tasks: all 2 rows are bad, rows\.jsonl line 1 is no object"):
        load_tasks(jsonl(tmp_path, "[1]", "[2]"), KEY, seed=0, bad_rows="skip")


# -- mixtures


def test_mixtures(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"id": "a{n}", "prompt": "x"}}\n' for n in range(10)))
    write_parquet(tmp_path / "b.parquet", *({"id": f"b{n}", "prompt": "y"} for n in range(4)))
    spec = f"{tmp_path}/a.jsonl * 0.3 + {tmp_path}/b.parquet * 2.5 + {tmp_path}/a.jsonl"
    with pytest.raises(UserError, match=r"has the id 'a0' of a\.jsonl line 1"):
        load_tasks(spec, KEY, seed=0)
    spec = spec.rpartition(" + ")[0]
    tasks = load_tasks(spec, KEY, seed=0)
    assert [task.id[0] for task in tasks] == ["a"] * 3 + ["b"] * 10
    assert len({task.id for task in tasks}) == 13
    assert {"b0", "b0 (2)", "b3", "b3 (2)"} <= {task.id for task in tasks}
    assert load_tasks(spec, KEY, seed=0) == tasks
    assert any(load_tasks(spec, KEY, seed=seed) != tasks for seed in range(1, 5))


def test_what_a_mixture_says():
    assert parts("a.jsonl", KEY) == [Part("a.jsonl")]
    spec = "a b.jsonl * 2 + c.py:f + d*e.parquet * 0.5"
    assert parts(spec, KEY) == [Part("a b.jsonl", 2.0), Part("c.py:f"), Part("d*e.parquet", 0.5)]
    assert joined(parts(spec, KEY)) == spec
    for weight in ("0", "-1", "x", "nan", "inf"):
        with pytest.raises(UserError, match="is no weight; write a number above 0"):
            parts(f"a.jsonl * {weight}", KEY)
