"""The virtual run keeps a real run's promises: accounts, bounds, one seed one result; and engines share their time."""

import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import UserError
from slipstream.queue.messages import Lease
from slipstream.simulator import Scenario, read_scenario, simulate
from slipstream.simulator.durations import parse
from slipstream.simulator.fleet import Engine, Request
from slipstream.simulator.scenario import key_help
from slipstream.task import Task


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whatever_the_scenario_the_bounds_hold(data: st.DataObject) -> None:
    pick = data.draw
    scenario = read_scenario(
        [
            f"batch={pick(st.integers(1, 5))}",
            f"depth={pick(st.sampled_from([0, 0.5, 1, 3]))}",
            f"cutoff={pick(st.integers(0, 4))}",
            f"group={pick(st.integers(1, 4))}",
            f"rollouters={pick(st.integers(1, 4))}",
            f"concurrency={pick(st.integers(1, 9))}",
            pick(st.sampled_from(["latency=lognormal:2,1", "tokens=lognormal:200,1", "tokens=0.5*100+0.5*400"])),
            f"in_flight={pick(st.sampled_from(['true', 'false']))}",
            f"turns={pick(st.sampled_from(['1', 'lognormal:3,0.5']))}",
            f"tool_s={pick(st.sampled_from(['0', '0.5']))}",
            f"decode_request_s={pick(st.sampled_from([0, 0.001]))}",
            f"prefill_s={pick(st.sampled_from([0, 0.05]))}",
            f"group_s={pick(st.sampled_from([0, 0.1]))}",
            f"publish_s={pick(st.sampled_from([0, 0.3]))}",
            f"sync_s={pick(st.sampled_from([0, 0.2]))}",
            f"zero_signal={pick(st.sampled_from([0, 0.4]))}",
            f"failure={pick(st.sampled_from([0, 0.1]))}",
            f"crash_s={pick(st.sampled_from([0, 40]))}",
            "restart_s=3",
            "batches=20",
            f"seed={pick(st.integers(0, 9))}",
        ]
    )
    result = simulate(scenario)
    assert result.accounts_hold
    assert result.staleness_max <= scenario.cutoff
    assert result.token_staleness_max <= scenario.cutoff
    if scenario.depth == 0 and not scenario.updates_in_flight:
        assert result.staleness_max == 0
    for share in (result.learner_busy, result.learner_waiting, result.rollouter_busy, result.rollouter_tools):
        assert -1e-9 <= share <= 1 + 1e-9
    assert result.learner_busy + result.learner_waiting == pytest.approx(1, abs=0.02 + 1 / 18)


def test_one_seed_gives_one_result() -> None:
    words = ["tokens=lognormal:300,1", "batches=30", "failure=0.05", "crash_s=50", "rollouters=3"]
    first, again, other = (simulate(read_scenario([*words, f"seed={seed}"])) for seed in (1, 1, 2))
    assert first.staleness_tokens == again.staleness_tokens
    assert first.accounts == again.accounts
    assert first.accounts != other.accounts


def test_on_policy_alternates() -> None:
    """With depth 0 the batch is made, then trained on: their times add up."""
    result = simulate(
        read_scenario(["latency=2", "step_s=3", "depth=0", "batch=4", "group=2", "concurrency=8", "batches=40"])
    )
    assert result.batch_s == pytest.approx(5.0)
    assert result.learner_busy == pytest.approx(0.6)
    assert result.rollouter_busy == pytest.approx(0.4)
    assert result.staleness_max == 0


def test_new_weights_in_flight_make_tokens_younger() -> None:
    words = ["latency=lognormal:4,0.8", "step_s=1", "depth=6", "cutoff=1000", "batch=8", "group=1", "batches=400"]
    whole, flying = (simulate(read_scenario([*words, f"in_flight={flag}"])) for flag in ("false", "true"))
    assert flying.token_staleness_mean < 0.8 * whole.token_staleness_mean
    assert flying.staleness_mean == pytest.approx(whole.staleness_mean, rel=0.1)  # of the oldest token


def test_engines_that_slow_down_under_load_gain_nothing_from_slots() -> None:
    words = [
        "tokens=200",
        "decode_s=0.001",
        "decode_request_s=0.001",
        "step_s=0.01",
        "batch=4",
        "depth=50",
        "batches=60",
    ]
    few, many = (simulate(read_scenario([*words, f"concurrency={slots}"])) for slots in (32, 128))
    assert few.generated_tok_s == pytest.approx(1000, rel=0.05)
    assert many.generated_tok_s == pytest.approx(few.generated_tok_s, rel=0.05)


def test_pauses_and_crashes_cost_what_they_take() -> None:
    words = [
        "tokens=100",
        "decode_s=0.01",
        "step_s=0.1",
        "batch=8",
        "group=2",
        "depth=20",
        "concurrency=4",
        "batches=200",
    ]
    free = simulate(read_scenario(words))
    paused = simulate(read_scenario([*words, "sync_s=1"]))
    # Generation bounds this run: each version now takes a second more.
    assert paused.batch_s == pytest.approx(free.batch_s + 1, rel=0.03)
    crashing = simulate(read_scenario([*words, "crash_s=20", "restart_s=20"]))
    assert crashing.batch_s > 1.8 * free.batch_s
    assert crashing.accounts_hold


def test_failures_are_made_anew_by_the_real_ledger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        result = simulate(read_scenario(["latency=1", "failure=0.2", "batches=50", "batch=8"]))
    failed = result.accounts.failed["engine_failed"]
    assert failed / result.accounts.generated == pytest.approx(0.2, abs=0.03)
    assert not caplog.records
    logging.getLogger("slipstream.queue.ledger").warning("heard again")
    assert caplog.records


def test_groups_without_signal_are_refunded() -> None:
    words = ["latency=lognormal:2,0.5", "step_s=1", "batch=16", "concurrency=512", "batches=80"]
    all_of_them, half = simulate(read_scenario(words)), simulate(read_scenario([*words, "zero_signal=0.5"]))
    assert half.accounts.zero_signal / half.accounts.generated == pytest.approx(0.5, abs=0.08)
    assert half.trained_tok_s <= all_of_them.trained_tok_s * 1.02


def test_a_task_has_one_part_of_a_mixture() -> None:
    result = simulate(
        read_scenario(["latency=0.75*1+0.25*9", "group=4", "batch=4", "batches=100", "depth=8", "cutoff=10000"])
    )
    # Were it drawn by trajectory, two thirds of the groups would have a slow member, and p50 would be the same.
    assert result.length_generated[1] == pytest.approx(1000 / 3, rel=0.01)
    assert result.length_bias == pytest.approx(1.0)


def test_a_run_that_never_makes_a_batch_says_so() -> None:
    with pytest.raises(UserError, match="raise the cutoff"):
        simulate(read_scenario(["latency=1", "publish_s=1000", "cutoff=0", "depth=60", "batch=1", "group=1"]))


# -- an engine -----------------------------------------------------------------------------------------------------


def lease(number: int) -> Lease:
    return Lease(
        lease=number, group=0, member=0, attempt=0, task=Task(id="0", prompt=""), seed=0, min_version=0, deadline_s=1.0
    )


def test_an_engine_shares_its_time_and_knows_each_tokens_version() -> None:
    engine = Engine("a", 4, base_s=0.01, request_s=0.01, in_flight=True)
    engine.load(3, 0.0, 0.0)
    first, second = Request(lease(1), 100, 1), Request(lease(2), 100, 1)
    engine.begin_turn(first, 0.0)
    assert engine.next_end(0.0) == pytest.approx(2.0)  # alone: 0.02 s a token
    engine.begin_turn(second, 1.0)  # first has 50 left, at 0.03 s a token
    assert engine.next_end(1.0) == pytest.approx(2.5)
    engine.load(4, 1.75, pause_s=1.0)  # 25 tokens later
    assert engine.next_end(1.75) == pytest.approx(3.5)
    assert engine.end_turn(3.5) is first
    assert [(run.length, run.version) for run in engine.runs(first)] == [(75, 3), (25, 4)]
    assert engine.next_end(3.5) == pytest.approx(4.5)
    assert engine.end_turn(4.5) is second
    assert [(run.length, run.version) for run in engine.runs(second)] == [(25, 3), (75, 4)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 3), st.booleans()), min_size=1, max_size=30), st.integers(1, 500))
def test_an_engines_runs_are_whole_and_in_order(steps: list[tuple[float, bool]], length: int) -> None:
    engine = Engine("a", 4, base_s=0.01, request_s=0.0, in_flight=True)
    engine.load(0, 0.0, 0.0)
    request = Request(lease(1), length, 1)
    engine.begin_turn(request, 0.0)
    now, version = 0.0, 0
    for seconds, pauses in steps:
        if (end := engine.next_end(now)) <= now + seconds:
            now = end
            break
        now, version = now + seconds, version + 1
        engine.load(version, now, 0.5 if pauses else 0.0)
    engine.end_turn(engine.next_end(now))
    runs = engine.runs(request)
    assert sum(run.length for run in runs) == length
    assert all(run.length > 0 for run in runs)
    assert [run.version for run in runs] == sorted({run.version for run in runs})


# -- what a user writes --------------------------------------------------------------------------------------------


def test_distributions_have_the_mean_they_say(tmp_path: Path) -> None:
    (tmp_path / "seconds.txt").write_text("1 2\n3\n")
    for text, mean in (
        ("2.5", 2.5),
        ("lognormal:3,1", 3.0),
        ("lognormal:3,1,5", None),
        (f"file:{tmp_path}/seconds.txt", 2.0),
        ("0.75*1 + 0.25*lognormal:5,0.5", 2.0),
    ):
        times = parse(text, "latency")
        draw = times.drawer(np.random.default_rng(0))
        shares = np.random.default_rng(1).random(40_000)
        drawn = [draw(share) for share in shares]
        assert sum(drawn) / len(drawn) == pytest.approx(times.mean(), rel=0.03)
        if mean is not None:
            assert times.mean() == pytest.approx(mean)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["depht=2", "latency=1"], "did you mean depth=VALUE?"),
        (["depth", "latency=1"], "did you mean depth"),
        (["latency=1", "depth=deep"], "depth = 'deep'"),
        (["latency=1", "batch=0"], "batch = '0'"),
        (["latency=lognormal:1"], "latency = 'lognormal:1'"),
        (["latency=lognormal:-1,1"], "is no distribution"),
        (["latency=nan"], "is no distribution"),
        (["latency=file:/nowhere/x"], "cannot be read"),
        (["latency=0"], "its mean is 0"),
        (["depth=2"], "latency, tokens: give one of them"),
        (["latency=1", "tokens=2"], "latency, tokens: give one of them"),
    ],
)
def test_a_wrong_word_is_one_line_that_names_it(words: list[str], says: str) -> None:
    with pytest.raises(UserError) as error:
        read_scenario(words)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_words_go_over_what_is_there() -> None:
    start = read_scenario(["tokens=100", "depth=3"])
    assert read_scenario(["cutoff=5"], start) == read_scenario(["tokens=100", "depth=3", "cutoff=5"])
    assert read_scenario(["latency=2"], start).tokens is None
    assert all(f"  {name}=" in key_help() for name in Scenario.__struct_fields__)
