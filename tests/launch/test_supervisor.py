"""The supervisor: what ends a run, in which order, and with which words."""

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

Supervise = Callable[..., subprocess.Popen[str]]

# Says that it is there, and when it was asked to leave; RUN/order has who left in which order.
POLITE = """
import os, pathlib, signal, sys, time
run = pathlib.Path(sys.argv[1])
def leave(*_):
    with open(run / "order", "a") as order:
        order.write("{name}\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, {on_term})
(run / "{name}.here").write_text(str(os.getpid()))
time.sleep(600)
"""
NAMES = ("queue", "learner", "rollouter")
SECONDS = 20.0


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {SECONDS:.0f} s for {what}"
        time.sleep(0.02)


@pytest.fixture
def polite(modules: Callable[[str, str], str]) -> Callable[..., None]:
    def write(stubborn: str = "") -> None:
        for name in NAMES:
            on_term = "signal.SIG_IGN" if name == stubborn else "leave"
            modules(f"fake_{name}", POLITE.format(name=name, on_term=on_term))

    return write


def all_here(run: Path) -> list[int]:
    wait_for(lambda: all((run / f"{name}.here").exists() for name in NAMES), "all children")
    wait_for(lambda: all((run / f"{name}.here").read_text() for name in NAMES), "their pids")
    return [int((run / f"{name}.here").read_text()) for name in NAMES]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_it_stops_rollouters_then_learner_then_queue(
    number: int, polite: Callable[..., None], supervise: Supervise, tmp_path: Path
) -> None:
    polite()
    run = tmp_path / "run"
    running = supervise()
    pids = all_here(run)
    running.send_signal(number)
    output, _ = running.communicate(timeout=30)
    assert running.returncode == 130, output
    assert (run / "order").read_text().split() == ["rollouter", "learner", "queue"]
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert json.loads((run / "summary.json").read_text())["steps"] == 0
    assert output.strip().endswith("slipstream: stopped")


def test_a_second_ctrl_c_does_not_wait_for_who_does_not_listen(
    polite: Callable[..., None], supervise: Supervise, tmp_path: Path
) -> None:
    polite(stubborn="learner")  # it has 60 seconds after the first
    run = tmp_path / "run"
    running = supervise()
    pids = all_here(run)
    running.send_signal(signal.SIGINT)
    wait_for((run / "order").exists, "the rollouter to leave")
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=30)
    assert running.returncode == 130, output
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert json.loads((run / "summary.json").read_text())["restarts"] == 0


def test_nothing_outlives_a_killed_supervisor(
    modules: Callable[[str, str], str], supervise: Supervise, tmp_path: Path
) -> None:
    for name in NAMES:
        code = "from slipstream.parent import die_with_supervisor\ndie_with_supervisor()\n"
        modules(f"fake_{name}", code + POLITE.format(name=name, on_term="leave"))
    running = supervise()
    pids = all_here(tmp_path / "run")
    running.kill()
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_a_users_error_ends_the_run_in_its_own_words(
    polite: Callable[..., None], modules: Callable[[str, str], str], supervise: Supervise
) -> None:
    polite()
    words = "tasks.train = 'no.jsonl': there is no such file"
    modules("fake_rollouter", f"import sys\nsys.stderr.write({f'slipstream: {words}'!r} + chr(10))\nsys.exit(2)")
    output, _ = (running := supervise(restarts=5)).communicate(timeout=30)
    assert running.returncode == 2
    assert output.strip().endswith(f"slipstream: {words}")
    assert "again" not in output


def test_what_always_dies_is_started_again_so_often_and_no_more(
    polite: Callable[..., None], modules: Callable[[str, str], str], supervise: Supervise, tmp_path: Path
) -> None:
    polite()
    modules("fake_learner", "import sys\nprint('no memory', flush=True)\nsys.exit(1)")
    output, _ = (running := supervise(restarts=2)).communicate(timeout=60)
    assert running.returncode == 1
    waits = re.findall(r"learner ended with exit code 1; it is started again in (\d+) s", output)
    assert waits == ["0", "1"]
    assert "run.restarts = 2 are used up" in output
    assert output.count("no memory") == 3  # the end of its log, which has three starts
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["restarts"] == 2


def test_a_killed_child_is_named_with_its_signal(
    polite: Callable[..., None], modules: Callable[[str, str], str], supervise: Supervise
) -> None:
    polite()
    modules("fake_queue", f"import os\nos.kill(os.getpid(), {int(signal.SIGSEGV)})")
    output, _ = (running := supervise(restarts=0)).communicate(timeout=30)
    assert running.returncode == 1
    assert "queue ended with signal SIGSEGV" in output
    assert "queue.log" in output
