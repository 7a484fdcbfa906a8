"""What the charts say, against what was put into the run."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from viewer_world import World

from slipstream.report.bins import Bins, quantile
from slipstream.report.charts import sections
from slipstream.report.figure import Chart, Figure, Heat
from slipstream.report.history import MOST_POINTS, History, Steps
from slipstream.report.svg import nice


def charts_of(world: World) -> dict[str, Chart]:
    history = History(world.run_dir)
    history.read()
    return {chart.key: chart for section in sections(history) for chart in section.charts}


def series(chart: Chart) -> dict[str, list[float | None]]:
    assert isinstance(chart, Figure)
    return {each.name: each.ys for each in chart.series}


def test_every_chart_has_data(full: World) -> None:
    charts = charts_of(full)
    assert [key for key, chart in charts.items() if not chart.has_data] == []
    for chart in charts.values():
        rows = [each.ys for each in chart.series] if isinstance(chart, Figure) else chart.cells
        assert {len(row) for row in rows} == {len(chart.xs)}


def test_shares_of_time_sum_to_all_of_it_also_after_a_restart(full: World) -> None:
    charts = charts_of(full)
    assert series(charts["time-learner"]) == {
        "forward backward": pytest.approx([0.75] * 4),
        "waiting for data": pytest.approx([0.25] * 4),
    }
    for columns in (series(charts[key]).values() for key in ("time-learner", "time-rollouter")):
        assert [sum(value or 0 for value in column) for column in zip(*columns, strict=True)] == pytest.approx(
            [1.0] * 4
        )


def test_fates_are_what_counters_grew_by(full: World) -> None:
    fates = series(charts_of(full)["fates"])
    assert fates["trained"] == [60.0] * 4
    assert fates["no signal"] == [20.0] * 4
    assert "discarded, too old" not in fates


def test_tools_are_told_apart_and_counted_between_points(full: World) -> None:
    charts = charts_of(full)
    assert series(charts["tool-calls"]) == {"look": [5.0] * 4}
    assert series(charts["tool-p99_s"]) == {"look": [0.02] * 4}


def test_ages_are_of_tokens_at_their_step(full: World) -> None:
    """From the second step on, the first turn of the first trajectory is a version older than the rest."""
    ages = charts_of(full)["ages"]
    assert isinstance(ages, Heat)
    assert ages.rows == ["0", "1"]
    old = len(full.tokenizer.encode("let me look", add_special_tokens=False).ids)
    new = sum(len(full.tokenizer.encode(text, add_special_tokens=False).ids) for text in ("it is 4", "no idea"))
    assert ages.cells[1] == pytest.approx([0.0] + [old / (old + new)] * 3)
    assert ages.cells[0] == pytest.approx([1.0] + [new / (old + new)] * 3)


def test_evaluations_count_in_the_held_out_rate_alone(full: World) -> None:
    charts = charts_of(full)
    assert (charts["heldout"].xs, series(charts["heldout"])) == (["0"], {"pass rate": [0.5]})
    outcomes = charts["outcomes"]
    assert (outcomes.xs, series(outcomes)) == (["finished", "timeout"], {"trajectories": [8.0, 1.0]})


def test_a_run_without_a_step_says_so_in_each_chart(world: World) -> None:
    world.publish(0)
    world.close()
    charts = charts_of(world)
    assert charts
    assert not any(chart.has_data for chart in charts.values())
    assert all(chart.empty for chart in charts.values())


def test_a_trajectory_is_read_once(world: World) -> None:
    history = History(world.run_dir)
    world.deliver(world.trajectory(1, 0))
    history.read()
    first = history.told[0].attempt
    world.deliver(world.trajectory(2, 0))
    world.train(1, 1, 2)
    history.read()
    assert [told.attempt.lease for told in history.told] == [1, 2]
    assert history.told[0].attempt is first
    assert [told.story.step for told in history.told] == [1, 1]
    world.close()


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=30))
@settings(max_examples=50)
def test_every_value_is_in_one_bin(values: list[float]) -> None:
    bins = Bins(values)
    assert sum(bins.count(values)) == len(values)
    assert len(bins.labels) == len(bins.lower) == len(bins.count([]))
    assert min(values) <= quantile(values, 0.5) <= max(values)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=400))
@settings(max_examples=50)
def test_spans_lose_nothing_of_a_counter(readings: list[float]) -> None:
    metrics = [{"step": float(index + 1), "tokens/trained": value} for index, value in enumerate(readings)]
    steps = Steps(metrics)
    expected = readings[0] + sum(b - a if b >= a else b for a, b in pairwise(readings))
    assert sum(steps.grown("tokens/trained")) == pytest.approx(expected)
    assert len(steps.last) <= MOST_POINTS
    assert steps.last[-1] == len(readings)
    assert [steps.span_of(step) for step in steps.last] == list(range(len(steps.last)))


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
@settings(max_examples=50)
def test_axes_cover_what_is_drawn(low: float, spread: float) -> None:
    values = nice(low, low + spread)
    step = values[1] - values[0]
    assert values[0] <= low + 1e-6 * step
    assert values[-1] >= low + spread - 1e-6 * step
    assert 2 <= len(values) <= 8
