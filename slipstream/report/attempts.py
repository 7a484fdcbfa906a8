"""Charts of single trajectories: how long, how slow, how they ended.

Invariant: evaluations are not in them; shares are of the trajectories that the journal still has.
"""

from collections.abc import Sequence

from slipstream.report.bins import Bins, quantile
from slipstream.report.figure import Chart, Figure, Series, few_ticks
from slipstream.report.history import Told


def _histogram(
    key: str, title: str, says: str, x: str, groups: Sequence[tuple[str, Sequence[float]]], empty: str
) -> Figure:
    """Each group's share by bin, so that few and many compare."""
    values = [value for _, group in groups for value in group]
    bins = Bins(values)
    series: list[Series] = []
    for number, (name, group) in enumerate(groups):
        total = max(1, len(group))
        marks = f"{name}: median {quantile(group, 0.5):.3g}, 99% {quantile(group, 0.99):.3g}" if group else name
        series.append(Series(marks, [count / total for count in bins.count(group)] if values else [], number))
    labels = bins.labels if values else []
    ticks = [(index, text) for index, text in enumerate(bins.lower) if index % max(1, -(-len(labels) // 8)) == 0]
    return Figure(
        key=key,
        title=title,
        says=says,
        kind="bars",
        xs=labels,
        ticks=ticks if values else [],
        x=x,
        share=True,
        series=series,
        empty=empty,
    )


_NONE = "no trajectory is there, or queue.keep let them go"


def lengths(told: Sequence[Told]) -> Chart:
    trained = [float(each.attempt.sampled) for each in told if each.story.fate is not None and each.story.fate.trained]
    return _histogram(
        "lengths",
        "Lengths",
        "share of trajectories by sampled tokens; where the two differ, training is biased by length",
        "sampled tokens",
        [("generated", [float(each.attempt.sampled) for each in told]), ("trained", trained)],
        _NONE,
    )


def latencies(told: Sequence[Told]) -> Chart:
    return _histogram(
        "latency",
        "Seconds of a trajectory",
        "share of trajectories by time from lease to end",
        "seconds",
        [("trajectories", [each.attempt.seconds for each in told])],
        _NONE,
    )


def turns(told: Sequence[Told]) -> Chart:
    most = max((each.attempt.turns for each in told), default=0)
    counts = [0] * (min(most, 30) + 1)
    for each in told:
        counts[min(each.attempt.turns, len(counts) - 1)] += 1
    labels = [f"{turns}+" if turns == 30 else str(turns) for turns in range(len(counts))] if told else []
    return Figure(
        key="turns",
        title="Turns",
        says="share of trajectories by turns of the model",
        kind="bars",
        xs=labels,
        ticks=few_ticks(labels, 12),
        x="turns",
        share=True,
        empty=_NONE,
        series=[Series("trajectories", [count / len(told) for count in counts] if told else [])],
    )


def tools(told: Sequence[Told]) -> Chart:
    return _histogram(
        "tools",
        "Seconds of a tool call",
        "share of trajectories by mean time of their tool calls",
        "seconds",
        [("trajectories", [each.attempt.s_tool / each.attempt.calls for each in told if each.attempt.calls])],
        "no tool was called",
    )


def outcomes(told: Sequence[Told]) -> Chart:
    counts: dict[str, int] = {}
    for each in told:
        counts[each.attempt.outcome] = counts.get(each.attempt.outcome, 0) + 1
    names = sorted(counts, key=lambda name: -counts[name])
    return Figure(
        key="outcomes",
        title="How trajectories ended",
        says="trajectories by outcome; finished is the one that is no failure",
        kind="bars",
        xs=names,
        ticks=list(enumerate(names)),
        series=[Series("trajectories", [float(counts[n]) for n in names], 2)],
        empty=_NONE,
    )
