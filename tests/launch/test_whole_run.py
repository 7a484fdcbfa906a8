"""A run from its first process to its summary, with the real queue: whoever dies, hangs or leaves in between."""

import os
import signal
import time

import psutil
from whole_run import Whole

from slipstream.config import RunDir
from slipstream.queue import accounts

SUMMARY = """
heldout_before heldout_after steps wall_s train_wall_s tokens_generated tokens_trained staleness_mean staleness_max
accounts_hold weights_pause_ms_p50 mismatch_kl_k3 restarts busy
"""


def test_from_start_to_summary(whole: Whole) -> None:
    whole.start()
    output = whole.output()
    assert whole.running.returncode == 0, output
    summary = whole.summary()
    assert [name for name in SUMMARY.split() if name not in summary] == []
    assert sorted(summary["busy"]) == ["engine", "learner"]
    counts = accounts(RunDir(whole.root))
    assert (summary["tokens_generated"], summary["tokens_trained"]) == (counts.tokens.generated, counts.tokens.trained)
    assert summary["tokens_trained"] == 3 * 2 * 2 * 3  # steps, groups, members, tokens
    assert (summary["heldout_before"], summary["heldout_after"]) == (1.0, 1.0)
    assert (summary["steps"], summary["restarts"], summary["accounts_hold"]) == (3, 0, True)
    assert (summary["staleness_mean"], summary["staleness_max"]) == (0.5, 1)
    assert summary["weights_pause_ms_p50"] == 2.0
    assert summary["mismatch_kl_k3"] is None  # no step had a finite one
    assert "step 3/3" in output
    assert "100.0% before, 100.0% after" in output
    assert f"report: {whole.root}/report.html" in output
    assert "100.0%<small>100.0% before" in (whole.root / "report.html").read_text()


def test_a_queue_that_dies_over_a_request_is_started_again_and_answers_it(whole: Whole) -> None:
    whole.tell("dies", "Evaluate Drain")
    whole.start()
    output = whole.output()
    assert whole.running.returncode == 0, output
    for wait in (0, 1):
        assert f"queue ended with signal SIGKILL; it is started again in {wait} s" in output
    assert not (whole.root / "dies").read_text()
    summary = whole.summary()
    assert (summary["steps"], summary["restarts"], summary["accounts_hold"]) == (3, 2, True)
    assert summary["heldout_after"] == 1.0


def test_who_leaves_before_the_run_is_over_is_started_again(whole: Whole) -> None:
    """Although its exit code is 0: somebody asked it to leave."""
    whole.tell("hold")
    whole.start(heldout="")
    pids = {name: whole.pid(name) for name in ("rollouter", "learner")}
    for pid in pids.values():
        os.kill(pid, signal.SIGTERM)
    for name, pid in pids.items():
        whole.until(lambda name=name, pid=pid: whole.pid(name) != pid, f"another {name}")
    (whole.root / "hold").unlink()
    output = whole.output()
    assert whole.running.returncode == 0, output
    for name in ("rollouter-0", "learner"):
        assert f"{name} ended with exit code 0; it is started again in 0 s" in output
    summary = whole.summary()
    assert (summary["steps"], summary["restarts"], summary["accounts_hold"]) == (3, 2, True)


def test_stopped_in_the_middle_its_summary_is_what_the_journal_says(whole: Whole) -> None:
    whole.start(steps=10_000)
    whole.until(lambda: whole.steps() > 1, "a step")
    whole.running.send_signal(signal.SIGINT)
    output = whole.output()
    assert whole.running.returncode == 130, output
    summary, counts = whole.summary(), accounts(RunDir(whole.root))
    assert summary["accounts_hold"]
    assert (summary["tokens_generated"], summary["tokens_trained"]) == (counts.tokens.generated, counts.tokens.trained)
    assert summary["steps"] == whole.steps()


def test_ctrl_c_is_heeded_while_a_queue_that_hangs_is_asked(whole: Whole) -> None:
    whole.tell("hangs", "Evaluate")
    whole.start()
    queue = psutil.Process(whole.pid("queue"))
    whole.until(lambda: queue.status() == psutil.STATUS_STOPPED, "the queue to hang")
    began = time.monotonic()
    whole.running.send_signal(signal.SIGINT)
    rollouter = psutil.Process(whole.pid("rollouter"))
    whole.until(lambda: not rollouter.is_running(), "the rollouter to leave")
    whole.running.send_signal(signal.SIGINT)
    output = whole.output()
    assert whole.running.returncode == 130, output
    assert time.monotonic() - began < 15  # the learner alone would have 60 s, the queue 10
    assert whole.summary()["accounts_hold"]  # from the journal: the queue was killed without a last word
