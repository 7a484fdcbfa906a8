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
from slipstream.learner.packing import lengths_of, segment_sum
from slipstream.queue import Packed, packed
from slipstream.queue.messages import Fate
from slipstream.staleness import Gate


class Seen(msgspec.Struct, frozen=True):
    """What the metrics say of a group that was taken, whether it is trained on or not. One entry a trajectory."""

    rewards: list[float]  # of those that were scored
    parts: dict[str, list[float]]  # of the reward, by name
    lengths: list[int]
    turns: list[int]
    outcomes: list[str]

    def pass_rate(self) -> float:
        return sum(reward >= 1 for reward in self.rewards) / max(1, len(self.rewards))


class Candidate(msgspec.Struct):
    """A group worth training on."""

    group: int
    packed: Packed
    trains: Tensor  # bool [N]: by the outcome policy, and scored
    trainable: Tensor  # bool [T]: sampled, of a trajectory that trains, and fresh
    seen: Seen


class Dropped(msgspec.Struct):
    """A group that is out of the batch, with the reason and its fates."""

    group: int
    reason: str  # "zero_signal" | "discarded_stale"
    fates: list[Fate]
    seen: Seen


def judge(
    group: int, batches: Sequence[Any], outcomes: OutcomesSection, gate: Gate, version: int
) -> Candidate | Dropped:
    """Dynamic sampling and the cutoff, for the step that follows learner version `version`.

    Scored members count in the baseline even when their outcome is masked; a group has signal when their rewards
    differ, among at least two.
    """
    data = packed(batches)
    scored = is_scored(data)
    trains = scored & torch.tensor([getattr(outcomes, outcome) == "train" for outcome in data.outcomes])
    fresh = data.versions >= version - gate.cutoff  # `gate.fresh`, for all tokens at once
    of_token = torch.repeat_interleave(trains, lengths_of(data.cu_seqlens))
    candidate = Candidate(group, data, trains, data.sampled & of_token & fresh, _seen(batches, data))
    rewards = data.rewards[scored]
    if len(rewards) < 2 or bool((rewards == rewards[0]).all()) or not bool(trains.any()):
        return _dropped(candidate, "zero_signal")
    if not bool(candidate.trainable.any()):
        return _dropped(candidate, "discarded_stale")
    return candidate


def is_scored(data: Packed) -> Tensor:
    """bool [N]. An infinite reward is no score: it would leave nothing finite in its group."""
    return data.rewards.isfinite()


def _seen(batches: Sequence[Any], data: Packed) -> Seen:
    parts: dict[str, list[float]] = {}
    turns: list[int] = []
    for batch in batches:
        turns.extend(batch.column("turns").to_pylist())
        for row in batch.column("reward_parts").to_pylist():
            for name, value in row:
                parts.setdefault(name, []).append(value)
    return Seen(
        rewards=data.rewards[is_scored(data)].tolist(),
        parts=parts,
        lengths=lengths_of(data.cu_seqlens).tolist(),
        turns=turns,
        outcomes=data.outcomes,
    )


def _dropped(candidate: Candidate, reason: str) -> Dropped:
    data = candidate.packed
    counts = segment_sum(data.sampled.long(), data.cu_seqlens).tolist()
    fates = [
        Fate(lease=lease, outcome=outcome, **{reason if trains else "failed": count})
        for lease, outcome, trains, count in zip(
            data.leases.tolist(), data.outcomes, candidate.trains.tolist(), counts, strict=True
        )
    ]
    return Dropped(candidate.group, reason, fates, candidate.seen)


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
