"""One optimizer step over a batch of groups, in packed micro-batches.

Invariant: gradients accumulate unnormalized by micro-batch and share one denominator, the batch's own: any split of the
batch into micro-batches gives the same step. No token over the cutoff, of a masked trajectory, or cut by a mask rule
enters the loss.

The denominator counts what can be trained on: tokens that are sampled, of a trajectory that trains, and fresh; or
trajectories with such a token. Tokens that a mismatch rule cuts stay in it ("sampled", not "kept"), since they are
known only once log-probs are; cutting then never makes the others' steps larger.

A batch gets exactly one step, so the proximal policy (the one before the step) is the current one: its log-probs are
those of the same forward pass, detached, and the clipped ratio starts at 1. Correction rules look at one token or one
trajectory at a time, and micro-batches hold whole trajectories: weights and masks are those of the whole batch; their
statistics are computed once over all of it.
"""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from slipstream.config import Config
from slipstream.learner.advantages import group_advantages
from slipstream.learner.corrections import Rule, correct
from slipstream.learner.groups import Candidate, fates_of, is_scored
from slipstream.learner.losses import aggregate, policy_loss
from slipstream.learner.optimizer import Optimizer
from slipstream.learner.packing import lengths_of, segment_sum
from slipstream.learner.policy import Policy
from slipstream.queue import Packed
from slipstream.queue.messages import Fate


class StepStats(msgspec.Struct):
    """What one step did. Fractions and means are over the tokens that could be trained on, staleness over those that
    were."""

    loss: float
    entropy: float
    grad_norm: float
    skipped: bool
    lr: float
    clip_fraction: float
    ess: float
    weight_mean: float
    clipped_fraction: float
    masked_fraction: float
    kl_k1: float
    kl_k3: float
    max_prob_diff: float
    staleness_mean: float
    staleness_p99: float
    staleness_max: int
    tokens: int  # packed
    trained: int  # tokens in the loss
    micro_batches: int
    seconds: float


class Batch(NamedTuple):
    """The trajectories with a token to train on; the others are not forwarded."""

    data: Packed
    trainable: Tensor  # bool [T]
    advantages: Tensor  # [N]
    places: Tensor  # bool over the tokens of all candidates: which of them are here


def collate(candidates: list[Candidate], estimator: str, population: bool) -> Batch:
    """Join groups into one batch. Every scored trajectory counts in its group's baseline."""
    data = _joined([candidate.packed for candidate in candidates])
    trainable = torch.cat([candidate.trainable for candidate in candidates])
    scored = is_scored(data)
    lengths = segment_sum(data.sampled.long(), data.cu_seqlens)
    advantages = torch.zeros_like(data.rewards)
    advantages[scored] = group_advantages(
        data.rewards[scored],
        data.groups[scored],
        estimator=estimator,
        lengths=lengths[scored],
        population=population,
    )
    present = segment_sum(trainable.long(), data.cu_seqlens) > 0
    places = torch.repeat_interleave(present, lengths_of(data.cu_seqlens))
    return Batch(_chosen(data, present, places), trainable[places], advantages[present], places)


def _joined(parts: list[Packed]) -> Packed:
    names = ("token_ids", "sampled", "logprobs", "versions", "rewards", "groups", "leases")
    return Packed(
        **{name: torch.cat([getattr(part, name) for part in parts]) for name in names},
        cu_seqlens=_bounds(torch.cat([lengths_of(part.cu_seqlens) for part in parts])),
        outcomes=[outcome for part in parts for outcome in part.outcomes],
    )


def _chosen(data: Packed, trajectories: Tensor, tokens: Tensor) -> Packed:
    """Those trajectories, which have those tokens."""
    return Packed(
        **{name: getattr(data, name)[tokens] for name in ("token_ids", "sampled", "logprobs", "versions")},
        **{name: getattr(data, name)[trajectories] for name in ("rewards", "groups", "leases")},
        cu_seqlens=_bounds(lengths_of(data.cu_seqlens)[trajectories]),
        outcomes=[outcome for outcome, here in zip(data.outcomes, trajectories.tolist(), strict=True) if here],
    )


def _bounds(lengths: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).to(torch.int32)])


def split(cu_seqlens: Tensor, budget: int) -> list[tuple[int, int]]:
    """Ranges of whole trajectories of at most `budget` tokens each; a longer trajectory is alone."""
    bounds = cu_seqlens.tolist()
    ranges: list[tuple[int, int]] = []
    start = 0
    for end in range(1, len(bounds)):
        if end - start > 1 and bounds[end] - bounds[start] > budget:
            ranges.append((start, end - 1))
            start = end - 1
    if start < len(bounds) - 1:
        ranges.append((start, len(bounds) - 1))
    return ranges


class Trainer:
    """Policy and optimizer; `step` makes version v+1 from version v and a batch."""

    def __init__(self, config: Config, policy: Policy, optimizer: Optimizer) -> None:
        self._config, self._policy, self._optimizer = config, policy, optimizer
        self._rules = [rule for name in config.correction.presets for rule in Rule.preset(name)]
        self._bypass = config.learner.proximal == "bypass"
        if self._bypass and config.loss.name != "reinforce":
            # The loss's own ratio is the importance ratio.
            self._rules = [rule for rule in self._rules if rule.action == "mask"]
        clips = config.loss.name in ("ppo", "gspo", "cispo")
        self._params = {"clip_low": config.loss.clip_low, "clip_high": config.loss.clip_high} if clips else {}

    def step(
        self, candidates: list[Candidate], version: int, stopping: Callable[[], bool] = lambda: False
    ) -> tuple[StepStats, list[Fate]] | None:
        """None when `stopping` says so between two micro-batches: no parameter has changed then.

        A gradient that is not finite leaves the parameters as they are; the batch is consumed all the same, and its
        fates are those of a step.
        """
        began = time.monotonic()
        batch = collate(candidates, self._config.advantage.estimator, self._config.advantage.population)
        denominator = self._denominator(batch)
        parts: list[_Part] = []
        for start, end in split(batch.data.cu_seqlens, self._config.learner.micro_tokens):
            if stopping():
                return None
            parts.append(self._backward(batch, start, end, denominator))
        stepped = self._optimizer.step(version)
        logp = torch.cat([part.logp for part in parts])
        correction = correct(logp, batch.data.logprobs, batch.trainable, batch.data.cu_seqlens, self._rules)
        count = max(1, int(batch.trainable.sum()))
        stats = correction.stats
        # A learner that resumed meets tokens of versions that it is about to make again: they are not stale.
        staleness = (version - batch.data.versions[correction.keep]).clamp(min=0).sort().values.tolist()
        done = StepStats(
            loss=sum(part.loss for part in parts),
            entropy=sum(part.entropy for part in parts) / count,
            grad_norm=stepped.grad_norm,
            skipped=stepped.skipped,
            lr=stepped.lr,
            clip_fraction=sum(part.clipped for part in parts) / count,
            ess=stats.ess,
            weight_mean=stats.weight_mean,
            clipped_fraction=stats.clipped_fraction,
            masked_fraction=stats.masked_fraction,
            kl_k1=stats.kl_k1,
            kl_k3=stats.kl_k3,
            max_prob_diff=stats.max_prob_diff,
            staleness_mean=sum(staleness) / max(1, len(staleness)),
            staleness_p99=staleness[math.ceil(0.99 * len(staleness)) - 1] if staleness else 0,
            staleness_max=staleness[-1] if staleness else 0,
            tokens=len(batch.data.token_ids),
            trained=len(staleness),
            micro_batches=len(parts),
            seconds=time.monotonic() - began,
        )
        keep = torch.zeros_like(batch.places)
        keep[batch.places] = correction.keep
        return done, self._fates(candidates, keep)

    def _denominator(self, batch: Batch) -> float:
        mode, trajectories = self._config.loss.aggregation, len(batch.data.rewards)
        if mode == "token_mean":
            return int(batch.trainable.sum())
        return trajectories * (self._config.rollout.max_tokens if mode == "sequence_sum" else 1)

    def _backward(self, batch: Batch, start: int, end: int, denominator: float) -> "_Part":
        device = self._policy.device
        whole, bounds = batch.data, batch.data.cu_seqlens
        first, last = int(bounds[start]), int(bounds[end])
        token_ids, rollout, trainable = (
            each[first:last].to(device) for each in (whole.token_ids, whole.logprobs, batch.trainable)
        )
        cu_seqlens = (bounds[start : end + 1] - first).to(device)
        current = self._policy.logprobs(token_ids, trainable, cu_seqlens)
        logp = current.logp.detach()
        correction = correct(logp, rollout, trainable, cu_seqlens, self._rules)
        loss = policy_loss(
            self._config.loss.name,
            logp=current.logp,
            logp_old=rollout if self._bypass else logp,
            advantages=torch.repeat_interleave(
                batch.advantages[start:end].to(device, logp.dtype), lengths_of(cu_seqlens)
            ),
            sampled=trainable,
            cu_seqlens=cu_seqlens,
            weights=correction.weights,
            keep=correction.keep,
            **self._params,
        )
        total = aggregate(
            loss.per_token, trainable, cu_seqlens, mode=self._config.loss.aggregation, denominator=denominator
        )
        if total.requires_grad:  # it does not if there was no log-prob to compute
            total.backward()
        return _Part(
            loss=float(total.detach()),
            clipped=loss.stats["clip_fraction"] * int(correction.keep.sum()),
            entropy=float(current.entropy.sum()),
            logp=logp.cpu(),
        )

    def _fates(self, candidates: list[Candidate], keep: Tensor) -> list[Fate]:
        sizes = [len(candidate.trainable) for candidate in candidates]
        pairs = zip(candidates, keep.split(sizes), strict=True)
        return [fate for candidate, part in pairs for fate in fates_of(candidate, part)]


class _Part(NamedTuple):
    loss: float
    clipped: float
    entropy: float
    logp: Tensor
