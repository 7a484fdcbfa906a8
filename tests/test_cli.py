"""The command line: exit codes, one line for a user's error, and what each command is given."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.config import Config, RunDir
from slipstream.configfile import read_config


class Launches(list[tuple[Config, RunDir]]):
    """What `slipstream run` would have started."""

    def run(self, config: Config, run_dir: RunDir) -> int:
        self.append((config, run_dir))
        return 7


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    launches = Launches()
    launch = types.ModuleType("slipstream.launch")
    launch.__dict__["run"] = launches.run
    monkeypatch.setitem(sys.modules, "slipstream.launch", launch)
    return launches


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The one line of an exit with 2."""
    capsys.readouterr()
    assert main([str(word) for word in argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    # Libraries may log to stderr as well; the error is the last line, and the only one of ours.
    lines = [line for line in err.splitlines() if line.startswith("slipstream: ")]
    assert len(lines) == 1
    assert err.rstrip().endswith(lines[0])
    assert "Traceback" not in err
    return lines[0]


# -- run -----------------------------------------------------------------------------------------------------------


def test_run_makes_its_directory_and_writes_the_config_as_it_is_run(config: Path, launches: Launches) -> None:
    assert main(["run", str(config), "learner.lr=3e-4"]) == 7
    (started, run_dir) = launches[0]
    assert run_dir.root.parent == config.parent / "runs"
    assert re.fullmatch(r"small-\d{8}-\d{6}", run_dir.root.name)
    assert started.learner.lr == 3e-4
    assert read_config(run_dir.config) == started
    assert main(["run", str(config)]) == 7
    assert main(["run", str(config)]) == 7
    assert len({str(run_dir.root) for _, run_dir in launches}) == 3, "each run has a directory of its own"


def test_overrides_may_stand_before_and_after_an_option(config: Path, launches: Launches) -> None:
    assert main(["run", str(config), "run.seed=4", "--dir", "a", "learner.lr=1"]) == 7
    assert (launches[0][0].run.seed, launches[0][0].learner.lr) == (4, 1.0)
    assert launches[0][1].root == config.parent / "a"


def test_a_directory_is_used_again_by_the_same_run_only(
    config: Path, launches: Launches, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(config), "--dir", "a"]) == 7
    assert main(["run", str(config), "--dir", "a"]) == 7
    assert main(["run", "a/config.toml", "--dir", "a"]) == 7
    line = refused(capsys, "run", config, "--dir", "a", "learner.lr=1", "run.seed=1")
    assert "holds another run (it differs in run.seed, learner.lr)" in line
    Path("b").mkdir()
    Path("b", "thesis.txt").write_text("mine")
    assert "is not empty and holds no run" in refused(capsys, "run", config, "--dir", "b")
    assert "cannot be written" in refused(capsys, "run", config, "--dir", "b/thesis.txt")
    assert len(launches) == 3


def test_two_runs_never_work_in_one_directory(
    config: Path, launches: Launches, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(config), "--dir", "a"]) == 7
    with Path("a", "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "a run is going on there" in refused(capsys, "run", config, "--dir", "a")
    assert main(["run", str(config), "--dir", "a"]) == 7


ROWS = "train.jsonl"


@pytest.mark.parametrize(
    ("file", "text", "override", "says"),
    [
        (ROWS, '{"prompt": "1?"}\n{"answer": "2"}\n', "tasks.train=train.jsonl", "train.jsonl line 2"),
        (ROWS, '{"prompt": ', "tasks.train=train.jsonl", "train.jsonl line 1 is not JSON"),
        (ROWS, "", "tasks.train=train.jsonl", "has no tasks"),
        (ROWS, "", "tasks.train=missing.jsonl", "tasks.train = "),
        ("e.py", "1 / 0", "environment.path=e.py:environment", "ZeroDivisionError"),
        ("e.py", "it = 1", "environment.path=e.py:environment", "environment"),
        (
            "e.py",
            "from slipstream import tool\n@tool\ndef add(a: int) -> int:\n    return a",
            "environment.path=e.py:environment",
            "add",
        ),
        ("e.py", "", "engine.max_model_len=17 rollout.max_tokens=16", "engine.max_model_len = 17"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    config: Path,
    launches: Launches,
    capsys: pytest.CaptureFixture[str],
    file: str,
    text: str,
    override: str,
    says: str,
) -> None:
    (config.parent / file).write_text(text)
    assert says in refused(capsys, "run", config, *override.split())
    assert launches == []
    assert not Path("runs").exists(), "nothing is left behind"


def test_a_template_that_is_not_prefix_stable_is_refused(
    config: Path, models: Path, launches: Launches, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, "run", config, f"model.path={models}/forgetful")
    assert "prefix" in line
    assert launches == []


# -- the other commands --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", "run", "queue", "rollouter", "learner", "accounts", "show"])
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([*command.split(), "--help"])
    assert left.value.code == 0
    said = capsys.readouterr().out
    assert not command or f"example:\n  slipstream {command} " in said
    assert command != "run" or "staleness.cutoff (8)" in said


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["walk"], "invalid choice: 'walk'"),
        (["run"], "the following arguments are required: CONFIG"),
        (["run", "missing.toml"], "'missing.toml' cannot be read: No such file or directory"),
        (["run", "c.toml", "--dri", "a"], "unrecognized arguments: --dri"),
        (["queue", "c.toml"], "the following arguments are required: --dir"),
        (["accounts", "runs/none"], "it has no config.toml"),
        (["accounts", "a", "b"], "unrecognized arguments: b"),
        (["show", "runs/none", "--trajectory", "1"], "it has no config.toml"),
        (["show", "runs/none", "--trajectory", "one"], "invalid int value: 'one'"),
    ],
)
def test_a_mistyped_command_is_one_line(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refused(capsys, *argv)


def test_a_rollouter_without_a_queue_says_what_it_waits_for(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("slipstream.cli.QUEUE_SECONDS", 0.1)
    caplog.set_level("INFO")
    assert "no queue came up there" in refused(capsys, "rollouter", config, "--dir", "a")
    assert "because there is no" in caplog.text


def command(*argv: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "slipstream", *map(str, argv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path.cwd(),
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's `&` ignores it
    )


def test_the_queue_serves_is_waited_for_and_accounts_for_itself(config: Path) -> None:
    """A real queue process: it comes up, says where, ends on SIGTERM; its run can be accounted for."""
    queue = command("queue", config, "--dir", "a", "run.seed=4")
    assert queue.stdout is not None
    try:
        said = ""
        while "serves" not in said:
            said = queue.stdout.readline()
            assert said, "the queue ended before it served"
        assert Path("a", "queue.url").read_text().startswith("ipc://")
        assert read_config(Path("a", "config.toml")).run.seed == 4
    finally:
        queue.send_signal(signal.SIGTERM)
        out, _ = queue.communicate(timeout=20)
    assert queue.returncode == 0, out

    accounts = command("accounts", "a", "--json")
    out, _ = accounts.communicate(timeout=20)
    assert accounts.returncode == 0, out
    assert json.loads(out)["holds"] is True
    assert json.loads(out)["tokens"]["generated"] == 0


def test_ctrl_c_is_no_traceback(config: Path, tmp_path: Path) -> None:
    (tmp_path / "environment.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    run = command("run", config)
    assert run.stdout is not None
    assert run.stdout.readline() == "loading\n"
    run.send_signal(signal.SIGINT)
    out, _ = run.communicate(timeout=20)
    assert run.returncode == 130
    assert out == ""


def counts(lost: int) -> Any:
    from slipstream.queue import RunAccounts
    from slipstream.queue.messages import Accounts, LeaseCounts

    return RunAccounts(
        tokens=Accounts(generated=1234, trained=1200 - lost, failed={"timeout": 34}),
        trajectories=Accounts(generated=12, trained=11, failed={"timeout": 1}),
        leases=LeaseCounts(granted=12, delivered=12),
    )


@pytest.mark.parametrize(("lost", "code", "says"), [(0, 0, "the accounts hold"), (1, 1, "THE ACCOUNTS DO NOT HOLD")])
def test_accounts_exits_with_1_when_they_do_not_hold(
    config: Path,
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lost: int,
    code: int,
    says: str,
) -> None:
    assert main(["run", str(config), "--dir", "a"]) == 7
    capsys.readouterr()
    monkeypatch.setattr("slipstream.queue.accounts", lambda run_dir: counts(lost), raising=False)
    assert main(["accounts", "a"]) == code
    said = capsys.readouterr().out
    assert says in said
    assert re.search(r"failed: timeout +1 +34\n", said)
    assert re.search(r"generated +12 +1,234\n", said)
