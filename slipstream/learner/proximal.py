"""The proximal policy: where the clip of a loss is anchored, between the policy sampled from and the current one.

Invariant: the anchor carries no gradient, and at every token lies between the two others, both included.
"""

import torch
from torch import Tensor


@torch.no_grad()
def interpolated(logp: Tensor, logp_rollout: Tensor, versions: Tensor, version: int) -> Tensor:
    """[T]: log-linear between rollout and current log-probs, by the token's staleness (A-3PO 2025).

    log p_rollout + a (log p - log p_rollout), where a = (d - 1) / d for a token d >= 1 versions old, 0 for a fresh one
    and where nothing was sampled (its version is negative). The clipped ratio is then (p / p_rollout)^(1 / d): the
    older a token, the farther p may be from what sampled it.
    """
    age = (version - versions).clamp(min=1).to(logp.dtype)
    share = torch.where(versions >= 0, (age - 1) / age, torch.zeros_like(age))
    return torch.where(share > 0, logp_rollout + share * (logp - logp_rollout), logp_rollout)
