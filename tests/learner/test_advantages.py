"""Advantages against numbers computed elsewhere, and what must hold for any group."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.learner.advantages import gae, group_advantages, overlong_penalty

# Groups a: [1, 0, 1], b: [.5, .5] of two tokens each, c: [2]; other trajectories have three tokens.
REWARDS = torch.tensor([1, 0, 1, 0.5, 0.5, 2], dtype=torch.float64)
GROUPS = torch.tensor([7, 7, 7, 3, 3, 5])
LENGTHS = torch.tensor([3, 3, 3, 2, 2, 3])


def close(found: torch.Tensor, expected: list[float], within: float = 1e-6) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), atol=within, rtol=0)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [0.577349, -1.154699, 0.577349, 0, 0, 1.999998]),
        ("dr_grpo", [0.333333, -0.666667, 0.333333, 0, 0, 2]),
        ("opo", [0.333333, -0.666667, 0.333333, 0, 0, 2]),
        ("rloo", [0.5, -1, 0.5, 0, 0, 2]),
        ("reinforce_pp_baseline", [-0.047078, -1.176943, -0.047078, -0.4237, -0.4237, 1.836031]),
        ("max_rl", [0.5, -1, 0.5, 0, 0, 0]),
    ],
)
def test_reference_numbers(estimator: str, expected: list[float]) -> None:
    """As verl's functions compute them in float64 (max_rl: prime-rl's formula). A group of one in grpo is divided by
    nothing here: its advantage is the reward itself."""
    if estimator == "grpo":
        expected = [*expected[:5], 2.0]
    close(group_advantages(REWARDS, GROUPS, estimator=estimator, lengths=LENGTHS), expected)


def test_the_textbooks_group_of_eight() -> None:
    rewards = torch.tensor([1, 0, 0, 1, 0, 1, 0, 0], dtype=torch.float64)
    group = torch.zeros(8, dtype=torch.int64)
    wrong, right = -0.7746, 1.2910
    expected = [right if reward else wrong for reward in rewards.tolist()]
    close(group_advantages(rewards, group, population=True), expected, 5e-5)
    expected = [0.6250 if reward else -0.3750 for reward in rewards.tolist()]
    close(group_advantages(rewards, group, estimator="dr_grpo"), expected, 5e-5)
    assert not group_advantages(torch.ones(8), group).any()  # the group that teaches nothing


def test_opo_weighs_the_baseline_by_length() -> None:
    found = group_advantages(
        torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), estimator="opo", lengths=torch.tensor([30, 10])
    )
    close(found, [0.25, -0.75])


ESTIMATORS = ["grpo", "dr_grpo", "rloo", "opo", "max_rl", "reinforce_pp_baseline"]
MEMBERS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.25, 1.0, 3.0]), st.integers(0, 4), st.integers(0, 50)), min_size=1, max_size=12
)


@given(st.sampled_from(ESTIMATORS), MEMBERS, st.randoms(use_true_random=False))
def test_order_and_ids_of_groups_do_not_matter(estimator: str, members: list[tuple], random) -> None:
    def advantages(these: list[tuple], ids: dict[int, int]) -> torch.Tensor:
        rewards, groups, lengths = zip(*these, strict=True)
        return group_advantages(
            torch.tensor(rewards, dtype=torch.float64),
            torch.tensor([ids[group] for group in groups]),
            estimator=estimator,
            lengths=torch.tensor(lengths),
        )

    order = list(range(len(members)))
    random.shuffle(order)
    ids = {number: number for number in range(5)}
    others = dict(zip(range(5), random.sample(range(-(2**40), 2**40), 5), strict=True))
    plain = advantages(members, ids)
    shuffled = advantages([members[place] for place in order], others)
    torch.testing.assert_close(shuffled, plain[order])
    assert plain.isfinite().all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_rewards_stay_finite_and_dtypes_stay(estimator: str, dtype: torch.dtype) -> None:
    rewards = torch.tensor([1e30, 0, 1, 1e30, 1e30], dtype=dtype)
    found = group_advantages(
        rewards, torch.tensor([0, 0, 0, 1, 1]), estimator=estimator, lengths=torch.tensor([3, 0, 2, 1, 1])
    )
    assert found.dtype == dtype
    assert found.isfinite().all()


def test_no_trajectory_at_all() -> None:
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_an_unknown_estimator_is_named() -> None:
    with pytest.raises(ValueError, match="'grop' is not one of grpo dr_grpo"):
        group_advantages(REWARDS, GROUPS, estimator="grop", lengths=LENGTHS)
    with pytest.raises(ValueError, match="'opo' needs lengths"):
        group_advantages(REWARDS, GROUPS, estimator="opo")


def test_gae_skips_what_is_not_sampled() -> None:
    """verl's numbers for gamma .9, lambda .95; what stands at masked positions must not matter."""
    sampled = torch.tensor([1, 0, 1, 0, 1, 1], dtype=torch.bool)
    rewards = torch.tensor([0, 0, 0.1, 0, 0, 1], dtype=torch.float64)
    for filler in (9.0, -7.0, float("nan"), float("inf")):
        values = torch.tensor([0.5, filler, 0.4, filler, 0.3, 0.2], dtype=torch.float64)
        advantages, returns = gae(rewards, values, sampled, torch.tensor([0, 6]), gamma=0.9, lam=0.95)
        close(returns[sampled], [0.746648, 0.85222, 0.864, 1.0])
        close(advantages[sampled], [0.246648, 0.45222, 0.564, 0.8])
        whitened = (advantages[sampled] - advantages[sampled].mean()) / advantages[sampled].std()
        close(whitened, [-1.166642, -0.275313, 0.209348, 1.232608])
        assert not advantages[~sampled].any()
        assert not returns[~sampled].any()


def test_the_textbooks_gae_table_twice_in_one_batch() -> None:
    values = torch.tensor([0.5, 0.55, 0.6, 0.7, 0.8] * 2, dtype=torch.float64)
    rewards = torch.tensor([0, 0, 0, 0, 1] * 2, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 5, 5, 10], dtype=torch.int32)  # with an empty trajectory between the two
    advantages, _ = gae(rewards, values, torch.ones(10, dtype=torch.bool), cu_seqlens)
    close(advantages, [0.436389, 0.406725, 0.3755, 0.29, 0.2] * 2)


def test_overlong_penalty_falls_over_the_buffer() -> None:
    found = overlong_penalty(torch.tensor([0, 80, 90, 100, 150]), max_length=100, buffer=20, factor=2.0)
    close(found, [0, 0, -1, -2, -2])
