"""`slipstream run` from start to summary: real vLLM, real sockets, real processes, real kills."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from slipstream.config import RunDir
from slipstream.observe.metrics import read_metrics

pytestmark = pytest.mark.engine

SECONDS = 240


def start(config: Path, run: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "slipstream", "run", str(config), "--dir", str(run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def of_run(run: Path) -> list[psutil.Process]:
    """Processes that name the run's directory, and their descendants."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter(["cmdline"]):
        if str(run) in (process.info["cmdline"] or []):
            found[process.pid] = process
            found.update({child.pid: child for child in process.children(recursive=True)})
    return list(found.values())


def wait_for(condition: Callable[[], bool], running: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert running.poll() is None, running.stdout.read() if running.stdout else ""
        assert time.monotonic() < deadline
        time.sleep(0.05)


def accounts(run: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slipstream", "accounts", str(run), "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_depth_0_is_on_policy(config: Callable[..., Path], tmp_path: Path) -> None:
    """Every trained token was sampled by the weights it trains; engine and learner agree on its probability, in
    whichever branch of its trajectory it stands."""
    run = tmp_path / "run"
    running = start(config(steps=3, depth=0, wandb="offline", environment="led"), run)
    output, _ = running.communicate(timeout=SECONDS)
    assert running.returncode == 0, output
    steps = read_metrics(RunDir(run))
    assert [values["step"] for values in steps] == [1, 2, 3]
    for values in steps:
        assert values["staleness/max"] == 0
        assert values["turns/mean"] > 3
        assert values["mismatch/max_prob_diff"] < 1e-4
        assert abs(values["is/weight_mean"] - 1) < 1e-4
    summary = json.loads((run / "summary.json").read_text())
    assert summary["accounts_hold"]
    assert summary["steps"] == 3
    assert summary["restarts"] == 0
    assert summary["heldout_before"] is not None
    assert summary["heldout_after"] is not None
    assert summary["tokens_trained"] > 0
    assert list((run / "wandb").glob("offline-run-*"))
    assert accounts(run).returncode == 0
    show = [sys.executable, "-m", "slipstream", "show", str(run), "--trajectory", "8"]
    shown = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    assert "Say something." in shown
    evaluate = [sys.executable, "-m", "slipstream", "eval", str(run), "--samples", "2", "--json"]
    ended = subprocess.run([*evaluate, "tasks.heldout_limit=4"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "version 3" in ended.stderr
    found = json.loads(ended.stdout)
    assert (found["tasks"], found["samples"], sum(found["outcomes"].values())) == (4, 2, 8)
    assert 0 <= found["pass_at"]["1"] == found["mean_at_k"] <= found["pass_at"]["2"] <= 1


def test_a_killed_rollouter_is_replaced_and_nothing_is_left_over(config: Callable[..., Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    running = start(config(steps=8, depth=1, wandb="off"), run)
    wait_for(lambda: len(read_metrics(RunDir(run))) >= 2, running)
    everybody = of_run(run)
    rollouter = next(process for process in everybody if "rollouter" in process.cmdline())
    engines = rollouter.children(recursive=True)
    assert engines
    os.kill(rollouter.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(engines, timeout=10)
    assert not alive
    output, _ = running.communicate(timeout=SECONDS)
    assert running.returncode == 0, output
    summary = json.loads((run / "summary.json").read_text())
    assert summary["restarts"] == 1
    assert summary["steps"] == 8
    assert summary["accounts_hold"]
    assert json.loads(accounts(run).stdout)["holds"]
    _, alive = psutil.wait_procs(everybody, timeout=10)
    assert not alive
    assert not of_run(run)


def test_nothing_outlives_a_killed_supervisor(config: Callable[..., Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    running = start(config(steps=500, depth=1, wandb="off"), run)

    def engine_is_there() -> bool:
        return any(process.children() for process in of_run(run) if "rollouter" in process.cmdline())

    wait_for(engine_is_there, running)
    everybody = of_run(run)
    assert len(everybody) >= 5  # supervisor, queue, learner, rollouter, engine
    running.kill()
    running.wait()
    _, alive = psutil.wait_procs(everybody, timeout=10)
    assert not alive


def test_doctor_finds_that_engine_and_learner_agree(config: Callable[..., Path]) -> None:
    command = [sys.executable, "-m", "slipstream", "doctor", str(config(steps=1, depth=0, wandb="off"))]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not ended.stderr  # what libraries say is kept for when something fails
    lines = dict(line[6:].split(": ", 1) for line in ended.stdout.splitlines())
    assert lines["environment"] == "tools: look; rewards: 1"
    assert lines["attempts"].startswith("8 attempts")
    apart = re.fullmatch(r"log-probs of (\d+) tokens are (\S+) apart \(largest \S+\)", lines["engine = learner"])
    assert apart
    assert float(apart[2]) < 1e-4
