"""Which ready groups the learner gets next: policies behind one small protocol.

Invariant: a policy only chooses the order, and loses nothing: whatever is ready comes out in the end. Groups that are
handed out again after a learner's crash are not its business; they go first, in the order they had.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol

from slipstream.queue.state import LedgerState
from slipstream.queue.tasks import TaskOrder

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


class Fair:
    """The datasets of `tasks.train` in turn, each in the share that it has of the tasks, so that one whose tasks are
    quick, or that has many groups waiting, takes nothing from the others. One that has no group ready is passed over.

    Deficit round-robin (Shreedhar and Varghese, 1996), a group being a packet of size 1. Deficits are below one group
    each, and are begun anew by a queue that is started again.
    """

    def __init__(self, shares: dict[str, float], source: Callable[[str], str]) -> None:
        """`source`: of a task's id."""
        self._quantum = {name: share / max(shares.values()) for name, share in shares.items()}
        self._source = source
        self._ring = deque(shares)
        self._deficit = dict.fromkeys(shares, 0.0)
        self._arrived = True  # at the first of the ring, which has its quantum yet to come

    def select(self, state: LedgerState, ready: list[int], room: int) -> list[int]:
        waiting: dict[str, deque[int]] = {name: deque() for name in self._ring}
        for group in ready:
            waiting[self._source(state.groups[group].task)].append(group)
        chosen: list[int] = []
        while len(chosen) < min(room, len(ready)):
            name = self._ring[0]
            if self._arrived and waiting[name]:
                self._deficit[name] += self._quantum[name]
            self._arrived = False
            if waiting[name] and self._deficit[name] > 1 - 1e-9:
                self._deficit[name] -= 1
                chosen.append(waiting[name].popleft())
            else:
                if not waiting[name]:
                    self._deficit[name] = 0.0
                self._ring.rotate(-1)
                self._arrived = True
        return chosen


def selection(name: Literal["fifo", "window", "oldest", "fair"], ahead: int, order: TaskOrder) -> Selection:
    """`ahead`: how many groups the gate lets in before the learner has made a step."""
    if name == "fair":
        return Fair(order.shares(), order.source)
    return {"fifo": Fifo(), "window": Window(ahead), "oldest": Oldest()}[name]
