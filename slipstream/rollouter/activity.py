"""What a rollouter's trajectories are at, and so what its time goes to.

Invariant: a trajectory is in exactly one Stage from its lease to its end, set where it changes; the part of the clock
follows from the stages and from what the engine counts, and is never guessed.
"""

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

import msgspec


class Stage(StrEnum):
    """The value completes "N of M trajectories ..."."""

    WEIGHTS = "wait for weights that their lease asks for"
    AGENT = "are in the agent's code or its rewards"  # or in the engine, which counts those itself
    TOOLS = "wait for tools"
    DELIVERY = "wait for the queue to take them"


class Part(msgspec.Struct, frozen=True):
    """Of the clock."""

    name: str
    why: str = ""


NAMES = (
    (Stage.TOOLS, "waiting for tools"),
    (Stage.WEIGHTS, "waiting for weights"),
    (Stage.AGENT, "agents and rewards"),
    (Stage.DELIVERY, "delivering"),
)


def part(stages: Iterable[Stage], *, started: bool, loading: bool, in_engine: int, no_lease: str) -> Part:
    """The engine comes first: it is what must be kept busy. Where it idles, the first of NAMES that holds anything up.

    `no_lease`: why there is none, where that is it.
    """
    if not started:
        return Part("starting", "the first weights")
    if loading:
        return Part("paused for weights")
    if in_engine:
        return Part("generating")
    counts = Counter(stages)
    for stage, name in NAMES:
        if counts[stage]:
            return Part(name, f"{counts[stage]} of {counts.total()} trajectories {stage}")
    return Part("no lease", no_lease)
