"""Trajectories of several branches: each is seen by itself, what is said of a trajectory is of all of them."""

from pathlib import Path

import pytest
import torch
from learner_world import config, taken, trainer_of, trajectory

from slipstream.config import CorrectionSection, LearnerSection, LossSection, OutcomesSection
from slipstream.learner.advantages import group_advantages
from slipstream.learner.groups import Candidate, judge
from slipstream.learner.losses import aggregate, policy_loss
from slipstream.learner.optimizer import Optimizer, Stepped, learning_rate
from slipstream.learner.packing import lengths_of
from slipstream.learner.policy import Policy
from slipstream.queue import Malformed, decode, encode, packed
from slipstream.staleness import Gate
from slipstream.trajectory import Outcome, Span, SpanKind, Trajectory


def one_of(*parts: Trajectory) -> Trajectory:
    """A trajectory whose branches are these; the first gives it its name and its reward."""
    whole, *more = parts
    whole.spans = [Span(SpanKind.PROMPT, 0, 0, 4)]
    for part in more:
        whole.spans.append(Span(SpanKind.BRANCH, 1, len(whole.token_ids), 4))
        whole.token_ids = whole.token_ids + part.token_ids
        whole.sampled = whole.sampled + part.sampled
        whole.logprobs = whole.logprobs + part.logprobs
        whole.version_runs = whole.version_runs + part.version_runs
    return whole


def fork(lease: int, of: Trajectory) -> Trajectory:
    """Begins with `of`'s first tokens, some of which were sampled there, and says something else."""
    other = trajectory(lease, of.group, length=15, prompt=9, versions=3)
    other.token_ids[:9] = of.token_ids[:9]
    return other


def parts() -> list[list[Trajectory]]:
    first = trajectory(1, 1, length=14, reward=1.0, versions=3)
    return [
        [first, fork(11, first), trajectory(12, 1, length=8, versions=3)],
        [trajectory(2, 1, length=0, prompt=0, reward=None, versions=[], outcome=Outcome.INVALID)],
        [trajectory(3, 1, length=9, reward=0.0, versions=3)],
        [trajectory(4, 1, length=20, reward=0.5, versions=3), trajectory(14, 1, length=7, versions=0)],  # too old
    ]


class Recorder(Optimizer):
    gradients: list[torch.Tensor]

    def step(self, number: int, *, divisor: float = 1.0, scale: float = 1.0) -> Stepped:
        self.gradients = [parameter.grad / divisor for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return Stepped(0.0, False, 0.0)


@pytest.fixture
def policy(tiny_model: Path) -> Policy:
    policy = Policy(tiny_model, chunk_tokens=7)
    policy.model.double()
    return policy


def gradients(policy: Policy, model: Path, micro: int) -> list[torch.Tensor]:
    rate = learning_rate(1e-2, 0, 100, "constant")
    recorder = Recorder(policy.parameters(), rate=rate, clip_norm=1.0, betas=(0.9, 0.95), weight_decay=0.0)
    settings = config(
        model,
        learner=LearnerSection(micro_tokens=micro, chunk_tokens=7, proximal="bypass"),
        loss=LossSection(name="gspo", aggregation="sequence_mean"),
        correction=CorrectionSection(presets=[]),
    )
    group = judge(1, taken([one_of(*each) for each in parts()]), OutcomesSection(), Gate(2, 1.0, 2), 3)
    assert isinstance(group, Candidate)
    made = trainer_of(settings, policy, recorder).step([group], 3)
    assert made is not None
    stats, fates = made
    sampled = [sum(sum(part.sampled) for part in each) for each in parts()]
    assert [fate.trained + fate.masked_stale + fate.failed for fate in fates] == sampled
    assert [fate.masked_stale for fate in fates] == [0, 0, 0, 3]
    assert stats.trained == sum(sampled) - 3
    return recorder.gradients


def test_packed_says_where_branches_begin() -> None:
    wholes = [one_of(*each) for each in parts()]
    together = packed(decode(encode(wholes)))
    apart = packed([decode(encode([each])) for each in wholes])
    assert together.cu_seqlens.tolist() == apart.cu_seqlens.tolist() == [0, 37, 37, 46, 73]
    assert together.branches.tolist() == apart.branches.tolist() == [0, 14, 29, 37, 37, 46, 66, 73]
    alone = packed(decode(encode([parts()[0][0]])))
    assert alone.branches.tolist() == alone.cu_seqlens.tolist()


def test_a_branch_sees_nothing_of_the_others(policy: Policy) -> None:
    data = packed(decode(encode([one_of(*each) for each in parts()])))
    ours = policy.logprobs(data.token_ids, data.sampled, data.branches).logp
    alone: list[torch.Tensor] = []
    for part in (each for several in parts() for each in several):
        single = packed(decode(encode([part])))
        alone.append(policy.logprobs(single.token_ids, single.sampled, single.cu_seqlens).logp)
    torch.testing.assert_close(ours, torch.cat(alone), rtol=1e-9, atol=1e-12)


def test_a_trajectory_counts_once_in_the_loss_and_shares_its_advantage(policy: Policy, tiny_model: Path) -> None:
    """GSPO's ratio and a sequence's mean are over all of its branches; any split into micro-batches is the same."""
    whole, cut = gradients(policy, tiny_model, 10_000), gradients(policy, tiny_model, 1)
    data = packed(decode(encode([one_of(*each) for each in parts()])))
    trainable = data.sampled & (data.versions >= 1)
    advantages = torch.zeros(4, dtype=torch.float64)
    advantages[[0, 2, 3]] = group_advantages(torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64), torch.zeros(3))
    loss = policy_loss(
        "gspo",
        logp=policy.logprobs(data.token_ids, trainable, data.branches).logp,
        logp_old=data.logprobs.double(),
        advantages=torch.repeat_interleave(advantages, lengths_of(data.cu_seqlens)),
        sampled=trainable,
        cu_seqlens=data.cu_seqlens,
        clip_low=LossSection().clip_low,
        clip_high=LossSection().clip_high,
    )
    aggregate(loss.per_token, trainable, data.cu_seqlens, mode="sequence_mean", denominator=3).backward()
    for one, other, parameter in zip(whole, cut, policy.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(one, parameter.grad, rtol=1e-6, atol=1e-12)
    assert any(each.any() for each in whole)


@pytest.mark.parametrize(
    "spans",
    [
        [Span(SpanKind.BRANCH, 0, 0, 3)],  # the first begins where the trajectory does
        [Span(SpanKind.BRANCH, 0, 9, 3)],
        [Span(SpanKind.BRANCH, 0, 3, 1), Span(SpanKind.BRANCH, 0, 2, 1)],
        [Span(SpanKind.BRANCH, 0, 5, 1)],  # was sampled
    ],
)
def test_branches_that_cannot_be_are_refused(spans: list[Span]) -> None:
    odd = trajectory(1, 1, length=9)
    odd.spans = spans
    with pytest.raises(Malformed, match="branch"):
        decode(encode([odd]))


def test_a_kind_of_span_that_nobody_knows_is_refused() -> None:
    from slipstream.queue import wire

    odd = trajectory(1, 1, length=9)
    odd.spans = [Span(SpanKind.PROMPT, 0, 0, 4)]
    numbers, wire.SPAN_NUMBERS[SpanKind.PROMPT] = dict(wire.SPAN_NUMBERS), 9
    try:
        frames = encode([odd])
    finally:
        wire.SPAN_NUMBERS.update(numbers)
    with pytest.raises(Malformed, match="kind 9"):
        decode(frames)
