"""Arithmetic on version runs: how old a trajectory's sampled tokens are.

Invariant: only sampled tokens count (version >= 0); a token's staleness is the learner's version minus its own.
"""

from array import array
from collections.abc import Iterable

import msgspec

from slipstream.trajectory import VersionRun


class Staleness(msgspec.Struct, frozen=True):
    """Over the sampled tokens; 0 and 0 when there are none."""

    tokens: int
    mean: float
    max: int


def sampled_tokens(runs: Iterable[VersionRun]) -> int:
    return sum(run.length for run in runs if run.version >= 0)


def staleness(runs: Iterable[VersionRun], learner_version: int) -> Staleness:
    """How old the tokens are for a learner that is at `learner_version`."""
    tokens = total = oldest = 0
    for run in runs:
        if run.version < 0 or not run.length:
            continue
        age = learner_version - run.version
        oldest = max(oldest, age) if tokens else age
        tokens += run.length
        total += run.length * age
    return Staleness(tokens=tokens, mean=total / tokens if tokens else 0.0, max=oldest)


def over_cutoff(runs: Iterable[VersionRun], learner_version: int, cutoff: int) -> int:
    """How many sampled tokens are too old for the step that the learner at `learner_version` is making."""
    return sum(run.length for run in runs if run.version >= 0 and learner_version - run.version > cutoff)


def expand(runs: Iterable[VersionRun]) -> "array[int]":
    """The version of every token of the stream, -1 where not sampled: array('i')."""
    versions = array("i")
    for run in runs:
        versions.extend(array("i", [run.version]) * run.length)
    return versions
