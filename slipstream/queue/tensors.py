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

from slipstream.queue.wire import RecordBatch, bits, branch_begins, flat, versions


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
    branches: Tensor  # int32 [B+1]: cu_seqlens, cut further where a trajectory has several branches


def packed(batch: RecordBatch | Sequence[RecordBatch]) -> Packed:
    """Tensors over one record batch, or over several as if they were one."""
    parts: list[RecordBatch] = [batch] if isinstance(batch, pa.RecordBatch) else list(batch)
    ids, logprobs = (_values(parts, name) for name in ("token_ids", "logprobs"))
    bounds = _bounds(parts)
    return Packed(
        token_ids=_view(ids),
        sampled=_view(_joined([bits(part.column("sampled")).view(np.bool_) for part in parts])),
        logprobs=_view(logprobs),
        versions=_view(_joined([versions(part) for part in parts])),
        cu_seqlens=_view(bounds),
        rewards=_view(_joined([_rewards(part) for part in parts])),
        groups=_view(_joined([part.column("group").to_numpy().astype(np.int64) for part in parts])),
        leases=_view(_joined([part.column("lease").to_numpy().astype(np.int64) for part in parts])),
        outcomes=[outcome for part in parts for outcome in part.column("outcome").to_pylist()],
        branches=_view(_branches(parts, bounds)),
    )


def _values(parts: list[RecordBatch], name: str) -> np.ndarray:
    return _joined([flat(part.column(name)).to_numpy() for part in parts])


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _bounds(parts: list[RecordBatch]) -> np.ndarray:
    """cu_seqlens; of one batch, the very offsets."""
    offsets = [part.column("token_ids").offsets.to_numpy() for part in parts]
    if len(offsets) == 1 and not offsets[0][0]:
        return offsets[0]
    lengths = np.concatenate([np.diff(each) for each in offsets])
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _branches(parts: list[RecordBatch], bounds: np.ndarray) -> np.ndarray:
    """`bounds` itself where every trajectory is one branch."""
    before = bounds[np.cumsum([0, *(part.num_rows for part in parts)])]
    begins = [branch_begins(part) + first for part, first in zip(parts, before[:-1], strict=True)]
    return np.sort(np.concatenate([bounds, *begins])).astype(np.int32) if any(map(len, begins)) else bounds


def _rewards(part: RecordBatch) -> np.ndarray:
    return part.column("reward").to_numpy(zero_copy_only=False).astype(np.float64, copy=False)


def _view(array: np.ndarray) -> Tensor:
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():  # Arrow's memory is read-only, and nobody writes to it
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
