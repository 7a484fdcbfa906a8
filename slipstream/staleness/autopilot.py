"""`staleness.depth = "auto"`: the least depth at which the learner does not wait.

Invariant: depth stays within its bounds, moves at most once in `WINDOW` steps, and goes up only when waiting could be
helped by it: the gate had refused leases. While the effective sample size is under its floor it only goes down.
An additive-increase rule with memory: a depth at which the learner waited is not tried again for `MEMORY` steps, so
that a steady run comes to rest instead of going up and down.
"""

import msgspec

WINDOW = 5  # steps that are looked at between two moves
MEMORY = 60  # steps for which a depth that was too small counts as such
WAITING = 0.05  # share of the learner's time; less is not worth older tokens
LEAST_MOVE = 0.25  # batches
UP, DOWN, BACK_OFF = 0.25, 0.1, 0.3  # of the depth


class StepSeen(msgspec.Struct, frozen=True):
    """Of one step."""

    waited: float  # share of its time in which the learner waited for data
    refused: bool  # the gate refused leases meanwhile
    ess: float | None  # of its correction weights; None: not measured


class Move(msgspec.Struct, frozen=True):
    depth: float
    why: str


class Autopilot:
    """Call `step` once a step with the depth as it is; what it returns is the depth from there on.

    >>> pilot = Autopilot(least=0, most=8, ess_floor=0.5)
    >>> [pilot.step(1.0, StepSeen(waited=0.4, refused=True, ess=1.0)) for _ in range(5)][-1].depth
    1.25
    """

    def __init__(self, *, least: float, most: float, ess_floor: float) -> None:
        self._least, self._most, self._floor = least, most, ess_floor
        self._seen: list[StepSeen] = []
        self._too_small: dict[float, int] = {}  # depth -> step at which the learner waited with it
        self._step = 0

    def step(self, depth: float, seen: StepSeen) -> Move | None:
        self._step += 1
        self._seen.append(seen)
        if len(self._seen) < WINDOW:
            return None
        window, self._seen = self._seen, []
        self._too_small = {small: at for small, at in self._too_small.items() if self._step - at < MEMORY}
        target, why = self._aim(depth, window)
        target = round(min(self._most, max(self._least, target)), 3)
        return Move(target, why) if target != depth else None

    def _aim(self, depth: float, window: list[StepSeen]) -> tuple[float, str]:
        measured = [seen.ess for seen in window if seen.ess is not None]
        ess = sum(measured) / len(measured) if measured else 1.0
        if ess < self._floor:
            return depth - max(LEAST_MOVE, BACK_OFF * depth), f"is/ess is {ess:.2f}, under {self._floor:g}"
        waited = sum(seen.waited for seen in window) / len(window)
        refused = sum(seen.refused for seen in window) / len(window)
        if waited > WAITING and refused > 0.5:
            self._too_small[depth] = self._step
            return (
                depth + max(LEAST_MOVE, UP * depth),
                f"the learner waited {waited:.0%} of the time while the gate refused leases",
            )
        lower = depth - max(LEAST_MOVE, DOWN * depth)
        if lower <= max(self._too_small, default=-1.0):
            return depth, ""
        reason = "the gate held nobody back" if refused <= 0.5 else f"the learner waited only {waited:.0%} of the time"
        return lower, f"{reason}: younger tokens may cost nothing"
