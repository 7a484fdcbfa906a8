"""A run whose truth is known is measured right, and the advice is what that truth asks for."""

import random
from array import array
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from slipstream.config import Config, RunDir
from slipstream.configfile import write_config
from slipstream.errors import UserError
from slipstream.observe.advise import health
from slipstream.queue import decode, encode
from slipstream.simulator import measured
from slipstream.simulator.advisor import Report, advise, svg, text
from slipstream.trajectory import Outcome, Span, SpanKind, Trajectory, VersionRun

STEPS, STEP_S = 20, 10.0  # the run takes so many steps of so many seconds


def config_with(depth: float, **sections: dict[str, object]) -> Config:
    raw: dict[str, dict[str, object]] = {
        "model": {"path": "/m"},
        "environment": {"path": "/e.py:e"},
        "tasks": {"train": "/t.jsonl"},
        "rollout": {"group": 2, "concurrency": 8},
        "learner": {"batch": 4},
        "staleness": {"depth": depth, "cutoff": 8},
        **sections,
    }
    return msgspec.convert(raw, Config)


def trajectory(number: int, begun: float, pace: float, tokens: int, outcome: Outcome = Outcome.FINISHED) -> Any:
    """Its record batch: two turns with a second of tools between them."""
    made = Trajectory(
        lease=number + 1,
        group=number // 2,
        task="t",
        attempt=0,
        token_ids=array("i", range(tokens + 1)),
        sampled=bytearray([0] + [1] * tokens),
        logprobs=array("f", [0.0] + [-0.5] * tokens),
        version_runs=[VersionRun(1, -1), VersionRun(tokens, 0)],
        spans=[Span(SpanKind.PROMPT, 0, 0, 1), Span(SpanKind.SAMPLED, 0, 1, tokens)],
        outcome=outcome,
        reward=1.0,
        turns=2,
        t_leased=begun,
        t_done=begun + pace * tokens + 1.0,
        s_generate=pace * tokens,
        s_tool=1.0,
    )
    return decode(encode([made]))


def step_line(step: int, work_s: float) -> dict[str, float]:
    """A line of metrics.jsonl: half of the work is done while groups arrive."""
    return {
        "step": step,
        "time": step * STEP_S,
        "staleness/mean": 1.0,
        "staleness/p99": 2.0,
        "step/hidden_fraction": 0.5,
        "tokens/step": 800.0,
        "groups/taken": 5.0,
        "groups/zero_signal": 1.0,
        "time/learner/forward_backward": step * work_s,
        "time/learner/waiting_for_data": step * (STEP_S - work_s - 0.5),
        "time/learner/publishing": step * 0.5,
        "time/rollouter/paused_for_weights": step * 0.25,
    }


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(config: Config, batches: list[Any], lines: list[dict[str, float]]) -> RunDir:
        run_dir = RunDir(tmp_path)
        write_config(config, run_dir.config)
        run_dir.metrics.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        monkeypatch.setattr("slipstream.simulator.measurements.read_trajectories", lambda folder: iter(batches))
        return run_dir

    return make


def steady(slots: int, tokens: int, pace: float) -> list[Any]:
    """`slots` trajectories at any time."""
    spread = random.Random(0)
    span = pace * tokens + 1.0
    return [
        trajectory(lane * 1000 + turn, turn * span + spread.random(), pace, tokens)
        for lane in range(slots)
        for turn in range(int(STEPS * STEP_S / span))
    ]


def test_a_run_is_measured_as_it_was(make_run: Any) -> None:
    failed = [trajectory(10**6 + n, 5.0 * n, 0.02, 50, Outcome.ENGINE_FAILED) for n in range(40)]
    run_dir = make_run(config_with(1.0), steady(8, 100, 0.04) + failed, [step_line(n, 4.0) for n in range(1, STEPS)])
    run = measured(run_dir)
    scenario = run.scenario
    assert run.batch_s == pytest.approx(STEP_S)
    assert run.learner_busy == pytest.approx(0.45)
    assert run.rollouter_busy == pytest.approx(1.0, rel=0.05)
    assert scenario.tokens is not None
    assert scenario.tokens.mean() == pytest.approx(100)
    assert scenario.decode_s == pytest.approx(0.04)
    assert scenario.decode_request_s == 0
    assert scenario.tool_s.mean() == pytest.approx(1.0)
    assert scenario.turns.mean() == pytest.approx(2)
    assert scenario.group_s == pytest.approx(4.0 * 0.5 / 4)
    assert scenario.step_s.mean() == pytest.approx(4.0 * 0.5 + 0.5)
    assert scenario.sync_s == pytest.approx(0.25)
    assert scenario.zero_signal == pytest.approx(0.2)
    assert 0.05 < scenario.failure < 0.15
    assert any("cannot be told" in note for note in run.notes)


def test_a_pace_that_depends_on_the_load_is_seen(make_run: Any) -> None:
    """Alternating quiet and busy spells: 0.01 s a token, and 0.005 more for each trajectory that is there."""
    batches: list[Any] = []
    for spell in range(20):
        slots = 2 if spell % 2 else 8
        pace = 0.01 + 0.005 * slots
        batches += [trajectory(spell * 100 + lane, 10.0 * spell, pace, int(8 / pace)) for lane in range(slots)]
    scenario = measured(make_run(config_with(1.0), batches, [step_line(n, 4.0) for n in range(1, STEPS)])).scenario
    assert scenario.decode_request_s == pytest.approx(0.005, rel=0.1)
    assert scenario.decode_s == pytest.approx(0.01, rel=0.2)


def keys(report: Report) -> dict[str, str]:
    return {advice.key: advice.value for advice in report.sentences if advice.key}


def test_a_run_on_policy_is_told_to_go_deeper(make_run: Any) -> None:
    run_dir = make_run(config_with(0.0), steady(8, 100, 0.04), [step_line(n, 4.0) for n in range(1, STEPS)])
    report = advise(run_dir)
    assert float(keys(report)["staleness.depth"]) >= 0.5
    assert report.advised.speedup > 1.2
    steps = [point.steps_per_hour for point in report.by_depth]
    ages = [point.staleness_mean for point in report.by_depth]
    assert steps[-1] > 1.2 * steps[0]
    assert ages[0] == 0 < ages[-1]
    said = text(report)
    assert "times as fast" in said
    assert "real" in said
    assert [node.tag.rpartition("}")[2] for node in ElementTree.fromstring(svg(report)).iter()].count("polyline") == 4


def test_a_busy_learner_gains_nothing_from_rollouters(make_run: Any) -> None:
    run_dir = make_run(config_with(4.0), steady(8, 20, 0.01), [step_line(n, 9.5) for n in range(1, STEPS)])
    report = advise(run_dir)
    assert "engine.rollouters" not in keys(report)
    said = next(advice.says for advice in report.sentences if "rollouters gain nothing" in advice.says)
    assert "the learner is busy" in said


def test_a_young_run_is_told_to_wait(make_run: Any) -> None:
    with pytest.raises(UserError, match="4 or more"):
        advise(make_run(config_with(1.0), [], [step_line(1, 4.0)]))
    with pytest.raises(UserError, match="no trajectory"):
        advise(make_run(config_with(1.0), [], [step_line(n, 4.0) for n in range(1, 9)]))


# -- health --------------------------------------------------------------------------------------------------------


GOOD = {"is/ess": 0.95, "mismatch/kl_k3": 1e-3, "is/masked_fraction": 0.01, "loss/clip_fraction": 0.01}


@pytest.mark.parametrize(
    ("values", "sections", "key", "value"),
    [
        ({"mismatch/kl_k3": 0.05, "staleness/mean": 0.1}, {}, "model.dtype", "float32"),
        ({"mismatch/kl_k3": 0.05, "staleness/mean": 3.0}, {}, "learner.lr", "5e-07"),
        (
            {"mismatch/kl_k3": 0.05, "staleness/mean": 3.0},
            {"correction": {"presets": ["tis"]}},
            "correction.presets",
            "",
        ),
        ({"is/ess": 0.3}, {"correction": {"presets": ["icepop"]}}, "correction.presets", "['tis', 'icepop']"),
        ({"is/ess": 0.3}, {}, "learner.ess_lr", "true"),
        ({"is/ess": 0.3}, {"learner": {"ess_lr": True}}, "staleness.cutoff", "4"),
        ({"is/masked_fraction": 0.3}, {}, "staleness.depth", ""),
        ({"tokens/generated": 1000.0, "tokens/masked_stale": 200.0}, {}, "staleness.cutoff", "16"),
        ({"loss/clip_fraction": 0.4}, {"learner": {"proximal": "bypass"}}, "learner.proximal", "recompute"),
        ({"groups/taken": 10.0, "groups/zero_signal": 8.0, "groups/pass_rate": 0.9}, {}, "rollout.group", "4"),
        ({"tokens/generated": 1000.0, "tokens/failed": 200.0}, {}, "", ""),
    ],
)
def test_each_threshold_has_its_sentence(
    values: dict[str, float], sections: dict[str, dict[str, object]], key: str, value: str
) -> None:
    config = config_with(2.0, **sections)
    found = health(config, [{"step": 1, **GOOD, **values}])
    assert len(found) == 1
    assert found[0].key == key
    assert value in found[0].value


def test_a_healthy_run_is_told_nothing() -> None:
    assert health(config_with(2.0), [{"step": n, **GOOD} for n in range(1, 60)]) == []
    assert health(config_with(2.0), [{"step": 1}]) == []
    # What was bad long ago is not what is bad now.
    assert health(config_with(2.0), [{"step": n, **GOOD, "is/ess": 0.1 if n < 20 else 0.9} for n in range(1, 60)]) == []
