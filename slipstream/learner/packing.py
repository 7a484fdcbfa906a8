"""Segment arithmetic over the packed layout: `[T]` tensors and `cu_seqlens` int32 `[N+1]`, no padding.

Invariant: no function multiplies by a mask; positions that do not count are selected away, so that inf and NaN there
reach neither values nor gradients.
"""

import torch
from torch import Tensor


def lengths_of(cu_seqlens: Tensor) -> Tensor:
    """int64 [N]: tokens of each trajectory."""
    return (cu_seqlens[1:] - cu_seqlens[:-1]).long()


def segment_ids(cu_seqlens: Tensor) -> Tensor:
    """int64 [T]: which trajectory each token belongs to."""
    lengths = lengths_of(cu_seqlens)
    return torch.repeat_interleave(torch.arange(len(lengths), device=cu_seqlens.device), lengths)


def position_ids(cu_seqlens: Tensor) -> Tensor:
    """int64 [T]: 0, 1, 2, ... restarting at each trajectory."""
    total = int(cu_seqlens[-1])
    return torch.arange(total, device=cu_seqlens.device) - cu_seqlens[:-1].long()[segment_ids(cu_seqlens)]


def only(mask: Tensor, values: Tensor) -> Tensor:
    """`values` where `mask`, 0 elsewhere; gradients of what is dropped are exactly 0."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def segment_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N]: sum over each trajectory's tokens; 0 for an empty one."""
    out = torch.zeros(len(cu_seqlens) - 1, dtype=values.dtype, device=values.device)
    return out.index_add(0, segment_ids(cu_seqlens), values)


def segment_mean(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N]: mean over each trajectory's masked-in tokens; 0 where there are none."""
    counts = segment_sum(mask.to(values.dtype), cu_seqlens)
    return segment_sum(only(mask, values), cu_seqlens) / counts.clamp(min=1)
