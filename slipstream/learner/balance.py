"""Trajectories of a micro-batch, dealt out to ranks so that each has about as much to compute.

Invariant: every trajectory is in exactly one bin, whole; which one depends on lengths alone. All ranks run the same
number of bins: some may be empty.
"""

import heapq

import torch
from torch import Tensor

from slipstream.learner.micro import Micro, bounds_of
from slipstream.learner.packing import lengths_of


def costs_of(micro: Micro, square: float) -> list[float]:
    """Of each trajectory, in tokens: what grows with its length, and attention, with the square of each branch's.

    `square` is what a token's attention to one earlier token costs, by what all the rest of it costs.
    """
    lengths = lengths_of(micro.branches).double()
    costs = torch.zeros(len(micro.cu_seqlens) - 1, dtype=torch.float64)
    there = lengths > 0
    return costs.index_add(0, _owners(micro)[there], (lengths + square * lengths**2)[there]).tolist()


def _owners(micro: Micro) -> Tensor:
    """int64 [B]: the trajectory of each branch; of an empty branch, any."""
    return torch.searchsorted(micro.cu_seqlens[1:].contiguous(), micro.branches[:-1].contiguous(), right=True)


def deal(lengths: list[int], costs: list[float], ranks: int, budget: int) -> list[list[int]]:
    """Indices of trajectories by bin; a multiple of `ranks` bins, the i-th of them for rank i % ranks.

    As few bins as hold at most `budget` tokens each (a longer trajectory is alone in its own), the costliest trajectory
    first into the bin that has least: at most 4/3 of the best there is (Graham 1969), where the budget does not bind.
    """
    rounds = max(1, -(-sum(lengths) // (ranks * budget)))
    while True:
        bins = _dealt(costs, ranks * rounds)
        full = [sum(lengths[index] for index in each) > budget and len(each) > 1 for each in bins]
        if not any(full):  # at the latest when each is alone
            return bins
        rounds += 1


def _dealt(costs: list[float], number: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(number)]
    least = [(0.0, place) for place in range(number)]
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        sofar, place = heapq.heappop(least)
        bins[place].append(index)
        heapq.heappush(least, (sofar + costs[index], place))
    return [sorted(each) for each in bins]  # in their order: members of a group share their prompt


def chosen(micro: Micro, trajectories: list[int]) -> tuple[Micro, Tensor]:
    """These of its trajectories, and where their tokens stand in it: int64 [T]."""
    none = torch.zeros(0, dtype=torch.long)
    starts = micro.cu_seqlens.tolist()
    at = torch.cat([torch.arange(starts[index], starts[index + 1]) for index in trajectories] or [none])
    lengths, owners = lengths_of(micro.branches), _owners(micro)
    bounds = {
        "cu_seqlens": bounds_of(lengths_of(micro.cu_seqlens)[torch.tensor(trajectories, dtype=torch.long)]),
        "branches": bounds_of(torch.cat([lengths[owners == index] for index in trajectories] or [none])),
    }
    tensors = {name: tensor for name, tensor in micro._asdict().items() if name not in bounds}
    return Micro(**{name: tensor[at] if len(tensor) else tensor for name, tensor in tensors.items()}, **bounds), at
