"""Advantages: how much better than its group a trajectory was. Pure, packed.

Invariant: an advantage depends on rewards and group ids only by value: any order, any ids, any group sizes.
"""

import torch
from torch import Tensor

from slipstream.learner.packing import lengths_of

EPSILON = 1e-6


def group_advantages(
    rewards: Tensor,
    group: Tensor,
    *,
    estimator: str = "grpo",
    lengths: Tensor | None = None,
    population: bool = False,
) -> Tensor:
    """[N] from rewards float [N] and group ids int [N].

    With mean and std over the group of n:
    grpo: (r - mean) / (std + 1e-6), std over n-1, or n with `population` (DeepSeekMath 2024);
    dr_grpo: r - mean (Dr. GRPO 2025); rloo: n / (n-1) (r - mean) (Ahmadian et al. 2024);
    opo: r - length-weighted mean (OPO 2025), needs `lengths` [N];
    max_rl: (r - mean) / mean, 0 where mean <= 0 (MaxRL, as in prime-rl);
    reinforce_pp_baseline: r - mean, whitened over the batch's tokens (REINFORCE++ 2025), needs `lengths` [N].
    A group of one has no baseline: its advantage is the reward itself (0 for max_rl). Computed in float64: squares of
    large rewards do not overflow.
    """
    advantages = _advantages(rewards.double(), group, estimator, lengths, population)
    return advantages.to(rewards.dtype)


def _advantages(rewards: Tensor, group: Tensor, estimator: str, lengths: Tensor | None, population: bool) -> Tensor:
    index = torch.unique(group, return_inverse=True)[1]
    count = _group_sum(torch.ones_like(rewards), index)
    mean = _group_sum(rewards, index) / count
    alone = count == 1
    centred = torch.where(alone, rewards, rewards - mean)
    if estimator == "grpo":
        deviation = _group_sum((rewards - mean) ** 2, index) / (count if population else (count - 1).clamp(min=1))
        return torch.where(alone, rewards, centred / (deviation.sqrt() + EPSILON))
    if estimator == "dr_grpo":
        return centred
    if estimator == "rloo":
        return torch.where(alone, rewards, centred * count / (count - 1).clamp(min=1))
    if estimator == "max_rl":
        positive = mean > 0
        return torch.where(
            positive & ~alone, (rewards - mean) / torch.where(positive, mean, torch.ones_like(mean)), 0.0
        )
    if lengths is None:
        raise ValueError(f"estimator {estimator!r} needs lengths")
    weight = lengths.to(rewards.dtype)
    if estimator == "opo":
        total = _group_sum(weight, index)
        baseline = _group_sum(weight * rewards, index) / torch.where(total > 0, total, torch.ones_like(total))
        return torch.where(alone, rewards, rewards - baseline)
    if estimator == "reinforce_pp_baseline":
        return _whiten(centred, weight)
    raise ValueError(f"estimator {estimator!r} is not one of grpo dr_grpo rloo opo max_rl reinforce_pp_baseline")


def _group_sum(values: Tensor, index: Tensor) -> Tensor:
    """[N]: each member gets the sum over its group."""
    sums = torch.zeros(int(index.max()) + 1 if len(index) else 0, dtype=values.dtype, device=values.device)
    return sums.index_add(0, index, values)[index]


def _whiten(values: Tensor, weight: Tensor) -> Tensor:
    """Mean 0, variance 1 over tokens, each trajectory counting as often as it has tokens."""
    tokens = weight.sum().clamp(min=1)
    mean = (weight * values).sum() / tokens
    variance = (weight * (values - mean) ** 2).sum() / (tokens - 1).clamp(min=1)
    return (values - mean) * torch.rsqrt(variance + 1e-8)


def gae(
    rewards: Tensor, values: Tensor, sampled: Tensor, cu_seqlens: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """(advantages [T], returns [T]) of per-token rewards and values (Schulman et al. 2015), over sampled tokens only.

    Positions that are not sampled are skipped over: the next value of a token is that of the next sampled one.
    """
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for start, length in zip(cu_seqlens[:-1].tolist(), lengths_of(cu_seqlens).tolist(), strict=True):
        following = torch.zeros((), dtype=values.dtype, device=values.device)
        running = torch.zeros_like(following)
        for t in reversed(range(start, start + length)):
            if not sampled[t]:
                continue
            delta = rewards[t] + gamma * following - values[t]
            running = delta + gamma * lam * running
            advantages[t], returns[t] = running, running + values[t]
            following = values[t]
    return advantages, returns


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """[N]: 0 up to max_length - buffer, then falling to -factor at max_length and beyond (DAPO 2025)."""
    over = lengths.to(torch.get_default_dtype()) - (max_length - buffer)
    return -(over / buffer).clamp(0, 1) * factor
