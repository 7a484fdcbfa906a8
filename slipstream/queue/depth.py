"""How far generation may run ahead: as configured, or as the autopilot moves it.

Invariant: the depth that counts is the last `DepthMoved` of the ledger; a queue that is started again goes on with it.
"""

import logging

import msgspec

from slipstream.config import Config
from slipstream.queue.events import DepthMoved
from slipstream.queue.messages import StepPace
from slipstream.staleness import Autopilot, Gate, StepSeen

log = logging.getLogger(__name__)


class Depth:
    def __init__(self, config: Config, moved: float | None) -> None:
        """`moved`: to where the autopilot did before."""
        limits = config.staleness
        self._autopilot = None
        depth = limits.start_depth
        if limits.depth == "auto":
            self._autopilot = Autopilot(least=limits.auto_min, most=limits.auto_max, ess_floor=limits.auto_ess)
            depth = depth if moved is None else moved
        self.gate = Gate(config.learner.batch, depth, limits.cutoff)
        self.refused = False  # somebody who asked for a lease was held back by the gate since the last version

    def after(self, step: StepPace) -> DepthMoved | None:
        """What a step leads to; it is in force at once."""
        if self._autopilot is None:
            return None
        seen = StepSeen(waited=step.waited, refused=self.refused, ess=step.ess)
        self.refused = False
        before = self.gate.depth
        move = self._autopilot.step(before, seen)
        if move is None:
            return None
        log.info("staleness.depth = auto: %g -> %g, because %s", before, move.depth, move.why)
        self.gate = msgspec.structs.replace(self.gate, depth=move.depth)
        return DepthMoved(move.depth, move.why)
