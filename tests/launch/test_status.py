"""`slipstream status`: of a run that goes on, of one that hangs, and of one that is over."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
from whole_run import Whole


def status(run: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slipstream", "status", str(run)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"})


def test_it_says_what_everybody_waits_for_and_then_what_it_came_to(whole: Whole) -> None:
    whole.tell("hold")
    whole.start(heldout="")
    said: list[str] = []

    def everybody_was_heard() -> bool:
        shown = status(whole.root)
        said[:] = shown.stdout.splitlines()
        return shown.returncode == 0 and any(re.match(r"learner +waiting for data", line) for line in said)

    whole.pid("learner")
    whole.until(everybody_was_heard, "the learner's clock")
    text = "\n".join(said)
    assert said[0] == "the run goes on: version 0 of 3"
    assert re.search(r"^queue +grants leases .* 0 leases running, 0 groups ready", text, re.M), text
    assert re.search(r"^learner +waiting for data +for \d+ s +no complete group: 0 being made", text, re.M), text
    assert re.search(r"^rollouter-0 +no lease +for \d+ s +0 trajectories, version -1", text, re.M), text
    assert "held out: not evaluated yet" in said
    assert "accounts: 0 tokens = 0" in said

    queue = whole.pid("queue")
    os.kill(queue, signal.SIGSTOP)
    whole.until(lambda: psutil.Process(queue).status() == psutil.STATUS_STOPPED, "the queue to hang")
    hung = status(whole.root)
    assert hung.returncode == 1
    assert "its queue does not answer (3 s); see " in hung.stdout
    os.kill(queue, signal.SIGCONT)

    (whole.root / "hold").unlink()
    output = whole.output()
    assert whole.running.returncode == 0, output
    over = status(whole.root)
    assert over.returncode == 0
    assert over.stdout.startswith("the run ended\n")
    assert "36 generated, 36 trained" in over.stdout


def test_of_a_run_that_was_killed_it_says_how_to_go_on(whole: Whole) -> None:
    whole.start(heldout="")
    left = [psutil.Process(whole.pid(name)) for name in ("queue", "learner", "rollouter")]
    whole.running.kill()
    psutil.wait_procs(left, timeout=10)
    shown = status(whole.root)
    assert shown.returncode == 0
    assert f"slipstream run {whole.root}/config.toml --dir {whole.root}" in shown.stdout
