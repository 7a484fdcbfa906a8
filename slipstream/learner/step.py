"""One optimizer step over a batch of groups, in packed micro-batches.

Invariant: gradients accumulate unnormalized by micro-batch and share one denominator, the batch's own: any split of the
batch into micro-batches gives the same step. No token over the cutoff, of a masked trajectory, or cut by a mask rule
enters the loss.

The denominator counts trainable tokens (or trajectories): sampled, of a trajectory that trains, not stale. Tokens that a
mismatch rule cuts stay in it ("sampled", not "kept"), since they are known only once log-probs are; cutting then never
makes the others' steps larger.

A batch gets exactly one step, so the proximal policy (the one before the step) is the current one: its log-probs are
those of the same forward pass, detached, and the clipped ratio starts at 1.
"""

import math
import time
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from slipstream.config import Config
from slipstream.learner.advantages import group_advantages
from slipstream.learner.corrections import Correction, Rule, correct
from slipstream.learner.groups import Candidate, fates_of
from slipstream.learner.losses import aggregate, policy_loss
from slipstream.learner.optimizer import Optimizer
from slipstream.learner.packing import segment_sum
from slipstream.learner.policy import Policy
from slipstream.queue import Packed
from slipstream.queue.messages import Fate


class StepStats(msgspec.Struct):
    """What one step did. Fractions and means are over the tokens that could be trained on."""

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
    """A batch of trajectories as packed tensors; `trainable` bool [T], `advantages` [N]."""

    data: Packed
    trainable: Tensor
    advantages: Tensor


def collate(candidates: list[Candidate], estimator: str, population: bool) -> Batch:
    """Join groups into one batch. Trajectories without a score have advantage 0 and are in no baseline."""
    parts = [candidate.packed for candidate in candidates]
    bounds = torch.cat([part.cu_seqlens[1:] - part.cu_seqlens[:-1] for part in parts]).cumsum(0)
    zero = torch.zeros(1, dtype=torch.int32)
    data = Packed(
        **{
            name: torch.cat([getattr(part, name) for part in parts])
            for name in ("token_ids", "sampled", "logprobs", "versions", "rewards", "groups", "leases")
        },
        cu_seqlens=torch.cat([zero, bounds.to(torch.int32)]),
        outcomes=[outcome for part in parts for outcome in part.outcomes],
    )
    scored = ~data.rewards.isnan()
    lengths = segment_sum(data.sampled.long(), data.cu_seqlens)
    advantages = torch.zeros_like(data.rewards)
    advantages[scored] = group_advantages(
        data.rewards[scored],
        data.groups[scored],
        estimator=estimator,
        lengths=lengths[scored],
        population=population,
    )
    return Batch(data, torch.cat([candidate.trainable for candidate in candidates]), advantages)


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

    def step(self, candidates: list[Candidate], version: int) -> tuple[StepStats, list[Fate]]:
        began = time.monotonic()
        config = self._config
        batch = collate(candidates, config.advantage.estimator, config.advantage.population)
        denominator = self._denominator(batch)
        loss, clipped, entropy = 0.0, 0.0, 0.0
        logps: list[Tensor] = []
        ranges = split(batch.data.cu_seqlens, config.learner.micro_tokens)
        for start, end in ranges:
            part = self._backward(batch, start, end, denominator)
            loss += part.loss
            clipped += part.clipped
            entropy += part.entropy
            logps.append(part.logp)
        stepped = self._optimizer.step(version)
        correction = self._correct(torch.cat(logps), batch.data, batch.trainable)
        staleness = (version - batch.data.versions[batch.trainable & correction.keep]).clamp(min=0)
        count = max(1, int(batch.trainable.sum()))
        stats = correction.stats
        done = StepStats(
            loss=loss,
            entropy=entropy / count,
            grad_norm=stepped.grad_norm,
            skipped=stepped.skipped,
            lr=stepped.lr,
            clip_fraction=clipped / count,
            ess=stats.ess,
            weight_mean=stats.weight_mean,
            clipped_fraction=stats.clipped_fraction,
            masked_fraction=stats.masked_fraction,
            kl_k1=stats.kl_k1,
            kl_k3=stats.kl_k3,
            max_prob_diff=stats.max_prob_diff,
            staleness_mean=float(staleness.double().mean()) if len(staleness) else 0.0,
            staleness_p99=float(staleness.double().quantile(0.99)) if len(staleness) else 0.0,
            staleness_max=int(staleness.max()) if len(staleness) else 0,
            tokens=len(batch.data.token_ids),
            trained=int((batch.trainable & correction.keep).sum()),
            micro_batches=len(ranges),
            seconds=time.monotonic() - began,
        )
        return done, self._fates(candidates, correction.keep)

    def _denominator(self, batch: Batch) -> float:
        config = self._config
        trajectories = len(batch.data.rewards)
        if config.loss.aggregation == "token_mean":
            return max(1, int(batch.trainable.sum()))
        if config.loss.aggregation == "sequence_mean":
            return trajectories
        return trajectories * config.rollout.max_tokens

    def _correct(self, logp: Tensor, data: Packed, trainable: Tensor) -> Correction:
        rules = self._rules
        if self._config.learner.proximal == "bypass" and self._config.loss.name != "reinforce":
            rules = [rule for rule in rules if rule.action == "mask"]  # the loss's own ratio is the importance ratio
        return correct(logp, data.logprobs, trainable, data.cu_seqlens, rules)

    def _backward(self, batch: Batch, start: int, end: int, denominator: float) -> "_Part":
        config, device = self._config, self._policy.device
        data = slice_of(batch.data, start, end)
        bounds = batch.data.cu_seqlens
        trainable = batch.trainable[int(bounds[start]) : int(bounds[end])]
        on_device = [each.to(device) for each in (data.token_ids, trainable, data.cu_seqlens, data.logprobs)]
        token_ids, mask, cu_seqlens, rollout = on_device
        current = self._policy.logprobs(token_ids, mask, cu_seqlens)
        correction = self._correct(current.logp.detach(), data._replace(logprobs=rollout, cu_seqlens=cu_seqlens), mask)
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
        advantages = batch.advantages[start:end].to(device, current.logp.dtype)
        bypass = config.learner.proximal == "bypass"
        params = (
            {"clip_low": config.loss.clip_low, "clip_high": config.loss.clip_high}
            if config.loss.name in ("ppo", "gspo", "cispo")
            else {}
        )
        loss = policy_loss(
            config.loss.name,
            logp=current.logp,
            logp_old=rollout if bypass else current.logp.detach(),
            advantages=torch.repeat_interleave(advantages, lengths),
            sampled=mask,
            cu_seqlens=cu_seqlens,
            weights=correction.weights,
            keep=correction.keep,
            **params,
        )
        total = aggregate(loss.per_token, mask, cu_seqlens, mode=config.loss.aggregation, denominator=denominator)
        total.backward()
        count = int(mask.sum())
        return _Part(
            loss=float(total.detach()),
            clipped=loss.stats["clip_fraction"] * count,
            entropy=float(current.entropy.sum()),
            logp=current.logp.detach().cpu(),
        )

    def _fates(self, candidates: list[Candidate], keep: Tensor) -> list[Fate]:
        fates: list[Fate] = []
        at = 0
        for candidate in candidates:
            size = len(candidate.trainable)
            fates.extend(fates_of(candidate, keep[at : at + size]))
            at += size
        return fates


class _Part(NamedTuple):
    loss: float
    clipped: float
    entropy: float
    logp: Tensor


def slice_of(data: Packed, start: int, end: int) -> Packed:
    """Trajectories [start, end) of a packed batch."""
    first, last = int(data.cu_seqlens[start]), int(data.cu_seqlens[end])
    return Packed(
        token_ids=data.token_ids[first:last],
        sampled=data.sampled[first:last],
        logprobs=data.logprobs[first:last],
        versions=data.versions[first:last],
        cu_seqlens=data.cu_seqlens[start : end + 1] - first,
        rewards=data.rewards[start:end],
        groups=data.groups[start:end],
        leases=data.leases[start:end],
        outcomes=data.outcomes[start:end],
    )


def finite(value: float) -> float:
    """For a metric: JSON has no inf and no NaN."""
    return value if math.isfinite(value) else -1.0
