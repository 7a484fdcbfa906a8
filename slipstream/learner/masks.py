"""Masks that look at where the advantage pulls: tokens or trajectories that are off-policy in the harmful direction.

Invariant: `keep` is False wherever nothing was sampled, whatever stands there, and nothing carries a gradient. Unlike
the rules of `corrections`, these need advantages, and `m2po` the whole batch.
"""

import torch
from torch import Tensor

from slipstream.learner.corrections import CLAMP
from slipstream.learner.packing import only, segment_ids, segment_mean


@torch.no_grad()
def opsm(
    logp: Tensor, logp_rollout: Tensor, advantages: Tensor, sampled: Tensor, cu_seqlens: Tensor, *, limit: float
) -> Tensor:
    """bool [T]: drops a trajectory of negative advantage whose mean log(rollout / current) is over `limit`
    (off-policy sequence masking, DeepSeek-V3.2 2025): what the policy already left behind need not be pushed away."""
    drift = segment_mean(-_log_ratio(logp, logp_rollout, sampled), sampled, cu_seqlens)[segment_ids(cu_seqlens)]
    return sampled & ~((only(sampled, advantages) < 0) & (drift > limit))


@torch.no_grad()
def m2po(logp: Tensor, logp_rollout: Tensor, advantages: Tensor, sampled: Tensor, *, limit: float = 0.04) -> Tensor:
    """bool [T]: drops as few tokens as bring the second moment of the log-ratio to `limit` (M2PO 2025).

    The moment is the mean of log(current / rollout)^2 over harmful tokens: those with ratio over 1 and A > 0, or ratio
    under 1 and A < 0; the largest are dropped first, of equal ones the later. Over the whole batch.
    """
    log_ratio, pull = _log_ratio(logp, logp_rollout, sampled), only(sampled, advantages)
    harmful = torch.nonzero(sampled & (log_ratio * pull.sign() > 0))[:, 0]
    squares, order = (log_ratio[harmful].double() ** 2).sort(stable=True)
    moments = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    keep = sampled.clone()
    keep[harmful[order[moments > limit]]] = False
    return keep


def _log_ratio(logp: Tensor, logp_rollout: Tensor, sampled: Tensor) -> Tensor:
    difference = only(sampled, logp) - only(sampled, logp_rollout)
    return difference.nan_to_num(nan=0.0).clamp(-CLAMP, CLAMP)
