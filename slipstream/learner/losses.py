"""Policy losses, aggregation and KL, over the packed layout. Pure; differentiable in `logp`; dtype-preserving.

Invariant: positions that are not sampled, or not kept, give a loss and a gradient of exactly 0, whatever stands there;
log-ratios are clamped to +-20 before exp, so that every loss and gradient is finite.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.learner.packing import only, segment_ids, segment_mean, segment_sum

CLAMP = 20.0


class PolicyLoss(NamedTuple):
    """`per_token` [T] is to be aggregated; `stats` are over the sampled tokens that count."""

    per_token: Tensor
    stats: dict[str, float]


class Tokens(NamedTuple):
    """What a loss looks at, [T] each; 0 where a token does not count."""

    logp: Tensor
    logp_old: Tensor
    log_ratio: Tensor  # log(current / old), clamped
    advantages: Tensor
    counts: Tensor  # bool
    cu_seqlens: Tensor


def policy_loss(
    name: str,
    *,
    logp: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    sampled: Tensor,
    cu_seqlens: Tensor,
    weights: Tensor | None = None,
    keep: Tensor | None = None,
    **params: float,
) -> PolicyLoss:
    """The loss of each token. All tensors [T]; weights multiply and keep selects in every loss.

    ppo(clip_low, clip_high, dual_clip): -min(A r, A clip(r)), at most dual_clip |A| where A < 0 (PPO 2017, DAPO 2025);
    gspo(clip_low, clip_high): the same with r = geometric mean over the trajectory (GSPO 2025);
    cispo(clip_low, clip_high): -sg(clip(r)) A log p (MiniMax-M1 2025);
    sapo(tau_pos, tau_neg): -A sigmoid(tau (r - 1)) 4 / tau (SAPO 2025);
    dppo_tv(limit, cap, penalty): -A min(r, cap), dropped where the probability moved by more than limit the way that A
    pulls, plus penalty (log r)^2 everywhere (DPPO; as in prime-rl);
    reinforce: -A log p.
    """
    if name not in LOSSES:
        raise ValueError(f"loss {name!r} is not one of {', '.join(LOSSES)}")
    counts = sampled if keep is None else sampled & keep
    logp, logp_old, advantages = only(counts, logp), only(counts, logp_old), only(counts, advantages)
    log_ratio = (logp - logp_old).clamp(-CLAMP, CLAMP)
    tokens = Tokens(logp, logp_old, log_ratio, advantages, counts, cu_seqlens)
    per_token, clipped = LOSSES[name](tokens, **params)
    if weights is not None:
        per_token = per_token * only(counts, weights)
    number = counts.sum().clamp(min=1)
    with torch.no_grad():
        stats = {
            "clip_fraction": float((clipped & counts).sum() / number),
            "ratio_mean": float(only(counts, log_ratio.exp()).sum() / number),
            "ppo_kl": float(only(counts, -log_ratio).sum() / number),
        }
    return PolicyLoss(only(counts, per_token), stats)


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    plain, bounded = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(plain, bounded), bounded > plain


def _ppo(at: Tokens, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float = 3.0) -> tuple[Tensor, Tensor]:
    loss, clipped = _clipped(at.log_ratio.exp(), at.advantages, clip_low, clip_high)
    return torch.where(at.advantages < 0, torch.minimum(loss, -at.advantages * dual_clip), loss), clipped


def _gspo(at: Tokens, clip_low: float = 3e-4, clip_high: float = 4e-4) -> tuple[Tensor, Tensor]:
    of_trajectory = segment_mean(at.log_ratio, at.counts, at.cu_seqlens)[segment_ids(at.cu_seqlens)]
    # The value is the trajectory's ratio, the gradient the token's own.
    log_token = (at.logp - at.logp.detach() + of_trajectory.detach()).clamp(max=10.0)
    return _clipped(log_token.exp(), at.advantages, clip_low, clip_high)


def _cispo(at: Tokens, clip_low: float = 0.2, clip_high: float = 0.28) -> tuple[Tensor, Tensor]:
    ratio = at.log_ratio.detach().exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -bounded * at.advantages * at.logp, bounded != ratio


def _sapo(at: Tokens, tau_pos: float = 1.0, tau_neg: float = 1.05) -> tuple[Tensor, Tensor]:
    tau = torch.where(at.advantages > 0, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (at.log_ratio.exp() - 1)) * 4 / tau
    return -at.advantages * gate, torch.zeros_like(at.counts)


def _dppo_tv(at: Tokens, limit: float = 0.2, cap: float = 20.0, penalty: float = 0.0) -> tuple[Tensor, Tensor]:
    moved = at.logp.detach().exp() - at.logp_old.exp()
    dropped = torch.where(at.advantages > 0, moved > limit, moved < -limit)
    loss = torch.where(dropped, 0.0, -at.advantages * at.log_ratio.exp().clamp(max=cap))
    return loss + penalty * at.log_ratio**2, dropped


def _reinforce(at: Tokens) -> tuple[Tensor, Tensor]:
    return -at.advantages * at.logp, torch.zeros_like(at.counts)


LOSSES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "ppo": _ppo,
    "gspo": _gspo,
    "cispo": _cispo,
    "sapo": _sapo,
    "dppo_tv": _dppo_tv,
    "reinforce": _reinforce,
}


def aggregate(
    per_token: Tensor,
    sampled: Tensor,
    cu_seqlens: Tensor,
    *,
    mode: str,
    denominator: float | None = None,
    length: int | None = None,
) -> Tensor:
    """One number of a batch, or of a part of it.

    token_mean: sum / sampled tokens; sequence_mean: mean over trajectories of their token mean; sequence_sum: sum /
    (N length), as in Dr. GRPO. `denominator` is what the whole batch divides by (tokens; trajectories; N length) when
    only a part of it is here: the parts' values and gradients then add up to the whole's. A trajectory without a
    sampled token counts in N.
    """
    total = only(sampled, per_token)
    trajectories = len(cu_seqlens) - 1
    if mode == "token_mean":
        return total.sum() / (denominator if denominator is not None else max(1, int(sampled.sum())))
    if mode == "sequence_mean":
        means = segment_mean(total, sampled, cu_seqlens)
        return means.sum() / (denominator if denominator is not None else max(1, trajectories))
    if mode == "sequence_sum":
        if denominator is None:
            if length is None:
                raise ValueError("sequence_sum needs length (what a full trajectory counts as), or a denominator")
            denominator = max(1, trajectories * length)
        return segment_sum(total, cu_seqlens).sum() / denominator
    raise ValueError(f"aggregation {mode!r} is not one of token_mean sequence_mean sequence_sum")


def kl(logp: Tensor, logp_ref: Tensor, *, estimator: str = "k3") -> Tensor:
    """[T]: estimate of KL(policy || reference) at each sampled token (Schulman 2020): k1 = log r, k2 = log(r)^2 / 2,
    k3 = 1/r - 1 + log r, with r = policy / reference."""
    log_ratio = (logp - logp_ref).clamp(-CLAMP, CLAMP)
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio**2 / 2
    if estimator == "k3":
        return (-log_ratio).exp() - 1 + log_ratio
    raise ValueError(f"KL estimator {estimator!r} is not one of k1 k2 k3")
