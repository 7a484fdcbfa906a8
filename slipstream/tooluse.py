"""How often each tool was called, how often in vain, and how long calls took.

Invariant: what several processes counted adds up to what one would have counted. A time is known to within a tenth.
It lives beside the rooms, because the tools count, the queue carries it, and learner and supervisor read it.
"""

import math
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

SHORTEST = 1e-6  # seconds; of the first bucket
STEP = 1.2  # from one bucket's end to the next's
LAST = 127  # its bucket begins at three hours

Count = Annotated[int, Meta(ge=0, lt=1 << 40)]
Bucket = Annotated[int, Meta(ge=0, le=LAST)]


class ToolUse(msgspec.Struct, kw_only=True):
    """Of one tool, since its process started."""

    name: Annotated[str, Meta(max_length=200)]
    calls: Count = 0
    errors: Count = 0  # of those: refused for their arguments, ended in an error, failed, or given up
    seconds: dict[Bucket, Count] = msgspec.field(default_factory=dict)  # calls by how long they took

    def add(self, seconds: float, *, error: bool) -> None:
        """One call, with all its retries; waiting for its turn does not count."""
        self.calls += 1
        self.errors += error
        bucket = min(LAST, max(0, math.ceil(math.log(max(seconds, SHORTEST) / SHORTEST, STEP))))
        self.seconds[bucket] = self.seconds.get(bucket, 0) + 1

    def refuse(self) -> None:
        """One call that was not run: its arguments were wrong."""
        self.calls += 1
        self.errors += 1

    def quantile(self, share: float) -> float:
        """Seconds that this share of the calls that ran took at most; NaN before the first.

        >>> use = ToolUse(name="search")
        >>> for seconds in (0.1, 0.1, 0.1, 9.0):
        ...     use.add(seconds, error=False)
        >>> 0.09 < use.quantile(0.5) < 0.11, 8.1 < use.quantile(0.99) < 9.9
        (True, True)
        """
        wanted = math.ceil(share * sum(self.seconds.values()))
        counted = 0
        for bucket in sorted(self.seconds):
            counted += self.seconds[bucket]
            if counted >= wanted:
                return SHORTEST * STEP ** (bucket - 0.5)
        return math.nan


def together(uses: Iterable[ToolUse]) -> list[ToolUse]:
    """One for each tool, by name."""
    sums: dict[str, ToolUse] = {}
    for use in uses:
        into = sums.setdefault(use.name, ToolUse(name=use.name))
        into.calls += use.calls
        into.errors += use.errors
        for bucket, count in use.seconds.items():
            into.seconds[bucket] = into.seconds.get(bucket, 0) + count
    return [sums[name] for name in sorted(sums)]
