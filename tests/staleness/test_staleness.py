"""The gate admits what the rule says, in exact arithmetic; version runs are counted as their tokens would be."""

from fractions import Fraction

from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.staleness import Gate, expand, over_cutoff, sample_seed, sampled_tokens, staleness
from slipstream.trajectory import VersionRun

runs = st.lists(st.builds(VersionRun, st.integers(0, 5), st.integers(-1, 9)), max_size=8)


@given(st.integers(0, 60), st.integers(1, 256), st.integers(0, 10**6))
@example(tenths=16, batch=100, version=262142)
def test_the_limit_is_exact_for_decimal_depths(tenths: int, batch: int, version: int) -> None:
    """0.1 * 30 is 3, although floats say 2.9999999999999996 or 3.0000000000000004 somewhere."""
    exact = (Fraction(tenths, 10) + version + 1) * batch
    assert Gate(batch, tenths / 10, 0).limit(version) == int(exact)


def test_capacity_is_the_contracts_formula() -> None:
    gate = Gate(batch=32, depth=2.0, cutoff=8)
    assert gate.capacity(0, 0, 0) == 96
    assert gate.capacity(5, 200, 40) == 16
    assert gate.capacity(0, 90, 10) == -4
    assert Gate(32, 2.0, 8, max_running=10).capacity(0, 0, 4) == 6
    assert Gate(30, 0.1, 8).capacity(0, 0, 0) == 33


def test_depth_zero_wants_the_current_weights() -> None:
    assert [Gate(4, 0, 0).min_version(v) for v in (0, 3)] == [0, 3]
    assert [Gate(4, 0.9, 0).min_version(v) for v in (0, 3)] == [0, 3]
    assert [Gate(4, 2.5, 0).min_version(v) for v in (0, 1, 5)] == [0, 0, 3]


@given(runs, st.integers(0, 12), st.integers(0, 6))
def test_runs_are_counted_as_their_tokens(of: list[VersionRun], learner: int, cutoff: int) -> None:
    tokens = [version for version in expand(of) if version >= 0]
    ages = [learner - version for version in tokens]
    assert len(expand(of)) == sum(run.length for run in of)
    assert sampled_tokens(of) == len(tokens)
    found = staleness(of, learner)
    assert (found.tokens, found.max) == (len(tokens), max(ages, default=0))
    assert abs(found.mean * len(ages) - sum(ages)) < 1e-9
    gate = Gate(1, 0, cutoff)
    assert over_cutoff(of, learner, cutoff) == sum(not gate.fresh(version, learner) for version in tokens)


def test_no_two_samples_share_a_seed() -> None:
    places = [(run, g, m, a) for run in range(3) for g in (0, 1, 11, 1 << 60) for m in range(12) for a in range(12)]
    seeds = {sample_seed(*place) for place in places}
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
