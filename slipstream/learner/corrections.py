"""Off-policy corrections: what to do where the learner and the engine disagree about a sampled token.

Invariant: over sampled tokens, weights are detached, finite and 1 where no rule says otherwise, and `keep` is False
only where a mask rule says so. Positions that are not sampled have weight 0 and keep False, whatever stands there.
"""

from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from slipstream.learner.packing import only, segment_ids, segment_mean, segment_sum

CLAMP = 20.0  # of a log-ratio before exp


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule over the ratio proximal / rollout; bounds are inclusive.

    truncate: the weight is min(ratio, high), and max(., low) if low is given. mask: tokens whose measure is out of
    [low, high] are dropped from the loss, or whole trajectories where `over` reduces it.
    """

    action: Literal["truncate", "mask"]
    measure: Literal["ratio", "k2", "k3", "prob_diff"] = "ratio"
    over: Literal["token", "sum", "mean", "max", "min"] = "token"
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if self.action == "truncate" and (self.high is None or self.measure != "ratio"):
            raise ValueError("a rule that truncates needs `high`, and measures the ratio")
        if self.low is None and self.high is None:
            raise ValueError("a rule needs `low`, `high` or both")

    @staticmethod
    def preset(name: str) -> "list[Rule]":
        """The rules of a named preset. Raises ValueError with the names there are."""
        if name not in PRESETS:
            raise ValueError(f"correction preset {name!r} is not one of {', '.join(PRESETS)}")
        return PRESETS[name]


PRESETS: dict[str, list[Rule]] = {
    # Truncated importance sampling (Yao et al. 2025), by token and by trajectory.
    "tis": [Rule(action="truncate", high=2.0)],
    "tis_sequence": [Rule(action="truncate", over="sum", high=2.0)],
    # Tokens with a ratio out of bounds are dropped (IcePop, Ling team 2025).
    "icepop": [Rule(action="mask", low=0.5, high=5.0)],
    # Masked importance sampling: whole trajectories, by product and by geometric mean of ratios (verl's rejection).
    "mis_sequence": [Rule(action="mask", over="sum", low=0.5, high=2.0)],
    "mis_geometric": [Rule(action="mask", over="mean", low=0.999, high=1.001)],
    # One token that the learner finds all but impossible condemns its trajectory.
    "veto": [Rule(action="mask", over="min", low=1e-4)],
    "k3": [Rule(action="mask", measure="k3", over="mean", high=0.01)],
}


class CorrectionStats(msgspec.Struct, frozen=True):
    """Over sampled tokens. ess = 1 / mean((w / mean w)^2), kl_k1 = mean(rollout - proximal), kl_k3 = mean(ratio - 1 -
    log ratio), chi2 = mean(ratio^2) - 1."""

    ess: float
    weight_mean: float
    weight_max: float
    clipped_fraction: float
    masked_fraction: float
    kl_k1: float
    kl_k3: float
    chi2: float
    max_prob_diff: float


class Correction(NamedTuple):
    weights: Tensor  # [T], detached
    keep: Tensor  # bool [T]
    stats: CorrectionStats


@torch.no_grad()
def correct(
    logp_proximal: Tensor, logp_rollout: Tensor, sampled: Tensor, cu_seqlens: Tensor, rules: list[Rule]
) -> Correction:
    """Weights and mask of all rules together; mask rules are ANDed, at most one rule truncates.

    logp_* float [T]; sampled bool [T]; cu_seqlens int32 [N+1]. Raises ValueError for two truncate rules.
    """
    if sum(rule.action == "truncate" for rule in rules) > 1:
        raise ValueError("at most one rule may truncate; join them, or make one a mask")
    proximal, rollout = only(sampled, logp_proximal), only(sampled, logp_rollout)
    log_ratio = (proximal - rollout).nan_to_num(nan=0.0).clamp(-CLAMP, CLAMP)
    weights = torch.ones_like(log_ratio)
    keep = torch.ones_like(sampled)
    clipped = torch.zeros_like(sampled)
    for rule in rules:
        measure = _measure(rule, log_ratio, proximal, rollout, sampled, cu_seqlens)
        outside = torch.zeros_like(sampled)
        if rule.low is not None:
            outside |= measure < rule.low
        if rule.high is not None:
            outside |= measure > rule.high
        if rule.action == "mask":
            keep &= ~outside
        else:
            weights = measure.clamp(min=rule.low, max=rule.high)
            clipped = outside
    weights = only(sampled, weights)
    keep = keep & sampled
    return Correction(weights, keep, _stats(weights, keep, clipped, log_ratio, proximal, rollout, sampled))


def _measure(
    rule: Rule, log_ratio: Tensor, proximal: Tensor, rollout: Tensor, sampled: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """[T]: the rule's measure, reduced over each trajectory and spread over its tokens where `over` says so."""
    if rule.measure == "ratio":
        # sum and mean act on the log: the product of ratios, and their geometric mean.
        return _reduce(rule.over, log_ratio, sampled, cu_seqlens).clamp(-CLAMP, CLAMP).exp()
    if rule.measure == "k2":
        values = log_ratio**2 / 2
    elif rule.measure == "k3":
        values = log_ratio.exp() - 1 - log_ratio
    else:
        values = proximal.exp() - rollout.exp()
    return _reduce(rule.over, values, sampled, cu_seqlens)


def _reduce(over: str, values: Tensor, sampled: Tensor, cu_seqlens: Tensor) -> Tensor:
    if over == "token":
        return values
    if over == "sum":
        reduced = segment_sum(only(sampled, values), cu_seqlens)
    elif over == "mean":
        reduced = segment_mean(values, sampled, cu_seqlens)
    else:
        empty = float("-inf") if over == "max" else float("inf")
        filled = torch.where(sampled, values, torch.full_like(values, empty))
        start = torch.full((len(cu_seqlens) - 1,), empty, dtype=values.dtype, device=values.device)
        reduced = start.scatter_reduce(0, segment_ids(cu_seqlens), filled, "amax" if over == "max" else "amin")
    return reduced[segment_ids(cu_seqlens)]


def _stats(
    weights: Tensor,
    keep: Tensor,
    clipped: Tensor,
    log_ratio: Tensor,
    proximal: Tensor,
    rollout: Tensor,
    sampled: Tensor,
) -> CorrectionStats:
    count = int(sampled.sum())
    if count == 0:
        return CorrectionStats(1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    w, lr = weights[sampled], log_ratio[sampled]
    mean = float(w.mean())
    ratio = lr.exp()
    return CorrectionStats(
        ess=1.0 / float(((w / mean) ** 2).mean()) if mean > 0 else 0.0,
        weight_mean=mean,
        weight_max=float(w.max()),
        clipped_fraction=float(clipped[sampled].to(w.dtype).mean()),
        masked_fraction=1.0 - int(keep.sum()) / count,
        kl_k1=float(-lr.mean()),
        kl_k3=float((ratio - 1 - lr).mean()),
        chi2=float((ratio**2).mean()) - 1.0,
        max_prob_diff=float((proximal.exp() - rollout.exp())[sampled].abs().max()),
    )
