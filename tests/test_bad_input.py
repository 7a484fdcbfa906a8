"""Bad input through the real command: one line that names the key, the value, what to write; exit 2; nothing started.

`test_configfile.py` has every kind of wrong value; here each kind of mistake is made once, as a user makes it.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

SECONDS = 60.0  # on a busy machine; the slowest, which load a tokenizer, take 4 on an idle one

TOOL = "from slipstream import Environment, reward, tool\n@tool\ndef add(a: int) -> int:\n    {}return a\n"
REWARD = "@reward\ndef right(answer) -> float:\n    return 1.0\n"


class Mistake(msgspec.Struct, kw_only=True):
    overrides: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    files: dict[str, str] = {}
    names: tuple[str, ...]  # the key, the value as written, and what to write instead


def dataset(rows: str, *names: str) -> Mistake:
    return Mistake(overrides=("tasks.train=rows.jsonl",), files={"rows.jsonl": rows}, names=("tasks.train", *names))


def environment(code: str, *names: str) -> Mistake:
    return Mistake(overrides=("environment.path=mine.py:environment",), files={"mine.py": code}, names=names)


MISTAKES = {
    "a wrong key": Mistake(
        files={"config.toml": "[learner]\nlearning_rate = 1\n"}, names=("learner.learning_rate", "did you mean")
    ),
    "a wrong section": Mistake(
        files={"config.toml": "[learn]\nlr = 1\n"}, names=("[learn]", "did you mean [learner]?")
    ),
    "no TOML": Mistake(files={"config.toml": "[learner\n"}, names=("config.toml", "is not TOML", "line 1")),
    "a key that is missing": Mistake(files={"config.toml": "[run]\nseed = 1\n"}, names=("model.path is missing",)),
    "a wrong key as override": Mistake(overrides=("rollout.groups=4",), names=("rollout.groups", "rollout.group?")),
    "a wrong type": Mistake(overrides=("rollout.group=four",), names=('rollout.group = "four"', "a whole number")),
    "a value out of range": Mistake(overrides=("rollout.group=1",), names=("rollout.group = 1", "of at least 2")),
    "a word that is none": Mistake(overrides=("loss.name=grpo",), names=('loss.name = "grpo"', "one of ", '"gspo"')),
    "an override without =": Mistake(overrides=("learner.lr",), names=("'learner.lr'", "learner.lr=1e-5")),
    "no dataset file": Mistake(
        overrides=("tasks.train=away.jsonl",), names=("tasks.train = ", "away.jsonl", "relative to the config file")
    ),
    "no heldout file": Mistake(overrides=("tasks.heldout=away.jsonl",), names=("tasks.heldout = ", "away.jsonl")),
    "a row without a prompt": dataset(
        '{"prompt": "1?"}\n{"question": "2?"}\n', "rows.jsonl line 2", 'no "prompt"', "question"
    ),
    "a row that is no JSON": dataset('{"prompt": "1?"}\n{"prompt": 2', "rows.jsonl line 2"),
    "a row that is no object": dataset('["1?"]\n', "rows.jsonl line 1", '{"prompt": ..., "answer": ...}'),
    "a dataset without rows": dataset("\n", "rows.jsonl", "no tasks"),
    "a function without rows": Mistake(
        overrides=("tasks.train=rows.py:none",),
        files={"rows.py": "def none(seed):\n    return []\n"},
        names=("tasks.train = ", "rows.py:none", "no tasks"),
    ),
    "a function that raises": Mistake(
        overrides=("tasks.train=rows.py:bad",),
        files={"rows.py": "def bad(seed):\n    return 1 / 0\n"},
        names=("tasks.train = ", "rows.py:bad", "line 2 raised ZeroDivisionError"),
    ),
    "a function that there is not": Mistake(
        overrides=("tasks.train=environment.py:may",), names=("tasks.train = ", "environment.py has no 'may'", "many")
    ),
    "a syntax error": environment("def broken(:\n", "environment.path", "mine.py", "line 1", "SyntaxError"),
    "an import that fails": environment("import nowhere\n", "environment.path", "mine.py", "line 1", "nowhere"),
    "an environment that is none": environment(
        "environment = 3\n", "environment.path", "mine.py", "of type int", "Environment"
    ),
    "a tool without a docstring": environment(TOOL.format(""), "environment.path", "mine.py", "tool add", "docstring"),
    "a tool without type hints": environment(
        "from slipstream import tool\n@tool\ndef add(a):\n    '''Add.'''\n",
        "environment.path",
        "tool add",
        "write a: str",
    ),
    "a tool that is none": environment(
        "from slipstream import Environment, reward\n"
        + REWARD
        + "environment = Environment(tools=[len], rewards=[right])",
        "environment.path",
        "len",
        "put @tool before",
    ),
    "a reward that is none": environment(
        "from slipstream import Environment\nenvironment = Environment(rewards=[len])",
        "environment.path",
        "len",
        "put @reward before",
    ),
    "no rewards": environment(
        "from slipstream import Environment\nenvironment = Environment(rewards=[])", "environment.path", "at least one"
    ),
    "no model folder": Mistake(overrides=("model.path=away",), names=("model.path = ", "away", "model folder")),
    "a model without a tokenizer": Mistake(
        overrides=("model.path=bare",),
        files={"bare/config.json": "{}", "bare/model.safetensors": ""},
        names=("model.path = ", "bare", "tokenizer_config.json"),
    ),
    "a model without weights": Mistake(
        overrides=("model.path=light",),
        files={"light/config.json": "{}", "light/model.bin": ""},
        names=("model.path = ", "light", "no .safetensors file"),
    ),
    "a folder of something else": Mistake(
        overrides=("model.path=other",),
        files={"other/config.json": "["},
        names=("model.path = ", "other", "config.json"),
    ),
    "a tokenizer that is broken": Mistake(
        overrides=("model.path=broken",),
        files={f"broken/{name}": "{}" for name in ("config.json", "model.safetensors", "tokenizer.json")}
        | {"broken/tokenizer_config.json": "{"},
        names=("model.path = ", "broken", "its tokenizer cannot be loaded", "JSONDecodeError"),
    ),
    "a model without a template": Mistake(
        overrides=("model.path={models}/silent",), names=("model.path = ", "silent", "add chat_template.jinja")
    ),
    "a template that is not prefix-stable": Mistake(
        overrides=("model.path={models}/forgetful",), names=("model.path: ", "forgetful", "not prefix-stable", "token ")
    ),
    "more tokens than the engine takes": Mistake(
        overrides=("rollout.max_tokens=4096",),
        names=("rollout.max_tokens = 4096", "less than engine.max_model_len = 2048"),
    ),
    "a prompt that the engine does not take": Mistake(
        overrides=("engine.max_model_len=20", "rollout.max_tokens=16"), names=("engine.max_model_len = 20", "raise it")
    ),
    "a longer stream than the model takes": Mistake(
        overrides=("engine.max_model_len=8192",),
        names=("engine.max_model_len = 8192", "write at most 4096", "max_position_embeddings"),
    ),
    "a cache for less than one stream": Mistake(
        overrides=("model.path=large", "model.dtype=float32", "engine.kv_cache_mb=3"),
        files={
            "large/config.json": '{"num_hidden_layers": 8, "num_key_value_heads": 1, "head_dim": 32}',
            "large/model.safetensors": "",
        },
        names=("engine.kv_cache_mb = 3", "takes 4 MB", "lower engine.max_model_len"),
    ),
    "leases that end too soon": Mistake(
        overrides=("queue.lease_seconds=100",),
        names=("queue.lease_seconds = 100.0", "more than rollout.max_seconds = 120.0"),
    ),
    "a directory that cannot be": Mistake(
        options=("--dir", "file/run"),
        files={"file": ""},
        names=("--dir ", "file/run: cannot be written", "write another --dir"),
    ),
    "a directory of something else": Mistake(
        options=("--dir", "mine"), files={"mine/thesis.txt": "..."}, names=("--dir ", "mine", "write another --dir")
    ),
    "no config": Mistake(options=("--dir",), names=("--dir", "expected one argument")),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(config: Path, models: Path, mistake: Mistake) -> None:
    for name, text in mistake.files.items():
        (config.parent / name).parent.mkdir(exist_ok=True)
        (config.parent / name).write_text(text)
    before = sorted(config.parent.rglob("*"))
    overrides = [override.format(models=models) for override in mistake.overrides]
    began = time.monotonic()
    run = command("run", config, *overrides, *mistake.options)
    assert time.monotonic() - began < SECONDS
    assert run.stdout == ""
    assert run.returncode == 2, run.stderr
    (line,) = run.stderr.splitlines()
    assert line.startswith("slipstream: ")
    for name in mistake.names:
        assert name in line
    made = {path.name for path in config.parent.rglob("*")} - {path.name for path in before}
    assert made <= {"__pycache__"}, "nothing is left behind"


def command(*argv: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "slipstream", *map(str, argv)],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
