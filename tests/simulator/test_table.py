"""The simulator gives what is known of the gate and the cutoff: the table of the design, and laws of queues.

The numbers are those of design.md, section 1, and of the longer table that they are from: 32 groups a batch, groups of
one, a lognormal latency with a mean of two steps and sigma 1. 64 slots are just enough to keep the learner busy.
"""

import pytest

from slipstream.simulator import Result, read_scenario, simulate


def run(*words: str, batches: int = 500) -> Result:
    base = ("batch=32", "step_s=0.5", "latency=lognormal:1.0,1.0", "group=1", f"batches={batches}")
    return simulate(read_scenario([*base, *words]))


def test_depth_alone_fixes_the_mean_and_leaves_the_maximum_open() -> None:
    result = run("depth=2", "cutoff=100000", "concurrency=64")
    assert result.staleness_mean == pytest.approx(2.0, rel=0.1)
    assert result.over_depth_fraction == pytest.approx(0.22, rel=0.1)
    assert result.learner_busy == pytest.approx(0.82, rel=0.1)
    assert result.staleness_max > 25  # 52 in the table: the longest of some ten thousand draws without a bound
    assert result.discarded_fraction == 0


def test_a_cutoff_alone_discards_the_long_ones() -> None:
    result = run("depth=4", "cutoff=4", "concurrency=64")
    assert result.discarded_fraction == pytest.approx(0.113, rel=0.1)
    assert result.learner_busy == pytest.approx(0.88, rel=0.1)
    assert result.staleness_mean == pytest.approx(2.10, rel=0.1)
    assert result.staleness_max == 4
    assert result.length_bias < 0.8


def test_depth_and_cutoff_with_enough_rollouters() -> None:
    result = run("depth=3", "cutoff=8", "concurrency=128", batches=1000)
    assert result.staleness_mean == pytest.approx(2.60, rel=0.1)
    assert result.staleness_max == 8
    assert result.discarded_fraction == pytest.approx(0.029, rel=0.1)
    # Whoever is served as groups become complete loses more of the old ones; the table served the oldest first.
    fifo = run("depth=3", "cutoff=8", "concurrency=128", "selection=fifo", batches=1000)
    assert fifo.discarded_fraction > 1.05 * result.discarded_fraction
    assert result.learner_busy == pytest.approx(1.0, rel=0.01)


def test_a_shallow_cutoff_starves_the_learner() -> None:
    result = run("depth=2", "cutoff=2", "concurrency=64")
    assert result.discarded_fraction == pytest.approx(0.166, rel=0.1)
    assert result.learner_busy == pytest.approx(0.70, rel=0.1)
    assert result.staleness_mean == pytest.approx(1.08, rel=0.1)


def test_surplus_rollouters_only_make_tokens_older() -> None:
    matched = run("depth=8", "cutoff=100000", "concurrency=64")
    twice = run("depth=8", "cutoff=100000", "concurrency=128")
    assert twice.staleness_mean == pytest.approx(8.0, rel=0.1)
    assert matched.staleness_mean < 0.8 * twice.staleness_mean
    assert matched.learner_busy > 0.97


def test_groups_are_held_by_their_slowest_member() -> None:
    one = run("depth=8", "cutoff=100000", "concurrency=128", batches=200)
    eight = run("depth=8", "cutoff=100000", "concurrency=1024", "group=8", batches=200)
    assert eight.staleness_mean == pytest.approx(8.0, rel=0.1)
    assert eight.staleness_p99 > 1.2 * one.staleness_p99
