"""A run's own measurements, as a scenario: what its trajectories, its engines, its tools and its learner took.

Invariant: everything is read from config.toml, metrics.jsonl and the journal; what a run cannot tell (an engine's pace
at a load that it never had) is said in `notes`, not guessed in silence.
"""

from typing import Any

import msgspec
import numpy as np

from slipstream.config import Config, RunDir
from slipstream.configfile import read_config
from slipstream.errors import UserError
from slipstream.observe.metrics import read_metrics
from slipstream.queue import is_heldout, read_trajectories
from slipstream.simulator.durations import constant, empirical
from slipstream.simulator.scenario import Scenario

WARM_UP = 0.15  # of the steps: caches, compilation, the queue filling
MOST = 20_000  # trajectories: more say nothing new
SPREAD = 1.5  # an engine's load has to vary by so much before its pace is fitted to it


class Measured(msgspec.Struct, kw_only=True, frozen=True):
    """`scenario` is the run as it was set; the rest is what it came to, from the window after the warm-up."""

    scenario: Scenario
    config: Config
    metrics: list[dict[str, float]]
    steps: int
    batch_s: float  # seconds from one version to the next
    learner_busy: float  # share of its time in which it does not wait for data
    rollouter_busy: float  # share of all slots that hold a trajectory
    staleness_mean: float  # of trained tokens
    staleness_p99: float
    latency_mean: float  # seconds of a trajectory
    latency_p99: float
    pace_known: bool  # what a load does to an engine's pace
    notes: list[str]


class Sample(msgspec.Struct, frozen=True):
    """What the journal says of trajectories that were trained on or might have been. One entry each."""

    tokens: list[int]  # sampled
    turns: list[int]
    generate_s: list[float]
    tool_s: list[float]
    begun: list[float]
    done: list[float]
    failed: int


def measured(run_dir: RunDir) -> Measured:
    """Raises UserError for a run that is too young to say anything."""
    config = read_config(run_dir.config, files=False)
    metrics = read_metrics(run_dir)
    if len(metrics) < 4:
        raise UserError(
            f"RUN = {str(run_dir.root)!r}: it has {len(metrics)} steps in metrics.jsonl; it takes 4 or more"
        )
    first, last = metrics[int(len(metrics) * WARM_UP)], metrics[-1]
    sample = _sample(run_dir, config, first["time"], last["time"])
    window = _Window(first, last)
    decode_s, decode_request_s, notes = _pace(sample, config.engine.rollouters)
    late = [step for step in metrics if step["step"] > first["step"]]
    streamed = _streamed(late)
    zero_signal = _share(late, "groups/zero_signal", "groups/taken")
    work = window.each("time/learner/forward_backward")
    rest = sum(window.each(f"time/learner/{part}") for part in ("publishing", "checkpoint", "other"))
    tools = sum(sample.tool_s) / max(1, sum(turns - 1 for turns in sample.turns))
    scenario = Scenario(
        batch=config.learner.batch,
        depth=last.get("staleness/depth", config.staleness.start_depth),  # auto: where it came to
        cutoff=config.staleness.cutoff,
        selection=config.queue.selection,
        group=config.rollout.group,
        batches=batches_for(config.learner.batch * config.rollout.group / (1 - zero_signal)),
        rollouters=config.engine.rollouters,
        concurrency=config.rollout.concurrency,
        tokens=empirical([max(1.0, float(count)) for count in sample.tokens]),
        decode_s=decode_s,
        decode_request_s=decode_request_s,
        turns=constant(max(1.0, sum(sample.turns) / len(sample.turns))),
        tool_s=constant(tools),
        step_s=constant(work * (1 - streamed) + rest),
        group_s=work * streamed / config.learner.batch,
        sync_s=window.each("time/rollouter/paused_for_weights") / config.engine.rollouters,
        zero_signal=zero_signal,
        failure=sample.failed / (sample.failed + len(sample.tokens)),
    )
    spans = sorted(done - begun for begun, done in zip(sample.begun, sample.done, strict=True))
    return Measured(
        scenario=scenario,
        config=config,
        metrics=metrics,
        steps=window.steps,
        batch_s=window.seconds / window.steps,
        learner_busy=1 - window.each("time/learner/waiting_for_data") / (window.seconds / window.steps),
        rollouter_busy=sum(spans) / ((max(sample.done) - min(sample.done)) * scenario.slots),
        staleness_mean=sum(step["staleness/mean"] for step in late) / len(late),
        staleness_p99=sum(step["staleness/p99"] for step in late) / len(late),
        latency_mean=sum(spans) / len(spans),
        latency_p99=spans[int(0.99 * (len(spans) - 1))],
        pace_known=not notes,
        notes=notes,
    )


def batches_for(trajectories: float) -> int:
    """Steps to simulate, of so many trajectories each: enough to average over, and few enough to wait for."""
    return max(24, min(200, int(8000 / trajectories)))


class _Window:
    """Two lines of metrics.jsonl, and what counters came to in between."""

    def __init__(self, first: dict[str, float], last: dict[str, float]) -> None:
        self._first, self._last = first, last
        self.steps = round(last["step"] - first["step"])
        self.seconds = last["time"] - first["time"]

    def each(self, name: str) -> float:
        """Of a step, mean. A part that a process was never in is not there."""
        return max(0.0, self._last.get(name, 0.0) - self._first.get(name, 0.0)) / self.steps


def _share(steps: list[dict[str, float]], part: str, whole: str) -> float:
    return sum(step.get(part, 0.0) for step in steps) / max(1.0, sum(step.get(whole, 0.0) for step in steps))


def _streamed(steps: list[dict[str, float]]) -> float:
    """Share of a step's work that is over when its last group arrives."""
    return sum(step.get("step/hidden_fraction", 0.0) for step in steps) / len(steps)


def _sample(run_dir: RunDir, config: Config, begin: float, end: float) -> Sample:
    sample = Sample([], [], [], [], [], [], 0)
    failed = 0
    for batch in read_trajectories(run_dir.journal):
        row = _row(batch)
        if is_heldout(row["group"]) or not begin <= row["t_done"] <= end:
            continue
        if getattr(config.outcomes, row["outcome"]) == "retry":
            failed += 1
            continue
        sample.tokens.append(row["tokens"])
        sample.turns.append(max(1, row["turns"]))
        sample.generate_s.append(row["s_generate"])
        sample.tool_s.append(row["s_tool"])
        sample.begun.append(row["t_leased"])
        sample.done.append(row["t_done"])
        if len(sample.tokens) == MOST:
            break
    if not sample.tokens:
        raise UserError(f"RUN = {str(run_dir.root)!r}: its journal has no trajectory of the steps that are measured")
    return msgspec.structs.replace(sample, failed=failed)


def _row(batch: Any) -> dict[str, Any]:
    """What is wanted of one trajectory's record batch."""
    names = ("group", "t_leased", "t_done", "s_generate", "s_tool", "turns", "outcome")
    row = {name: batch.column(name)[0].as_py() for name in names}
    row["tokens"] = sum(run["length"] for run in batch.column("version_runs")[0].as_py() if run["version"] >= 0)
    return row


def _pace(sample: Sample, rollouters: int) -> tuple[float, float, list[str]]:
    """Seconds of a decode step without load, what each request adds, and what could not be told."""
    tokens = np.asarray(sample.tokens, dtype=float)
    wanted = tokens > 0
    pace = np.asarray(sample.generate_s)[wanted] / tokens[wanted]
    begun, done = np.sort(sample.begun), np.sort(sample.done)
    middle = (np.asarray(sample.begun) + np.asarray(sample.done))[wanted] / 2
    load = (np.searchsorted(begun, middle) - np.searchsorted(done, middle)) / rollouters
    mean = float(np.average(pace, weights=tokens[wanted]))
    low, high = np.quantile(load, [0.1, 0.9])
    if high >= SPREAD * max(1.0, float(low)):
        slope, start = np.polyfit(load, pace, 1, w=np.sqrt(tokens[wanted]))
        if slope > 0 and start > 0:
            return float(start), float(slope), []
        if slope > 0:  # no part of the pace that is there without load can be seen
            return mean * 0.01, mean * 0.99 / float(np.mean(load)), []
    note = (
        f"its engines had {low:.0f} to {high:.0f} trajectories at once: how their pace depends on that cannot be told, "
        "and is taken as constant"
    )
    return mean, 0.0, [note]
