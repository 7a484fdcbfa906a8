"""Which ready groups the learner gets next: policies behind one small protocol.

Invariant: a policy only chooses the order, and loses nothing: whatever is ready comes out in the end. Groups that are
handed out again after a learner's crash are not its business; they go first, in the order they had.
"""

import heapq
import math
from typing import Literal, Protocol

from slipstream.queue.state import LedgerState

WINDOW = 0.3  # of the groups that may be ahead: how far a quick one may overtake the oldest


class Selection(Protocol):
    def select(self, state: LedgerState, ready: list[int], room: int) -> list[int]:
        """Up to `room` of `ready`, which are in the order they became complete."""
        ...


class Fifo:
    """As they became complete: never waits, so quick tasks come first."""

    def select(self, state: LedgerState, ready: list[int], room: int) -> list[int]:
        return ready[:room]


class Window:
    """As they became complete, but none that was opened more than a window's width after the oldest one that is not
    taken yet: batches stay near the tasks' own mixture, and the learner waits for a straggler (windowed FIFO, as
    MiniMax describes it for Forge, 2026)."""

    def __init__(self, ahead: int) -> None:
        self._width = max(1, math.ceil(WINDOW * ahead))

    def select(self, state: LedgerState, ready: list[int], room: int) -> list[int]:
        if state.draining:  # an open group may stay so; nothing waits for it
            return ready[:room]
        chosen, left, being_made = list[int](), list(ready), state.oldest_open()
        while left and len(chosen) < room:
            end = min(being_made, *left) + self._width
            following = next((group for group in left if group < end), None)
            if following is None:
                break
            left.remove(following)
            chosen.append(following)
        return chosen


class Oldest:
    """The group with the oldest token first: less is masked as stale when the learner is behind."""

    def select(self, state: LedgerState, ready: list[int], room: int) -> list[int]:
        return heapq.nsmallest(room, ready, key=lambda group: state.groups[group].oldest_version())


def selection(name: Literal["fifo", "window", "oldest"], ahead: int) -> Selection:
    """`ahead`: how many groups the gate lets in before the learner has made a step."""
    return {"fifo": Fifo(), "window": Window(ahead), "oldest": Oldest()}[name]
