"""The staleness gate: how many groups may be opened now, and which tokens are too old to train on.

Invariant: as long as groups are opened only while `capacity` is at least 1, accepted + running never exceeds
floor((depth + version + 1) * batch): generation is at most `depth` batches ahead of the batch being trained.
When `depth` is lowered (by the autopilot), what is open already stays; nothing new is opened until there is room again.
Depth sets the mean staleness (Little's law), the cutoff bounds the worst (AReaL 2025 for the capacity rule).
"""

import math

import msgspec

# Depth is a decimal fraction: 0.1 * 30 must be 3, not 2.9999999999999996.
ROUNDING = 1e-9


class Gate(msgspec.Struct, frozen=True):
    """Counts are in groups. `depth` in batches, may be fractional; `cutoff` in versions."""

    batch: int
    depth: float
    cutoff: int
    max_running: int | None = None

    def limit(self, version: int) -> int:
        """Groups that may have been opened in all, refunded ones aside, while the learner is at `version`."""
        # The whole part apart: added to a large version, the fraction would lose its last digits.
        return (version + 1) * self.batch + math.floor(self.depth * self.batch + ROUNDING)

    def capacity(self, version: int, accepted: int, running: int) -> int:
        """Groups that may be opened now; negative when there are more than the gate would let in."""
        room = self.limit(version) - accepted - running
        return room if self.max_running is None else min(self.max_running - running, room)

    def fresh(self, token_version: int, learner_version: int) -> bool:
        """Whether a token of that version may enter the loss of the step after `learner_version`."""
        return learner_version - token_version <= self.cutoff

    def min_version(self, version: int) -> int:
        """The oldest weights on which a trajectory may start now: with depth 0 the current ones, nothing older."""
        return max(0, version - math.floor(self.depth + ROUNDING))
