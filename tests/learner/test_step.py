"""The step: any split is the same step, what may not enter the loss does not, and what breaks leaves nothing broken."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_world import config, taken, trainer_of, trajectory

from slipstream.config import (
    AdvantageSection,
    Config,
    CorrectionSection,
    LearnerSection,
    LossSection,
    OutcomesSection,
    RolloutSection,
)
from slipstream.learner.advantages import group_advantages
from slipstream.learner.corrections import Rule, correct
from slipstream.learner.groups import Candidate, judge
from slipstream.learner.losses import LOSSES, aggregate, policy_loss
from slipstream.learner.micro import Micro, Stream, bounds_of, pieces, split
from slipstream.learner.optimizer import Optimizer, Stepped, learning_rate
from slipstream.learner.packing import lengths_of, segment_sum
from slipstream.learner.policy import Policy
from slipstream.queue.tensors import packed
from slipstream.staleness import Gate
from slipstream.trajectory import Outcome, Trajectory

GATE = Gate(batch=2, depth=1.0, cutoff=2)
MODES = ["token_mean", "sequence_mean", "sequence_sum"]


class Recorder(Optimizer):
    """Keeps the gradients instead of using them."""

    gradients: list[torch.Tensor]

    def step(self, number: int, *, divisor: float = 1.0, scale: float = 1.0) -> Stepped:
        self.gradients = [parameter.grad / divisor for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return Stepped(0.0, False, 0.0)


def optimizer(policy: Policy, kind: type[Optimizer] = Optimizer, lr: float = 1e-2) -> Optimizer:
    return kind(
        policy.parameters(),
        rate=learning_rate(lr, 0, 100, "constant"),
        clip_norm=1.0,
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )


def members() -> list[list[Trajectory]]:
    """Two groups with everything in them: old tokens, failures, no score, an empty trajectory, disagreement."""
    return [
        [
            trajectory(1, 1, length=14, reward=1.0, versions=[0, 0, 0, 1, 2, 2, 3, 3, 3, 3]),
            trajectory(2, 1, length=9, reward=0.0, versions=3, logprob=-4.5),
            trajectory(3, 1, length=20, reward=0.5, versions=3, outcome=Outcome.TIMEOUT),
            trajectory(4, 1, length=0, prompt=0, reward=None, versions=[], outcome=Outcome.INVALID),
        ],
        [
            trajectory(5, 2, length=25, reward=0.0, versions=2),
            trajectory(6, 2, length=6, reward=1.0, versions=0),  # all too old
            trajectory(7, 2, length=11, reward=1.0, versions=1, logprob=-2.0),
        ],
    ]


def candidates(version: int = 3, groups: list[list[Trajectory]] | None = None) -> list[Candidate]:
    found = [judge(group[0].group, taken(group), OutcomesSection(), GATE, version) for group in groups or members()]
    assert all(isinstance(each, Candidate) for each in found)
    return found  # type: ignore[return-value]


def settings(model: Path, *, micro: int = 10_000, name: str = "ppo", mode: str = "token_mean", **more) -> Config:
    return config(
        model,
        learner=LearnerSection(
            micro_tokens=micro,
            chunk_tokens=7,
            proximal=more.get("proximal", "recompute"),
            ess_lr=more.get("ess_lr", False),
        ),
        loss=LossSection(name=name, aggregation=mode, **more.get("loss", {})),
        correction=CorrectionSection(
            presets=more.get("presets", ["tis", "icepop"]), m2po=more.get("m2po", 0.0), opsm=more.get("opsm", 0.0)
        ),
        advantage=AdvantageSection(estimator=more.get("estimator", "grpo"), **more.get("advantage", {})),
        rollout=RolloutSection(max_tokens=32),
    )


@pytest.fixture
def policy(tiny_model: Path) -> Policy:
    policy = Policy(tiny_model, chunk_tokens=7)
    policy.model.double()
    return policy


def gradients(policy: Policy, settings: Config) -> tuple[list[torch.Tensor], object]:
    recorder = optimizer(policy, Recorder)
    made = trainer_of(settings, policy, recorder).step(candidates(), 3)
    assert made is not None
    return recorder.gradients, made


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("proximal", ["recompute", "bypass"])
@pytest.mark.parametrize("name", LOSSES)
def test_any_split_is_the_same_step(policy: Policy, tiny_model: Path, name: str, mode: str, proximal: str) -> None:
    (whole, (stats, fates)), *others = (
        gradients(policy, settings(tiny_model, micro=micro, name=name, mode=mode, proximal=proximal))
        for micro in (10_000, 1, 26)
    )
    assert stats.micro_batches == 1
    assert any(each.any() for each in whole)
    for found, (part, parts) in others:
        assert part.micro_batches > 1
        assert parts == fates
        for ours, theirs in zip(found, whole, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-12)
        for field in (
            "loss",
            "entropy",
            "clip_fraction",
            "ess",
            "kl_k3",
            "staleness_mean",
            "trained",
            "masked_fraction",
        ):
            assert getattr(part, field) == pytest.approx(getattr(stats, field), rel=1e-6, abs=1e-12)


def more_groups() -> list[list[Trajectory]]:
    """Five groups, of several lengths and ages."""
    lengths = ((14, 9), (25, 6, 11), (8, 8), (30, 5), (7, 21, 13))
    return [
        [
            trajectory(
                10 * group + place, group, length=length, reward=float(place % 2), versions=(group + place) % 3 + 1,
                logprob=-2.0 - 0.3 * place,
            )
            for place, length in enumerate(members, 1)
        ]
        for group, members in enumerate(lengths, 1)
    ]  # fmt: skip


def streamed(policy: Policy, settings: Config, order: list[int]) -> tuple[list[torch.Tensor], tuple, list[int]]:
    """Gradients, what the step says, and how many micro-batches had run after each group."""
    recorder = optimizer(policy, Recorder)
    trainer = trainer_of(settings, policy, recorder)
    groups = candidates(groups=more_groups())
    trainer.begin(3)
    ran = []
    for index in order:
        trainer.add(groups[index])
        ran.append(len(trainer._ran))
    made = trainer.finish()
    assert made is not None
    return recorder.gradients, made, ran


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_streamed_in_any_split_and_order_is_the_same_step(
    policy: Policy, tiny_model: Path, name: str, mode: str
) -> None:
    more = {"proximal": "bypass" if name == "gspo" else "recompute" if name == "reinforce" else "interpolate"}
    whole, (stats, fates), _ = streamed(policy, settings(tiny_model, name=name, mode=mode, **more), [0, 1, 2, 3, 4])
    assert stats.micro_batches == 1
    shuffle = random.Random(f"{name} {mode}")
    for micro in (1, 26, 60):
        order = shuffle.sample(range(5), 5)
        found, (part, parts), ran = streamed(
            policy, settings(tiny_model, micro=micro, name=name, mode=mode, **more), order
        )
        assert ran[-2] > 0  # before the last group was there
        assert 0 < part.hidden < 1
        assert sorted(parts, key=lambda fate: fate.lease) == fates
        for ours, theirs in zip(found, whole, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-12)
        for field in ("loss", "entropy", "clip_fraction", "ess", "kl_k3", "staleness_mean", "trained"):
            assert getattr(part, field) == pytest.approx(getattr(stats, field), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("needs", [{"estimator": "reinforce_pp_baseline"}, {"m2po": 0.3}])
def test_what_needs_the_whole_batch_waits_for_it(policy: Policy, tiny_model: Path, needs: dict) -> None:
    alike = {"presets": ["tis"]}
    whole, (stats, fates), _ = streamed(policy, settings(tiny_model, **alike, **needs), [0, 1, 2, 3, 4])
    found, (part, parts), ran = streamed(policy, settings(tiny_model, micro=26, **alike, **needs), [3, 1, 4, 0, 2])
    assert ran == [0] * 5
    assert sorted(parts, key=lambda fate: fate.lease) == fates
    assert part.trained == stats.trained
    for ours, theirs in zip(found, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-12)
    plain, (without, _), _ = streamed(policy, settings(tiny_model, **alike), [0, 1, 2, 3, 4])
    assert not all(ours.equal(theirs) for ours, theirs in zip(whole, plain, strict=True))
    if "m2po" in needs:
        assert 0 < stats.trained < without.trained


def test_the_same_groups_in_the_same_order_are_cut_alike_however_they_come(tiny_model: Path) -> None:
    """To the bit: a resumed learner has them at once, and must make the versions that it made while it waited."""

    def trained(at_once: bool) -> list[torch.Tensor]:
        policy = Policy(tiny_model, chunk_tokens=7)
        trainer = trainer_of(settings(tiny_model, micro=40), policy, optimizer(policy))
        groups = candidates(groups=more_groups())
        if at_once:
            assert trainer.step(groups, 3) is not None
        else:
            trainer.begin(3)
            for group in groups:
                trainer.add(group)
            assert trainer.finish() is not None
        return [parameter.detach() for parameter in policy.parameters()]

    assert all(one.equal(other) for one, other in zip(trained(True), trained(False), strict=True))


@given(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=1, max_size=6), st.integers(1, 60))
def test_a_stream_is_cut_where_the_whole_would_be(groups: list[list[int]], budget: int) -> None:
    def micro(lengths: list[int]) -> Micro:
        total = sum(lengths)
        ids = torch.arange(total)
        return Micro(
            ids, ids > 0, ids.float(), ids, ids.double(), torch.zeros(0), *[bounds_of(torch.tensor(lengths))] * 2
        )  # fmt: skip

    stream = Stream(budget)
    found = [each.cu_seqlens.tolist() for group in groups for each in stream.add(micro(group))]
    found += [each.cu_seqlens.tolist() for each in stream.rest()]
    whole = micro([length for group in groups for length in group])
    assert found == [each.cu_seqlens.tolist() for each in pieces(whole, budget)]
    assert stream.rest() == []


@pytest.mark.parametrize("mode", MODES)
def test_the_step_is_the_contracts_functions_in_their_order(policy: Policy, tiny_model: Path, mode: str) -> None:
    """Written out once more, over the whole batch at a time and over nothing but the contract's functions."""
    found, (stats, _) = gradients(policy, settings(tiny_model, micro=30, mode=mode))
    batch = candidates()
    data = packed([record for group in members() for record in taken(group)])
    trainable = torch.cat([each.trainable for each in batch])
    scored = data.rewards.isfinite()
    advantages = torch.zeros_like(data.rewards)
    advantages[scored] = group_advantages(data.rewards[scored], data.groups[scored])
    logp = policy.logprobs(data.token_ids, trainable, data.cu_seqlens).logp
    correction = correct(
        logp.detach(), data.logprobs, trainable, data.cu_seqlens, [*Rule.preset("tis"), *Rule.preset("icepop")]
    )
    loss = policy_loss(
        "ppo",
        logp=logp,
        logp_old=logp.detach(),
        advantages=torch.repeat_interleave(advantages, lengths_of(data.cu_seqlens)),
        sampled=trainable,
        cu_seqlens=data.cu_seqlens,
        weights=correction.weights,
        keep=correction.keep,
    )
    trains = int((segment_sum(trainable.long(), data.cu_seqlens) > 0).sum())
    assert trains == 4
    denominator = {"token_mean": int(trainable.sum()), "sequence_mean": trains, "sequence_sum": trains * 32}[mode]
    total = aggregate(loss.per_token, trainable, data.cu_seqlens, mode=mode, denominator=denominator)
    total.backward()
    for ours, parameter in zip(found, policy.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-6, atol=1e-12)
    assert stats.loss == pytest.approx(total.item(), rel=1e-9)
    assert stats.trained == int(correction.keep.sum())
    assert 0 < stats.trained < int(trainable.sum())
    ages = 3 - data.versions[correction.keep]
    assert (stats.staleness_mean, stats.staleness_max) == (pytest.approx(float(ages.double().mean())), int(ages.max()))
    assert stats.staleness_max <= GATE.cutoff


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(1, 60))
def test_splits_hold_every_trajectory_once_and_the_budget(lengths: list[int], budget: int) -> None:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    ranges = split(cu_seqlens, budget)
    assert [place for start, end in ranges for place in range(start, end)] == list(range(len(lengths)))
    assert all(sum(lengths[start:end]) <= budget or end - start == 1 for start, end in ranges)


def test_tokens_that_do_not_train_cannot_matter(policy: Policy, tiny_model: Path) -> None:
    """Other tokens and log-probs in what is masked as failed, without a score, or all too old: the same gradient."""
    plain, _ = gradients(policy, settings(tiny_model))
    groups = members()
    for group, place in ((0, 2), (1, 1)):
        was = groups[group][place]
        length = len(was.token_ids)
        groups[group][place] = trajectory(
            was.lease, was.group, length=length, reward=was.reward, outcome=was.outcome,
            versions=int(was.version_runs[-1].version), seed=5, logprob=-90.0,
        )  # fmt: skip
    recorder = optimizer(policy, Recorder)
    assert trainer_of(settings(tiny_model), policy, recorder).step(candidates(groups=groups), 3) is not None
    assert all(ours.equal(theirs) for ours, theirs in zip(recorder.gradients, plain, strict=True))


def test_fates_name_what_became_of_every_token(policy: Policy, tiny_model: Path) -> None:
    _, (stats, fates) = gradients(policy, settings(tiny_model))
    by_lease = {fate.lease: fate for fate in fates}
    assert by_lease[1].masked_stale == 3
    assert by_lease[3].failed == 16
    assert by_lease[6].masked_stale == 2
    assert by_lease[4] == type(by_lease[4])(lease=4, outcome="invalid")
    assert sum(fate.trained for fate in fates) == stats.trained
    assert sum(fate.masked_mismatch for fate in fates) > 0


def test_bypass_on_policy_is_the_recomputed_step(policy: Policy, tiny_model: Path) -> None:
    """When the engine's log-probs are the learner's own, the anchor is the same either way."""
    groups = members()
    for each in itertools.chain(*groups):
        data = packed(taken([each]))
        logp = policy.logprobs(data.token_ids, data.sampled, data.cu_seqlens).logp.detach()
        each.logprobs[:] = type(each.logprobs)("f", logp.tolist())
    found = []
    for proximal in ("recompute", "bypass"):
        recorder = optimizer(policy, Recorder)
        made = trainer_of(settings(tiny_model, proximal=proximal), policy, recorder).step(candidates(groups=groups), 3)
        assert made is not None
        assert made[0].kl_k3 == pytest.approx(0, abs=1e-12)
        assert made[0].max_prob_diff < 1e-6
        found.append(recorder.gradients)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-8)


# -- what breaks


def test_a_gradient_that_is_not_finite_is_skipped(tiny_model: Path) -> None:
    policy = Policy(tiny_model, chunk_tokens=7)
    adamw = optimizer(policy)
    trainer = trainer_of(settings(tiny_model), policy, adamw)
    assert trainer.step(candidates(), 3) is not None
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    moments = [value.clone() for value in adamw.state().values()]
    poison = policy.parameters()[0].register_hook(lambda gradient: gradient * float("nan"))
    assert moments
    stats, fates = trainer.step(candidates(), 3)  # type: ignore[misc]
    poison.remove()
    assert stats.skipped
    assert sum(fate.trained for fate in fates) == stats.trained > 0
    assert all(now.equal(then) for now, then in zip(policy.parameters(), before, strict=True))
    after = list(adamw.state().values())
    assert all(now.equal(then) for now, then in zip(after, moments, strict=True))
    stats, _ = trainer.step(candidates(), 3)  # type: ignore[misc]  # nothing of it is left in the next one
    assert not stats.skipped
    assert all(parameter.isfinite().all() for parameter in policy.parameters())


def test_asked_to_stop_it_stops_before_the_next_micro_batch(tiny_model: Path) -> None:
    policy = Policy(tiny_model, chunk_tokens=7)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    answers = iter([False, True])
    assert trainer_of(settings(tiny_model, micro=1), policy, optimizer(policy)).step(
        candidates(), 3, stopping=lambda: next(answers)
    ) is None  # fmt: skip
    assert next(answers, None) is None
    assert all(now.equal(then) for now, then in zip(policy.parameters(), before, strict=True))


def test_two_learners_with_the_same_batches_are_the_same_to_the_bit(tiny_model: Path) -> None:
    def trained() -> list[torch.Tensor]:
        policy = Policy(tiny_model, chunk_tokens=7)
        trainer = trainer_of(settings(tiny_model, micro=30), policy, optimizer(policy))
        for version in (3, 4, 5):
            assert trainer.step(candidates(3), version) is not None
        return [parameter.detach() for parameter in policy.parameters()]

    assert all(one.equal(other) for one, other in zip(trained(), trained(), strict=True))


def test_what_is_rewarded_becomes_likelier(tiny_model: Path) -> None:
    policy = Policy(tiny_model, chunk_tokens=64)
    trainer = trainer_of(settings(tiny_model, presets=[]), policy, optimizer(policy))
    group = [trajectory(1, 1, reward=1.0), trajectory(2, 1, reward=0.0)]
    data = packed(taken(group))

    def likelihoods() -> list[float]:
        logp = policy.logprobs(data.token_ids, data.sampled, data.cu_seqlens).logp
        return segment_sum(logp.detach(), data.cu_seqlens).tolist()

    before = likelihoods()
    for version in range(3):
        assert trainer.step(candidates(version, [group]), version) is not None
    after = likelihoods()
    assert after[0] > before[0] + 1
    assert after[1] < before[1] - 1
