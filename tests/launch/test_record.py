"""What the supervisor adds up: over restarts, over gaps, and before anything happened."""

from pathlib import Path

import msgspec
import pytest

from slipstream.config import Config, EnvironmentSection, ModelSection, RunDir, TasksSection
from slipstream.launch.record import Record, grown, identity
from slipstream.observe.clock import ClockReading
from slipstream.queue.messages import Accounts, HeldoutResult, LeaseCounts, RollouterBeat, Status
from slipstream.tooluse import ToolUse


def status(generating: float = 0.0, pauses: tuple[float, ...] = (), delivered: int = 0, version: int = 0) -> Status:
    beat = RollouterBeat(
        name="rollouter-0",
        version=0,
        running=0,
        leases=[],
        tokens_in_flight=[],
        tokens_generated=0,
        pause_ms=list(pauses),
        clock=ClockReading(process="rollouter-0", parts={"generating": generating}, now="generating"),
        tools=[ToolUse(name="search", calls=3, errors=1, seconds={50: 2}), ToolUse(name="count", calls=1, errors=1)],
    )
    return Status(
        version=version,
        tokens=Accounts(generated=3 * delivered, in_flight=3 * delivered),
        trajectories=Accounts(generated=delivered, in_flight=delivered),
        leases=LeaseCounts(granted=delivered, delivered=delivered),
        groups_ready=0,
        bytes_held=0,
        rollouters=[beat],
        heldout=[],
        why="",
    )


def record(tmp_path: Path, *rows: dict[str, float]) -> Record:
    run_dir = RunDir(tmp_path)
    run_dir.metrics.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    config = Config(
        model=ModelSection(path="m"), environment=EnvironmentSection(path="e.py:e"), tasks=TasksSection(train="t.jsonl")
    )
    return Record(config, run_dir)


def test_a_total_that_begins_anew_grows_on() -> None:
    assert grown([]) == grown([7.0]) == 0.0
    assert grown([2.0, 5.0, 1.0, 4.0]) == 3.0 + 1.0 + 3.0


def test_what_the_tools_did_is_in_the_summary(tmp_path: Path) -> None:
    seen = record(tmp_path)
    seen.observe(status())
    count, search = seen.summary(restarts=0).tools
    assert str(count) == "count: 1 calls, 1 in vain"
    assert str(search) == "search: 3 calls, 1 in vain, p50 8.308 ms, p99 8.308 ms"


def test_before_anything_happened_there_is_a_summary(tmp_path: Path) -> None:
    summary = record(tmp_path).summary(restarts=0)
    assert (summary.steps, summary.tokens_generated, summary.heldout_before) == (0, 0, None)
    assert summary.weights_pause_ms_p50 is None
    assert summary.accounts_hold  # nothing is nothing's sum


def test_each_beat_counts_once_and_a_new_rollouter_goes_on(tmp_path: Path) -> None:
    seen = record(tmp_path)
    seen.observe(status(generating=5.0, pauses=(1.0,)))
    seen.training_began()
    for one in (status(6.0, (3.0,)), status(6.0, (3.0,)), status(0.5, (5.0,))):
        seen.observe(one)
    assert seen._generating == 1.0 + 0.5
    assert seen.summary(0).weights_pause_ms_p50 == 3.0


def test_a_step_whose_numbers_are_not_finite_is_left_out(tmp_path: Path) -> None:
    seen = record(
        tmp_path,
        {"step": 1, "mismatch/kl_k3": 0.5, "tokens/step_trained": 10, "staleness/mean": 1, "staleness/max": 2},
        {"step": 2, "tokens/step_trained": 30, "staleness/mean": 3, "staleness/max": 4},
    )
    seen.observe(status())
    summary = seen.summary(0)
    assert (summary.mismatch_kl_k3, summary.steps) == (0.5, 2)
    assert (summary.staleness_mean, summary.staleness_max) == (2.5, 4)


def test_the_learners_work_is_added_up_over_its_restarts(tmp_path: Path) -> None:
    key = "time/learner/forward_backward"
    seen = record(tmp_path, {"step": 1, key: 4}, {"step": 2, key: 6}, {"step": 3, key: 1})
    seen.observe(status())
    seen._train_from, seen._train_to = 100.0, 114.0
    assert seen.summary(0).busy.learner == pytest.approx(7 / 14)


def test_a_pass_rate_is_one_once_every_task_ended(tmp_path: Path) -> None:
    now = status()
    now.heldout = [
        HeldoutResult(version=0, tasks=8, ended=8, passed=2, mean_reward=0.25, tokens=9),
        HeldoutResult(version=3, tasks=8, ended=7, passed=7, mean_reward=1.0, tokens=9),
    ]
    seen = record(tmp_path)
    seen.observe(now)
    assert (seen.summary(0).heldout_before, seen.summary(0).heldout_after) == (0.25, None)
    assert seen.progress("trains", 0).heldout == ["version 0: 25.0% of 8", "version 3: 100.0% of 7"]


def test_something_moved_when_a_trajectory_or_a_version_came(tmp_path: Path) -> None:
    seen = record(tmp_path)
    moved = [seen.observe(one) for one in (status(), status(), status(delivered=1), status(delivered=1, version=1))]
    assert moved == [True, False, True, True]


def test_waits_name_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: at[0])
    seen = record(tmp_path)
    at[0] = 103.0
    assert seen.waits() == "the queue has not answered for 3 s"
    now = status()
    now.learner = ClockReading(process="learner", parts={}, now="waiting for data", why="no complete group")
    now.why = "depth 1.0 is full"
    seen.observe(now)
    assert (
        seen.waits()
        == "rollouter-0: generating; learner: waiting for data (no complete group); queue: depth 1.0 is full"
    )
    at[0] = 163.0
    assert seen.waits() == "the queue has not answered for 60 s"


def test_the_identity_shows_what_there_is() -> None:
    counts = Accounts(generated=1234, trained=1000, failed={"timeout": 200}, in_flight=34)
    assert identity(counts) == "1,234 tokens = 1,000 trained + 200 failed (timeout) + 34 in flight"
    counts.trained += 1
    assert identity(counts).startswith("1,234 tokens != 1,001 trained")


def test_deliveries_that_teach_nothing_are_said_once_no_step_comes_of_them(tmp_path: Path) -> None:
    def after(zero_signal: int, version: int = 0) -> Status:
        counts = Accounts(generated=2 * zero_signal, zero_signal=zero_signal, in_flight=zero_signal)
        return msgspec.structs.replace(status(version=version), trajectories=counts)

    seen = record(tmp_path)
    seen.observe(after(0))
    seen.observe(after(8))
    assert seen.barren(0) == ""  # nobody trains yet
    seen.training_began()
    assert seen.barren(60) == ""  # not for so long
    assert seen.barren(0).startswith("no step for 0 s: of 16 trajectories since the last one, 8 were in groups whose ")
    assert "rollout.group = 8" in seen.barren(0)
    seen.observe(after(9, version=1))
    assert seen.barren(0) == ""  # none since that step
    seen.training_ended()
    seen.observe(after(20, version=1))
    assert seen.barren(0) == ""
