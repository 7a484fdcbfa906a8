"""What a chart shows, apart from how it is drawn.

Invariant: all series of a figure are as long as its `xs`; None is what was not measured, and is drawn as a gap.
"""

from typing import Literal

import msgspec

Values = list[float | None]


class Series(msgspec.Struct, frozen=True):
    name: str
    ys: Values
    colour: int = 0  # of the page's palette


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """`xs` are what the reader sees under the cursor: "step 12", "finished". Ticks are drawn at `ticks`, which are
    (index into xs, text)."""

    key: str  # its name in the page, for tests and links
    title: str
    says: str  # what it is, and in which unit; one line
    kind: Literal["line", "stack", "bars"]
    xs: list[str]
    ticks: list[tuple[int, str]]
    series: list[Series]
    x: str = ""  # what xs are
    share: bool = False  # ys are shares, shown as per cent; the axis ends at 100%
    empty: str = "nothing was measured yet"  # what is said when there is no value at all

    @property
    def has_data(self) -> bool:
        return any(value is not None for series in self.series for value in series.ys)

    @property
    def legend(self) -> list[Series]:
        """Empty when the title says it all."""
        said = len(self.series) == 1 and self.series[0].name in self.title.lower()
        return [] if said else self.series


class Heat(msgspec.Struct, frozen=True, kw_only=True):
    """`cells[row][column]`: share, 0 to 1. Row 0 is drawn at the bottom."""

    key: str
    title: str
    says: str
    x: str
    xs: list[str]
    ticks: list[tuple[int, str]]
    rows: list[str]
    cells: list[list[float]]
    empty: str = "nothing was measured yet"

    @property
    def legend(self) -> list[Series]:
        return []

    @property
    def has_data(self) -> bool:
        return any(value > 0 for row in self.cells for value in row)


Chart = Figure | Heat


class Section(msgspec.Struct, frozen=True):
    title: str
    charts: list[Chart]


def few_ticks(labels: list[str], most: int = 6) -> list[tuple[int, str]]:
    """Some of the labels, evenly, the first one included.

    >>> few_ticks(["1", "2", "3", "4", "5"], 3)
    [(0, '1'), (2, '3'), (4, '5')]
    """
    every = max(1, -(-(len(labels) - 1) // max(1, most - 1)))
    return [(index, label) for index, label in enumerate(labels) if index % every == 0]
