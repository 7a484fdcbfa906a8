"""Correction rules against numbers computed elsewhere, and what must hold for any combination of them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.learner.corrections import PRESETS, Correction, Rule, correct

NAN, INF = float("nan"), float("inf")
# verl's worked batch: two rows of three and four tokens; one masked position in between must not matter.
OLD = torch.tensor([-1, -0.5, -2, NAN, -0.2, -1.5, -0.7, -3], dtype=torch.float64)
ROLLOUT = torch.tensor([-1.2, -0.4, -3.5, INF, -0.2, -1, -0.9, -1], dtype=torch.float64)
SAMPLED = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1], dtype=torch.bool)
BOUNDS = torch.tensor([0, 4, 8], dtype=torch.int32)


def apply(*rules: Rule) -> Correction:
    return correct(OLD, ROLLOUT, SAMPLED, BOUNDS, list(rules))


def of_log_ratio(log_ratio: list[float], *rules: Rule, mask: list[int] | None = None) -> Correction:
    ratio = torch.tensor(log_ratio, dtype=torch.float64)
    sampled = torch.ones(len(ratio), dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    return correct(ratio - 1, torch.full_like(ratio, -1), sampled, torch.tensor([0, len(ratio)]), list(rules))


def close(found: torch.Tensor | float, expected: object, within: float = 1e-6) -> None:
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        atol=within,
        rtol=0,
    )


def mask(**bounds: object) -> Rule:
    return Rule(action="mask", **bounds)


# -- verl's numbers


def test_truncated_token_weights() -> None:
    found = apply(*Rule.preset("tis"))
    close(found.weights, [1.221403, 0.904837, 2, 0, 1, 0.606531, 1.221403, 0.135335])
    assert found.keep.equal(SAMPLED)
    close(found.stats.weight_mean, 1.012787)
    close(found.stats.ess, 0.781423)
    close(found.stats.clipped_fraction, 1 / 7)
    close(found.stats.weight_max, 2.0)


def test_truncated_trajectory_weights() -> None:
    found = apply(*Rule.preset("tis_sequence"))
    close(found.weights, [2, 2, 2, 0, *[0.100259] * 4])
    close(found.stats.weight_mean, 0.914434)
    close(found.stats.ess, 0.486148)


def test_what_is_measured_with_no_rule_at_all() -> None:
    stats = apply().stats
    close(stats.kl_k1, 0.1)
    close(stats.kl_k3, 0.467314)
    close(stats.chi2, 2.610587)
    close(stats.max_prob_diff, max(abs(math.exp(-3) - math.exp(-1)), abs(math.exp(-1.5) - math.exp(-1))))
    close([stats.ess, stats.weight_mean, stats.clipped_fraction, stats.masked_fraction], [1, 1, 0, 0])
    assert apply().weights.equal(SAMPLED.double())


@pytest.mark.parametrize(
    ("rules", "keep"),
    [
        ([mask(low=0.5, high=1.5)], [1, 1, 0, 0, 1, 1, 1, 0]),  # IcePop
        ([mask(low=0.5, high=2.0)], [1, 1, 0, 0, 1, 1, 1, 0]),
        ([mask(measure="k2", high=0.5)], [1, 1, 0, 0, 1, 1, 1, 0]),
        ([mask(measure="k3", high=0.5)], [1, 1, 0, 0, 1, 1, 1, 0]),
        ([mask(over="sum", low=0.5, high=2.0)], [0] * 8),
        ([mask(over="mean", low=0.5, high=2.0)], [1, 1, 1, 0, 1, 1, 1, 1]),
        ([mask(measure="k2", over="mean", high=0.4)], [1, 1, 1, 0, 0, 0, 0, 0]),
        ([mask(measure="k3", over="mean", high=0.4)], [0, 0, 0, 0, 1, 1, 1, 1]),
        ([mask(measure="k2", over="max", high=1.5)], [1, 1, 1, 0, 0, 0, 0, 0]),
        ([mask(measure="k3", over="max", high=1.5)], [0, 0, 0, 0, 1, 1, 1, 1]),
        ([mask(low=0.5, high=2.0), mask(measure="k3", over="max", high=1.5)], [0, 0, 0, 0, 1, 1, 1, 0]),
        # verl turns asymmetric bounds around (its k1 is -log ratio); here they are on the ratio, 4.95 and 0.1003.
        ([mask(over="sum", low=0.1, high=1.2)], [0, 0, 0, 0, 1, 1, 1, 1]),
    ],
)
def test_masks(rules: list[Rule], keep: list[int]) -> None:
    found = apply(*rules)
    assert found.keep.tolist() == [bool(each) for each in keep]
    close(found.stats.masked_fraction, 1 - sum(keep) / 7)
    assert found.weights.equal(SAMPLED.double())  # masking leaves the weights alone


def test_a_mask_and_a_truncation_compose() -> None:
    """prime-rl's token mask with its detached ratio: both of one correction."""
    found = apply(mask(low=0.5, high=1.5), *Rule.preset("tis"))
    assert found.keep.tolist() == [True, True, False, False, True, True, True, False]
    close(found.weights[2], 2.0)


# -- AReaL's and SkyRL's cases


def test_areal_cases() -> None:
    assert of_log_ratio([0, 1, 0], mask(high=2)).keep.tolist() == [True, False, True]
    assert of_log_ratio([0, -1, 0], mask(low=0.5, high=2)).keep.tolist() == [True, False, True]
    close(of_log_ratio([0, 0.5, 1], Rule(action="truncate", over="mean", high=5)).weights, [math.exp(0.5)] * 3)
    close(of_log_ratio([0, 4, 0], Rule(action="truncate", over="mean", high=3)).weights, [3, 3, 3])
    close(of_log_ratio([0, 2, 0], Rule(action="truncate", high=5)).weights, [1, 5, 1])
    assert of_log_ratio([0, 1, 0], mask(measure="k2", over="mean", high=0.5)).keep.all()
    assert not of_log_ratio([0, 2, 0], mask(measure="k2", over="mean", high=0.1)).keep.any()
    # Padding does not dilute: the one sampled token has k2 = 2.
    assert not of_log_ratio([2, 0, 0], mask(measure="k2", over="mean", high=1), mask=[1, 0, 0]).keep.any()
    two = correct(
        torch.tensor([0, 0.6, 0.3, 0, 0], dtype=torch.float64),
        torch.zeros(5, dtype=torch.float64),
        torch.ones(5, dtype=torch.bool),
        torch.tensor([0, 3, 5]),
        [Rule(action="truncate", over="mean", high=5)],
    )
    close(two.weights, [math.exp(0.3)] * 3 + [1, 1])


def test_skyrl_cases() -> None:
    found = of_log_ratio([0.5, -0.5, 1], Rule(action="truncate", high=2))
    close(found.weights, [1.6487, 0.6065, 2.0], 5e-5)
    close(found.stats.clipped_fraction, 1 / 3)
    sequence = Rule(action="truncate", over="sum", high=5)
    close(of_log_ratio([0.5, -0.5, 1], sequence).weights, [2.7183] * 3, 5e-5)
    close(of_log_ratio([1, 1, 1], sequence).weights, [5, 5, 5])
    close(of_log_ratio([0.5, 9, 1], sequence, mask=[1, 0, 1]).weights, [4.4817, 0, 4.4817], 5e-5)
    assert of_log_ratio([0.1, -0.1, 0], mask(over="mean", low=0.9, high=1.1)).keep.all()
    assert not of_log_ratio([0.5, 0.5, 0.5], mask(over="mean", low=0.9, high=1.1)).keep.any()
    assert of_log_ratio([0.1, 0.1, 0.1], mask(over="sum", low=0.5, high=2)).keep.all()
    assert not of_log_ratio([1, 1, 1], mask(over="sum", low=0.5, high=2)).keep.any()
    assert not of_log_ratio([0, 5, 0], mask(over="max", high=100)).keep.any()
    assert of_log_ratio([0, 5, 0], mask(over="max", high=100), mask=[1, 0, 1]).keep.tolist() == [True, False, True]
    assert not of_log_ratio([0, -10, 0], *Rule.preset("veto")).keep.any()


def test_prime_rl_diagnostics() -> None:
    trainer = torch.tensor([0.5, 0.9, 0.3, 0.1, 0.05, 0.6], dtype=torch.float64).log()
    engine = torch.tensor([0.5, 0.6, 0.6, 0.4, 0.06, 0.3], dtype=torch.float64).log()
    sampled, bounds = torch.ones(6, dtype=torch.bool), torch.tensor([0, 6])
    found = correct(trainer, engine, sampled, bounds, [Rule(action="truncate", high=100.0)])
    close(found.stats.kl_k3, 0.207747)
    close(found.stats.ess, 0.746986)
    geometric = correct(trainer, engine, sampled, bounds, [Rule(action="truncate", over="mean", high=100.0)])
    close(geometric.weights, [0.823775] * 6)


def test_the_textbooks_mismatch_table() -> None:
    rollout = torch.tensor([-0.5, -1.2, -0.05, -3.5, -0.9], dtype=torch.float64)
    trainer = torch.tensor([-0.52, -1.15, -0.08, -2.6, -1.1], dtype=torch.float64)
    sampled, bounds = torch.ones(5, dtype=torch.bool), torch.tensor([0, 5])
    ratios = correct(trainer, rollout, sampled, bounds, [Rule(action="truncate", high=100.0)]).weights
    close(ratios, [0.9802, 1.0513, 0.9704, 2.4596, 0.8187], 5e-5)
    raw = correct(trainer, rollout, sampled, bounds, [Rule(action="truncate", over="sum", high=100.0)]).weights
    close(raw, [2.0138] * 5, 5e-5)
    close(correct(trainer, rollout, sampled, bounds, Rule.preset("tis")).weights.prod(), 1.6375, 5e-5)


def test_prob_diff_bounds_are_on_the_signed_value() -> None:
    proximal = torch.tensor([0.5, 0.9, 0.1], dtype=torch.float64).log()
    rollout = torch.tensor([0.5, 0.6, 0.4], dtype=torch.float64).log()
    sampled, bounds = torch.ones(3, dtype=torch.bool), torch.tensor([0, 3])
    up = correct(proximal, rollout, sampled, bounds, [mask(measure="prob_diff", high=0.2)])
    assert up.keep.tolist() == [True, False, True]
    down = correct(proximal, rollout, sampled, bounds, [mask(measure="prob_diff", low=-0.2)])
    assert down.keep.tolist() == [True, True, False]


# -- overflow and shapes


ALL_RULES = [rule for rules in PRESETS.values() for rule in rules] + [
    mask(measure=measure, over=over, low=-3.0, high=3.0)
    for measure in ("ratio", "k2", "k3", "prob_diff")
    for over in ("token", "sum", "mean", "max", "min")
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", ALL_RULES, ids=str)
def test_overflow_stays_finite(rule: Rule, dtype: torch.dtype) -> None:
    proximal = torch.tensor([-2, -91, NAN, INF, -INF, -2, -INF], dtype=dtype)
    rollout = torch.tensor([-91, -2, INF, NAN, -INF, -INF, -2], dtype=dtype)
    sampled = torch.tensor([1, 1, 0, 0, 1, 1, 1], dtype=torch.bool)
    bounds = torch.tensor([0, 0, 2, 4, 7, 7], dtype=torch.int32)  # with empty trajectories at both ends
    found = correct(proximal, rollout, sampled, bounds, [rule])
    assert found.weights.dtype == dtype
    assert found.weights.isfinite().all()
    assert not found.keep[~sampled].any()
    assert all(math.isfinite(value) for value in vars_of(found))


@pytest.mark.parametrize("rule", ALL_RULES, ids=str)
def test_nothing_sampled_and_nothing_there(rule: Rule) -> None:
    for count in (0, 3):
        nothing = torch.full((count,), NAN)
        found = correct(nothing, nothing, torch.zeros(count, dtype=torch.bool), torch.tensor([0, count]), [rule])
        assert not found.keep.any()
        assert not found.weights.any()
        assert all(math.isfinite(value) for value in vars_of(found))


def vars_of(correction: Correction) -> list[float]:
    return [getattr(correction.stats, name) for name in correction.stats.__struct_fields__]


TOKENS = st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.booleans()), min_size=0, max_size=6)


@given(st.lists(TOKENS, min_size=1, max_size=5), st.sampled_from(ALL_RULES))
def test_a_trajectory_alone_is_corrected_as_in_a_batch(batch: list[list[tuple]], rule: Rule) -> None:
    """Why micro-batches of whole trajectories need no second look at the batch."""

    def found(these: list[list[tuple]]) -> Correction:
        tokens = [token for each in these for token in each]
        proximal, rollout, sampled = (torch.tensor([token[part] for token in tokens]) for part in range(3))
        bounds = torch.tensor([0, *(len(each) for each in these)]).cumsum(0).int()
        return correct(proximal.double(), rollout.double(), sampled.bool(), bounds, [rule])

    whole, alone = found(batch), [found([each]) for each in batch]
    torch.testing.assert_close(whole.weights, torch.cat([each.weights for each in alone]))
    assert whole.keep.equal(torch.cat([each.keep for each in alone]))


@pytest.mark.parametrize(
    "bad",
    [
        {"action": "truncate"},
        {"action": "truncate", "low": 0.5},
        {"action": "truncate", "measure": "k3", "high": 2.0},
        {"action": "mask"},
    ],
)
def test_rules_that_say_nothing_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match="a rule"):
        Rule(**bad)


def test_two_truncations_and_unknown_presets_are_refused() -> None:
    with pytest.raises(ValueError, match="at most one"):
        apply(*Rule.preset("tis"), *Rule.preset("tis_sequence"))
    with pytest.raises(ValueError, match="'tiss' is not one of tis, tis_sequence"):
        Rule.preset("tiss")
