"""Record batches as the learner's packed tensors.

Invariant: for one record batch, `token_ids` and `logprobs` are views of the Arrow buffers (no copy); `sampled` is
unpacked from bits and `versions` from runs. Several batches are concatenated once.
"""

# pyarrow has no types.
# pyright: standard, reportMissingTypeStubs=false

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from slipstream.queue.wire import RecordBatch, versions


class Packed(NamedTuple):
    """[T] over the concatenated trajectories, [N] a trajectory."""

    token_ids: Tensor  # int32 [T]
    sampled: Tensor  # bool [T]
    logprobs: Tensor  # float32 [T], 0 where not sampled
    versions: Tensor  # int32 [T], -1 where not sampled
    cu_seqlens: Tensor  # int32 [N+1]
    rewards: Tensor  # float64 [N], NaN: not scored
    groups: Tensor  # int64 [N]
    leases: Tensor  # int64 [N]
    outcomes: list[str]


def packed(batch: RecordBatch | Sequence[RecordBatch]) -> Packed:
    """Tensors over one record batch, or over several as if they were one."""
    if isinstance(batch, pa.RecordBatch):
        return _one(batch)
    parts = [_one(each) for each in batch]
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0] + [int(part.cu_seqlens[-1]) for part in parts]).tolist()
    zero = torch.zeros(1, dtype=torch.int32)
    bounds = [part.cu_seqlens[1:] + start for part, start in zip(parts, starts, strict=False)]
    fields = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name in ("token_ids", "sampled", "logprobs", "versions", "rewards", "groups", "leases")
    }
    return Packed(
        **fields,
        cu_seqlens=torch.cat([zero, *bounds]),
        outcomes=[outcome for part in parts for outcome in part.outcomes],
    )


def _one(batch: RecordBatch) -> Packed:
    ids = batch.column("token_ids")
    offsets = ids.offsets.to_numpy()
    first, last = int(offsets[0]), int(offsets[-1])
    rewards = batch.column("reward").to_numpy(zero_copy_only=False)
    return Packed(
        token_ids=_view(ids.values.to_numpy()[first:last]),
        sampled=_view(batch.column("sampled").flatten().to_numpy(zero_copy_only=False)),
        logprobs=_view(batch.column("logprobs").flatten().to_numpy()),
        versions=_view(versions(batch)),
        cu_seqlens=_view(offsets - first if first else offsets),
        rewards=_view(rewards.astype(np.float64, copy=False)),
        groups=_view(batch.column("group").to_numpy().astype(np.int64)),
        leases=_view(batch.column("lease").to_numpy().astype(np.int64)),
        outcomes=batch.column("outcome").to_pylist(),
    )


def _view(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():  # Arrow's memory is read-only, and nobody writes to it
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
