"""Errors of trajectories in the rollouter's log: the first of each kind in full, the others counted.

Invariant: no trajectory fails, is shown a tool's error or comes too late without a line or a count of its kind; a
fault that hits all of them fills no disk.
"""

import logging
import re
from collections import Counter

import msgspec

from slipstream.trajectory import Outcome, Trajectory, TrajectoryDetail

log = logging.getLogger(__name__)

FAILED = frozenset(Outcome) - {Outcome.FINISHED, Outcome.TRUNCATED_TOKENS, Outcome.TRUNCATED_TURNS}
MOST_KINDS = 50  # errors that name something new each time come to "other errors" after these
LATE = "not taken by the queue"
TOOL_ERROR = "Error: "  # how a tool's result begins where the model is shown an error

_detail = msgspec.json.Decoder(TrajectoryDetail)


class Failures:
    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def see(self, trajectory: Trajectory) -> None:
        """Log, or count, what went wrong in one that ended."""
        if trajectory.outcome in FAILED:
            error = _read(trajectory).error.strip() or "no more is known"
            self._add(logging.WARNING, trajectory, f"{trajectory.outcome}: {kind_of(error)}", error)
        elif trajectory.tool_errors:
            for message in _read(trajectory).messages:
                text = message.get("content")
                if message.get("role") == "tool" and isinstance(text, str) and text.startswith(TOOL_ERROR):
                    # Without a name it was no call at all; there are as many ways to misspell one as there are turns.
                    name = message.get("name")
                    kind = f"tool {name}: {kind_of(text)}" if name else "a call that cannot be read"
                    self._add(logging.INFO, trajectory, kind, text)

    def late(self, trajectory: Trajectory) -> None:
        """The queue expected it no more."""
        why = "its lease had ended (queue.lease_seconds), or an earlier delivery of it had arrived"
        self._add(logging.WARNING, trajectory, LATE, f"{why}; {sum(trajectory.sampled)} tokens")

    def totals(self) -> str:
        """All kinds with their counts, the most frequent first; '' for none."""
        return "; ".join(f"{count} x {kind}" for kind, count in self._counts.most_common())

    def _add(self, level: int, trajectory: Trajectory, kind: str, error: str) -> None:
        what = kind.partition(":")[0]
        if kind not in self._counts and len(self._counts) >= MOST_KINDS:
            kind = f"{what}: other errors"
        self._counts[kind] += 1
        count = self._counts[kind]
        if count == 1:
            where = f"lease {trajectory.lease}, task {trajectory.task}, attempt {trajectory.attempt}"
            log.log(level, "%s: %s: %s", where, what, error)
        elif re.fullmatch("10+", str(count)):
            log.log(level, "%d times so far: %s", count, kind)


def kind_of(error: str) -> str:
    """The last line, which names the exception, with all its numbers alike."""
    last = error.strip().splitlines()[-1]
    return re.sub(r"\d+", "#", last)[:200]


def _read(trajectory: Trajectory) -> TrajectoryDetail:
    return _detail.decode(trajectory.detail) if trajectory.detail else TrajectoryDetail()
