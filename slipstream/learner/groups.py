"""From a taken group to what may be trained on, and what became of the rest.

Invariant: every sampled token of every trajectory of a group ends in exactly one count of one Fate: trained, masked as
stale, masked for mismatch, zero signal, discarded as stale, or failed.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from slipstream.config import OutcomesSection
from slipstream.learner.packing import segment_sum
from slipstream.queue import Packed, packed
from slipstream.queue.messages import Fate
from slipstream.staleness import Gate


class Candidate(msgspec.Struct):
    """A group worth training on. `trainable` bool [T]: sampled, of a trajectory whose outcome trains, and fresh."""

    group: int
    packed: Packed
    trains: Tensor  # bool [N]: by the outcome policy, and scored
    trainable: Tensor  # bool [T]


class Dropped(msgspec.Struct):
    """A group that is out of the batch, with the reason and its fates."""

    group: int
    reason: str  # "zero_signal" | "discarded_stale"
    fates: list[Fate]
    pass_rate: float


def judge(
    group: int, batches: Sequence[Any], outcomes: OutcomesSection, gate: Gate, version: int
) -> Candidate | Dropped:
    """Dynamic sampling and the cutoff, for the step that follows learner version `version`.

    Scored members count in the baseline even when their outcome is masked; a group has signal when their rewards
    differ, among at least two.
    """
    data = packed(batches)
    scored = ~data.rewards.isnan()
    trains = scored & torch.tensor([getattr(outcomes, outcome) == "train" for outcome in data.outcomes])
    fresh = data.versions >= version - gate.cutoff
    of_token = torch.repeat_interleave(trains, (data.cu_seqlens[1:] - data.cu_seqlens[:-1]).long())
    candidate = Candidate(group, data, trains, data.sampled & of_token & fresh)
    rewards = data.rewards[scored]
    if len(rewards) < 2 or bool((rewards == rewards[0]).all()) or not bool(trains.any()):
        return _dropped(candidate, "zero_signal")
    if not bool(candidate.trainable.any()):
        return _dropped(candidate, "discarded_stale")
    return candidate


def _dropped(candidate: Candidate, reason: str) -> Dropped:
    data = candidate.packed
    counts = segment_sum(data.sampled.long(), data.cu_seqlens).tolist()
    fates = [
        Fate(lease=lease, outcome=outcome, **{reason if trains else "failed": count})
        for lease, outcome, trains, count in zip(
            data.leases.tolist(), data.outcomes, candidate.trains.tolist(), counts, strict=True
        )
    ]
    scored = data.rewards[~data.rewards.isnan()]
    return Dropped(candidate.group, reason, fates, float((scored >= 1).double().mean()) if len(scored) else 0.0)


def fates_of(candidate: Candidate, keep: Tensor) -> list[Fate]:
    """After the step: `keep` bool [T] is what entered the loss."""
    data, bounds = candidate.packed, candidate.packed.cu_seqlens
    sampled = segment_sum(data.sampled.long(), bounds).tolist()
    trainable = segment_sum(candidate.trainable.long(), bounds).tolist()
    kept = segment_sum((candidate.trainable & keep).long(), bounds).tolist()
    fates: list[Fate] = []
    for index, trains in enumerate(candidate.trains.tolist()):
        fate = Fate(lease=int(data.leases[index]), outcome=data.outcomes[index])
        if trains:
            fate.trained = kept[index]
            fate.masked_mismatch = trainable[index] - kept[index]
            fate.masked_stale = sampled[index] - trainable[index]
        else:
            fate.failed = sampled[index]
        fates.append(fate)
    return fates
