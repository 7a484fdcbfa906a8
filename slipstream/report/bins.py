"""Bins for lengths and times, whose distributions have long tails.

Invariant: a bin's bounds are round, and every value is in exactly one bin; what is beyond the outermost
edges is in the bins next to them.
"""

from bisect import bisect_right
from collections.abc import Sequence

from slipstream.report.svg import short

EDGES = [factor * 10.0**power for power in range(-4, 8) for factor in (1, 1.5, 2, 3, 5, 7)]


class Bins:
    """The round edges that the values span.

    >>> Bins([3, 4, 9]).labels
    ['3 to 5', '5 to 7', '7 to 10']
    >>> Bins([3, 4, 9]).count([3, 3, 8])
    [2.0, 0.0, 1.0]
    """

    def __init__(self, values: Sequence[float]) -> None:
        low, high = min(values, default=1.0), max(values, default=1.0)
        first = min(max(0, bisect_right(EDGES, low) - 1), len(EDGES) - 2)
        self._edges = EDGES[first : max(first + 2, bisect_right(EDGES, high) + 1)]

    @property
    def labels(self) -> list[str]:
        return [f"{short(a)} to {short(b)}" for a, b in zip(self._edges, self._edges[1:], strict=False)]

    @property
    def lower(self) -> list[str]:
        return [short(edge) for edge in self._edges[:-1]]

    def count(self, values: Sequence[float]) -> list[float]:
        counts = [0.0] * (len(self._edges) - 1)
        for value in values:
            counts[min(max(0, bisect_right(self._edges, value) - 1), len(counts) - 1)] += 1
        return counts


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them are not over; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
