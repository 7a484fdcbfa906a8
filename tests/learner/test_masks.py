"""The masks that need advantages, and the interpolated anchor: AReaL's vectors, worked examples, edges."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slipstream.learner.masks import m2po, opsm
from slipstream.learner.proximal import interpolated

NAN, INF = float("nan"), float("inf")


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


# -- interpolated


@pytest.mark.parametrize(
    ("rollout", "current", "versions", "version", "expected"),
    [
        ([-1, -2, -3], [-1.5, -2.5, -3.5], [0, 0, 0], 2, [-1.25, -2.25, -3.25]),
        ([-1, -2], [-1.5, -2.5], [4, 4], 5, [-1, -2]),
        ([-1, -2], [-1.5, -2.5], [5, 5], 5, [-1, -2]),
        ([-1, -2], [-1.5, -2.2], [0, 2], 4, [-1.375, -2.1]),
        ([-1, -2], [-1.5, -2.5], [-1, 7], 5, [-1, -2]),  # not sampled; made again after a resume
    ],
)
def test_areals_interpolations(rollout: list, current: list, versions: list, version: int, expected: list) -> None:
    found = interpolated(doubles(*current), doubles(*rollout), torch.tensor(versions, dtype=torch.int32), version)
    torch.testing.assert_close(found, doubles(*expected), rtol=0, atol=1e-12)


@given(st.lists(st.tuples(st.floats(-90, 0), st.floats(-90, 0), st.integers(-1, 12)), min_size=1), st.integers(0, 9))
def test_the_anchor_lies_between_the_two(tokens: list[tuple[float, float, int]], version: int) -> None:
    current, rollout, versions = (torch.tensor(each) for each in zip(*tokens, strict=True))
    found = interpolated(current.double(), rollout.double(), versions, version)
    low, high = torch.minimum(current, rollout).double(), torch.maximum(current, rollout).double()
    assert bool(((found >= low - 1e-9) & (found <= high + 1e-9)).all())


def test_where_nothing_was_sampled_nothing_matters() -> None:
    current = doubles(NAN, INF).requires_grad_()
    found = interpolated(current, doubles(0, 0), torch.tensor([-1, -1]), 3)
    assert found.tolist() == [0, 0]
    assert not found.requires_grad


# -- off-policy sequence masking


def test_only_bad_trajectories_that_were_left_behind_are_dropped() -> None:
    rollout = doubles(-1, -1, NAN, -1, -1, -1, -1, -1)
    current = doubles(-1.3, -1.5, INF, -1.3, -1.5, -0.9, -1.1, -1.2)  # mean drift .4; .4; .0667
    advantages = doubles(-1, -1, NAN, 1, 1, -1, -1, -1)
    sampled, bounds = flags(1, 1, 0, 1, 1, 1, 1, 1), torch.tensor([0, 3, 5, 5, 8], dtype=torch.int32)
    alike = (current, rollout, advantages, sampled, bounds)
    assert opsm(*alike, limit=0.3).tolist() == flags(0, 0, 0, 1, 1, 1, 1, 1).tolist()
    assert opsm(*alike, limit=0.41).equal(sampled)
    assert opsm(*alike, limit=0.05).tolist() == flags(0, 0, 0, 1, 1, 0, 0, 0).tolist()


# -- second-moment trust region


def test_the_largest_harmful_tokens_go_until_the_moment_holds() -> None:
    log_ratio = doubles(0.1, 0.2, 0.3, -5, -0.25, 4, NAN)
    advantages = doubles(1, 1, 1, 1, -1, -1, 1)  # -5 at A > 0 and 4 at A < 0 go where A pulls from: harmless
    sampled = flags(1, 1, 1, 1, 1, 1, 0)
    nothing = torch.zeros_like(log_ratio)
    # Squares .01 .04 .0625 .09: means .01, .025, .0375, .050625.
    assert m2po(log_ratio, nothing, advantages, sampled).tolist() == flags(1, 1, 0, 1, 1, 1, 0).tolist()
    assert m2po(log_ratio, nothing, advantages, sampled, limit=0.051).equal(sampled)
    assert m2po(log_ratio, nothing, advantages, sampled, limit=0.03).tolist() == flags(1, 1, 0, 1, 0, 1, 0).tolist()
    assert m2po(log_ratio, nothing, advantages, sampled, limit=1e-9).tolist() == flags(0, 0, 0, 1, 0, 1, 0).tolist()
    assert m2po(log_ratio, nothing, 0 * advantages.nan_to_num(), sampled, limit=1e-9).equal(sampled)


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.sampled_from([-1.0, 0.0, 2.0]), st.booleans()), min_size=1),
    st.floats(1e-4, 2),
)
def test_it_drops_no_more_than_it_must(tokens: list[tuple[float, float, bool]], limit: float) -> None:
    log_ratio, advantages, sampled = (torch.tensor(each) for each in zip(*tokens, strict=True))
    log_ratio = log_ratio.double()
    keep = m2po(log_ratio, torch.zeros_like(log_ratio), advantages, sampled, limit=limit)
    harmful = sampled & (log_ratio * advantages > 0)
    dropped = log_ratio[sampled & ~keep] ** 2
    kept = log_ratio[keep & harmful] ** 2
    assert not bool((sampled & ~keep & ~harmful).any())
    assert not len(kept) or float(kept.mean()) <= limit * (1 + 1e-9)
    if len(dropped):
        assert not len(kept) or float(dropped.min()) >= float(kept.max())
        assert float(torch.cat([kept, dropped.min()[None]]).mean()) > limit * (1 - 1e-9)
