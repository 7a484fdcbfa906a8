"""Trajectories on their way into a step: what a forward pass needs of them, packed, and cut into micro-batches.

Invariant: only trajectories with a token to train on are here, each whole. Where a stream is cut depends on the order
of its trajectories alone, and not on when they came: the same groups in the same order are the same micro-batches.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.learner.groups import Candidate
from slipstream.learner.packing import lengths_of, segment_sum


class Micro(NamedTuple):
    token_ids: Tensor  # int32 [T]
    trainable: Tensor  # bool [T]
    rollout: Tensor  # float32 [T]: log-probs sampled with
    versions: Tensor  # int32 [T]
    advantages: Tensor  # float64 [T]
    reference: Tensor  # float [T]: log-probs of the start model; empty where it has no part in the loss
    cu_seqlens: Tensor  # int32 [N+1]: of trajectories, which a correction or a mean is over
    branches: Tensor  # int32 [B+1]: of what attention sees as one; a trajectory has one or more

    def to(self, device: torch.device) -> "Micro":
        return Micro(*(tensor.to(device) for tensor in self))


def present(candidate: Candidate) -> tuple[Tensor, Tensor]:
    """Which of a group's trajectories [N], and so which of its tokens [T], are forwarded."""
    bounds = candidate.packed.cu_seqlens
    trajectories = segment_sum(candidate.trainable.long(), bounds) > 0
    return trajectories, torch.repeat_interleave(trajectories, lengths_of(bounds))


def micro_of(candidate: Candidate, advantages: Tensor, reference: Tensor) -> Micro:
    """advantages float64 [N] and reference float [T] (or empty) of the whole group."""
    data = candidate.packed
    trajectories, tokens = present(candidate)
    lengths = lengths_of(data.cu_seqlens)[trajectories]
    there = tokens[data.branches[:-1].clamp(max=len(tokens) - 1).long()] & (lengths_of(data.branches) > 0)
    return Micro(
        token_ids=data.token_ids[tokens],
        trainable=candidate.trainable[tokens],
        rollout=data.logprobs[tokens],
        versions=data.versions[tokens],
        advantages=torch.repeat_interleave(advantages[trajectories], lengths),
        reference=reference[tokens] if len(reference) else reference,
        cu_seqlens=bounds_of(lengths),
        branches=bounds_of(lengths_of(data.branches)[there]),
    )


def joined(parts: list[Micro]) -> Micro:
    *tensors, bounds, branches = zip(*parts, strict=True)
    lengths, of_branches = (torch.cat([lengths_of(each) for each in several]) for several in (bounds, branches))
    return Micro(*map(torch.cat, tensors), cu_seqlens=bounds_of(lengths), branches=bounds_of(of_branches))


def bounds_of(lengths: Tensor) -> Tensor:
    """cu_seqlens int32 [N+1] of lengths [N]."""
    return torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).to(torch.int32)])


def split(cu_seqlens: Tensor, budget: int) -> list[tuple[int, int]]:
    """Ranges of whole trajectories, all branches of each, of at most `budget` tokens; a longer trajectory is alone."""
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


def pieces(whole: Micro, budget: int) -> list[Micro]:
    """`whole`, cut by `split`."""
    found: list[Micro] = []
    for start, end in split(whole.cu_seqlens, budget):
        first, last = int(whole.cu_seqlens[start]), int(whole.cu_seqlens[end])
        inside = whole.branches[(whole.branches >= first) & (whole.branches <= last)] - first
        bounds = {"cu_seqlens": whole.cu_seqlens[start : end + 1] - first, "branches": inside}
        tensors = {name: tensor[first:last] for name, tensor in whole._asdict().items() if name not in bounds}
        found.append(Micro(**tensors, **bounds))
    return found


class Stream:
    """Groups in, micro-batches out as soon as it is certain what belongs to them."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._open: Micro | None = None

    def add(self, micro: Micro) -> list[Micro]:
        """Those that nothing can be added to any more."""
        whole = micro if self._open is None else joined([self._open, micro])
        *full, self._open = pieces(whole, self._budget)
        return full

    def rest(self) -> list[Micro]:
        last, self._open = self._open, None
        return [] if last is None else [last]
