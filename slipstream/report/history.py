"""What a run left, as numbers by step and by trajectory: metrics.jsonl, the ledger's events, the trajectories.

Invariant: a trajectory is read once, however often `History.read` is called while the run goes on; tokens of
evaluations are in nothing but the held-out results.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec

from slipstream.config import RunDir
from slipstream.observe.metrics import read_metrics
from slipstream.queue.journal import read_trajectory
from slipstream.queue.tasks import heldout_version, is_heldout
from slipstream.viewer.story import Story, read_stories

MOST_POINTS = 160  # along an axis of steps: more cannot be told apart

Metrics = dict[str, float]


class Attempt(msgspec.Struct, frozen=True):
    """A trajectory, without its tokens."""

    lease: int
    evaluated: int | None  # the version that a held-out attempt is of; None: made to train on
    outcome: str
    reward: float | None
    sampled: int
    turns: int
    calls: int
    errors: int
    seconds: float  # from lease to end
    s_generate: float
    s_tool: float
    s_wait: float
    done: float  # Unix time
    by_version: tuple[tuple[int, int], ...]  # (version, sampled tokens)


class Told(msgspec.Struct, frozen=True):
    """A trajectory and what became of it."""

    attempt: Attempt
    story: Story


class History:
    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._read: dict[int, Attempt] = {}
        self.metrics: list[Metrics] = []
        self.told: list[Told] = []

    def read(self) -> None:
        """As of now. Raises UserError when the directory is no run's."""
        self.metrics = read_metrics(self._run_dir)
        stories = read_stories(self._run_dir.journal)
        self.told = [Told(attempt, story) for story in stories if (attempt := self._attempt(story)) is not None]
        self._read = {told.attempt.lease: told.attempt for told in self.told}

    def _attempt(self, story: Story) -> Attempt | None:
        """None when its place is not there any more: the journal was compacted since the log was read."""
        if story.lease in self._read:
            return self._read[story.lease]
        try:
            return attempt_of(read_trajectory(self._run_dir.journal, story.place))
        except FileNotFoundError:
            return None

    @property
    def trained(self) -> list[Told]:
        """All but the evaluations'."""
        return [told for told in self.told if told.attempt.evaluated is None]


def attempt_of(row: Any) -> Attempt:
    """`row`: a record batch of one trajectory."""
    value = {name: row.column(name)[0].as_py() for name in _PLAIN}
    counts: dict[int, int] = {}
    for run in value["version_runs"]:
        if run["version"] >= 0:
            counts[run["version"]] = counts.get(run["version"], 0) + run["length"]
    reward = value["reward"]
    return Attempt(
        lease=value["lease"],
        evaluated=heldout_version(value["group"]) if is_heldout(value["group"]) else None,
        outcome=value["outcome"],
        reward=reward if reward is not None and math.isfinite(reward) else None,
        sampled=sum(counts.values()),
        turns=value["turns"],
        calls=value["tool_calls"],
        errors=value["tool_errors"],
        seconds=max(0.0, value["t_done"] - value["t_leased"]),
        s_generate=value["s_generate"],
        s_tool=value["s_tool"],
        s_wait=value["s_wait"],
        done=value["t_done"],
        by_version=tuple(sorted(counts.items())),
    )


_PLAIN = (
    *("lease", "group", "outcome", "reward", "turns", "tool_calls", "tool_errors"),
    *("t_leased", "t_done", "s_generate", "s_tool", "s_wait", "version_runs"),
)


class Steps:
    """The steps of a run in at most `MOST_POINTS` spans of equal length.

    Gauges are averaged over a span; of counters it is told how much they grew in it. A counter that a process began
    anew after a crash counts from zero.
    """

    def __init__(self, metrics: Sequence[Metrics]) -> None:
        self._metrics = metrics
        each = max(1, -(-len(metrics) // MOST_POINTS))
        self._spans = [(first, min(first + each, len(metrics))) for first in range(0, len(metrics), each)]
        self.last = [int(metrics[end - 1]["step"]) for _, end in self._spans]

    @property
    def names(self) -> set[str]:
        return {name for step in self._metrics for name in step}

    @property
    def labels(self) -> list[str]:
        return [str(step) for step in self.last]

    def span_of(self, step: int) -> int | None:
        """The index of the span that a step lies in."""
        return next((index for index, last in enumerate(self.last) if step <= last), None)

    def mean(self, name: str) -> list[float | None]:
        found: list[float | None] = []
        for first, end in self._spans:
            values = [step[name] for step in self._metrics[first:end] if name in step]
            found.append(sum(values) / len(values) if values else None)
        return found

    def most(self, name: str) -> list[float | None]:
        return [
            max((step[name] for step in self._metrics[first:end] if name in step), default=None)
            for first, end in self._spans
        ]

    def grown(self, name: str) -> list[float]:
        readings = [0.0, *(step.get(name, 0.0) for step in self._metrics)]
        grew = [now - last if now >= last else now for last, now in pairwise(readings)]
        return [sum(grew[first:end]) for first, end in self._spans]
