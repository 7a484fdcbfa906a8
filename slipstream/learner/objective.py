"""What a config asks of a token: its anchor, its weight, whether it counts, and its loss.

Invariant: everything here looks at one token or one trajectory at a time, except `across`, which is of a whole batch:
any split of a batch into micro-batches gives the same sums.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.config import Config
from slipstream.learner.corrections import CorrectionStats, Rule, correct
from slipstream.learner.losses import aggregate, kl, policy_loss
from slipstream.learner.masks import m2po, opsm
from slipstream.learner.micro import Micro
from slipstream.learner.packing import only
from slipstream.learner.policy import TokenLogprobs
from slipstream.learner.proximal import interpolated


class Weighed(NamedTuple):
    anchor: Tensor  # [T], the loss's old log-probs
    weights: Tensor  # [T]
    keep: Tensor  # bool [T]
    stats: CorrectionStats


class Loss(NamedTuple):
    """Sums, to be divided by the batch's denominator; `total` carries the gradient, the others are its parts."""

    total: Tensor
    policy: float
    kl: float
    clipped: float  # tokens


class Objective:
    def __init__(self, config: Config) -> None:
        self._loss, self._correction = config.loss, config.correction
        self._proximal = config.learner.proximal
        self._rules = [rule for name in config.correction.presets for rule in Rule.preset(name)]
        if self._proximal == "bypass" and config.loss.name != "reinforce":
            # The loss's own ratio is the importance ratio.
            self._rules = [rule for rule in self._rules if rule.action == "mask"]
        self._params = _params(config)
        self._length = config.rollout.max_tokens
        self.across_batch = config.correction.m2po > 0
        self.entropy_gradient = config.loss.entropy_coef > 0

    def denominator(self, tokens: int, trajectories: int) -> int:
        """Of `tokens` that can be trained on, in so many trajectories."""
        if self._loss.aggregation == "token_mean":
            return max(1, tokens)
        return max(1, trajectories) * (self._length if self._loss.aggregation == "sequence_sum" else 1)

    def across(self, micro: Micro, logp: Tensor) -> Tensor:
        """bool [T] of a whole batch: what is kept by the rule that looks at all of it."""
        if not self.across_batch:
            return micro.trainable
        return m2po(logp, micro.rollout, micro.advantages, micro.trainable, limit=self._correction.m2po)

    def weigh(self, micro: Micro, logp: Tensor, across: Tensor, version: int) -> Weighed:
        """By the detached log-probs before step `version` + 1."""
        proximal = logp
        if self._proximal == "interpolate":
            proximal = interpolated(logp, micro.rollout.to(logp.dtype), micro.versions, version)
        correction = correct(proximal, micro.rollout, micro.trainable, micro.cu_seqlens, self._rules)
        keep = correction.keep & across
        if self._correction.opsm:
            limit = self._correction.opsm
            keep &= opsm(logp, micro.rollout, micro.advantages, micro.trainable, micro.cu_seqlens, limit=limit)
        anchor = micro.rollout if self._proximal == "bypass" else proximal
        return Weighed(anchor, correction.weights, keep, correction.stats)

    def loss(self, micro: Micro, current: TokenLogprobs, weighed: Weighed) -> Loss:
        policy = policy_loss(
            self._loss.name,
            logp=current.logp,
            logp_old=weighed.anchor,
            advantages=micro.advantages.to(current.logp.dtype),
            sampled=micro.trainable,
            cu_seqlens=micro.cu_seqlens,
            weights=weighed.weights,
            keep=weighed.keep,
            **self._params,
        )
        total = part = self._summed(policy.per_token, micro)
        drift = torch.zeros_like(total)
        if len(micro.reference):
            now, then = only(weighed.keep, current.logp), only(weighed.keep, micro.reference.to(current.logp.dtype))
            drift = self._summed(only(weighed.keep, kl(now, then, estimator=self._loss.kl_estimator)), micro)
            total = total + self._loss.kl_coef * drift
        if self._loss.entropy_coef:
            total = total - self._loss.entropy_coef * self._summed(only(weighed.keep, current.entropy), micro)
        clipped = policy.stats["clip_fraction"] * int(weighed.keep.sum())
        return Loss(total, float(part.detach()), float(drift.detach()), clipped)

    def _summed(self, per_token: Tensor, micro: Micro) -> Tensor:
        return aggregate(per_token, micro.trainable, micro.cu_seqlens, mode=self._loss.aggregation, denominator=1)


def _params(config: Config) -> dict[str, float]:
    loss = config.loss
    if loss.name == "dppo_tv":
        return {"limit": loss.tv_limit, "penalty": loss.tv_penalty}
    params = {"clip_low": loss.clip_low, "clip_high": loss.clip_high} if loss.name in ("ppo", "gspo", "cispo") else {}
    return params | ({"dual_clip": loss.dual_clip} if loss.name == "ppo" else {})
