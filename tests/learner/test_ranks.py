"""Two ranks are one learner: the same numbers, the same weights, and each has about as much to do."""

from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from learner_world import config
from ranks_world import go_on, on_ranks, train, train_and_tell
from test_step import more_groups

from slipstream.config import AdvantageSection, Config, CorrectionSection, LearnerSection, LossSection, RolloutSection
from slipstream.learner.assembly import assemble
from slipstream.learner.balance import chosen, costs_of, deal
from slipstream.learner.checkpoint import load_newest
from slipstream.learner.micro import Micro, bounds_of
from slipstream.learner.packing import lengths_of


def of(model: Path, **more) -> Config:
    return config(
        model,
        learner=LearnerSection(micro_tokens=60, chunk_tokens=7, lr=1e-3, warmup=0, proximal="interpolate"),
        loss=LossSection(**more.get("loss", {})),
        correction=CorrectionSection(presets=["tis"], m2po=more.get("m2po", 0.0)),
        advantage=AdvantageSection(estimator=more.get("estimator", "grpo")),
        rollout=RolloutSection(max_tokens=32),
    )


@pytest.mark.parametrize(
    "more",
    [
        # With the start model in the loss, and an entropy bonus; with what is of a whole batch.
        {"loss": {"name": "gspo", "kl_coef": 0.1, "entropy_coef": 0.01, "aggregation": "sequence_mean"}},
        {"m2po": 0.3, "estimator": "reinforce_pp_baseline", "loss": {"kl_coef": 0.1, "kl_in": "reward"}},
    ],
)
def test_two_ranks_make_the_steps_of_one(
    tiny_model: Path, tmp_path: Path, processes: ForkServerContext, more: dict
) -> None:
    """Also where one of them has nothing to do: 7 + 5 trajectories in rounds of two."""
    settings = of(tiny_model, **more)
    on_ranks(processes, 2, settings, train_and_tell, more_groups(), range(5), tmp_path / "out")
    many, weights = torch.load(tmp_path / "out", weights_only=False)
    alone = assemble(settings)
    before = {name: tensor.clone() for name, tensor in alone.computes.tensors().items()}
    for (ours, fates), (theirs, theirs_fates) in zip(many, train(alone, more_groups(), range(5)), strict=True):
        assert fates == theirs_fates
        for field in ("loss", "kl", "entropy", "grad_norm", "ess", "weight_mean", "clip_fraction", "kl_k3", "trained"):
            assert getattr(ours, field) == pytest.approx(getattr(theirs, field), abs=1e-5), field
    after = alone.computes.tensors()
    assert list(weights) == list(after)
    for name, tensor in after.items():
        assert not tensor.equal(before[name])
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-5)


def test_checkpoints_of_two_ranks_are_read_by_one_and_the_other_way_round(
    tiny_model: Path, tmp_path: Path, processes: ForkServerContext
) -> None:
    """Also the moments: what is trained in turns is what one rank trains in one go."""
    settings = of(tiny_model)
    (tmp_path / "v00000009").mkdir()  # which nobody can read: set aside, and everybody goes on
    on_ranks(processes, 2, settings, go_on, more_groups(), range(2), tmp_path)
    assert (tmp_path / "v00000009.damaged").is_dir()
    go_on(assemble(settings), more_groups(), range(2, 3), tmp_path)
    on_ranks(processes, 2, settings, go_on, more_groups(), range(3, 5), tmp_path)
    alone, found = assemble(settings), assemble(settings)
    train(alone, more_groups(), range(5))
    assert load_newest(tmp_path, found.computes.load) == 5
    for name, tensor in alone.computes.tensors().items():
        torch.testing.assert_close(found.computes.tensors()[name], tensor, rtol=0, atol=1e-5)
    for name, tensor in alone.optimizer.state().items():
        torch.testing.assert_close(found.optimizer.state()[name], tensor, rtol=0, atol=1e-5)


@given(st.lists(st.integers(1, 90), max_size=20), st.integers(1, 4), st.integers(20, 200), st.floats(0, 0.1))
@limits(max_examples=30, deadline=None)
def test_each_trajectory_is_in_one_bin_and_no_bin_is_too_full(
    lengths: list[int], ranks: int, budget: int, square: float
) -> None:
    bins = deal(lengths, [length + square * length**2 for length in lengths], ranks, budget)
    assert len(bins) % ranks == 0
    assert sorted(index for each in bins for index in each) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in each) <= budget or len(each) == 1 for each in bins)


def made_of(*trajectories: list[int]) -> Micro:
    """Of trajectories with branches of these lengths; a token is its place."""
    lengths = torch.tensor([sum(each) for each in trajectories])
    branches = torch.tensor([branch for each in trajectories for branch in each])
    tokens = torch.arange(int(lengths.sum()))
    of_token = [tokens] * 5
    return Micro(*of_token, torch.zeros(0), bounds_of(lengths), bounds_of(branches))


def test_it_is_dealt_by_cost_and_not_by_number_or_tokens() -> None:
    def dealt(micro: Micro, ranks: int, square: float) -> list[list[int]]:
        return deal(lengths_of(micro.cu_seqlens).tolist(), costs_of(micro, square), ranks, 100_000)

    short = [[100]] * 4
    assert dealt(made_of([400], *short), 2, 0.0) == [[0], [1, 2, 3, 4]]
    assert dealt(made_of([300], *short), 2, 0.0) == [[0, 4], [1, 2, 3]]
    # Where attention counts, the long one is more than the four together, but not if it is three branches.
    assert dealt(made_of([300], *short), 2, 1.0) == [[0], [1, 2, 3, 4]]
    assert dealt(made_of([100, 100, 100], *short), 2, 1.0) == [[0, 4], [1, 2, 3]]
    many = made_of(*([37 * place % 1000 + 1] for place in range(64)))
    costs = costs_of(many, 1e-3)
    loads = [sum(costs[index] for index in each) for each in dealt(many, 4, 1e-3)]
    assert max(loads) / min(loads) < 1.02


def test_who_is_chosen_keeps_branches_and_places() -> None:
    part, at = chosen(made_of([3], [2, 4], [5], [1, 1]), [1, 3])
    assert at.tolist() == part.token_ids.tolist() == [3, 4, 5, 6, 7, 8, 14, 15]
    assert part.cu_seqlens.tolist() == [0, 6, 8]
    assert part.branches.tolist() == [0, 2, 6, 7, 8]
