"""Charts as SVG text: bars and lines, drawn by hand so that a picture needs no library and opens anywhere.

Invariant: a chart's axes start at 0, and every value that is drawn can be read as text too (a title on its mark).
"""

from collections.abc import Sequence
from xml.sax.saxutils import escape

import msgspec

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 460, 280, 56, 48, 40
COLOURS = ("#1f6feb", "#c2410c", "#15803d", "#7c3aed")


class Bars(msgspec.Struct, frozen=True):
    title: str
    unit: str  # of the heights
    labels: list[str]
    heights: list[float]
    colour: int = 0


class Line(msgspec.Struct, frozen=True):
    name: str
    ys: list[float]


class Lines(msgspec.Struct, frozen=True):
    title: str
    unit: str
    across: str  # what x is
    xs: list[float]
    lines: list[Line]
    mark: float | None = None  # an x worth a vertical line
    colour: int = 0


def picture(charts: Sequence[Bars | Lines]) -> str:
    """The charts side by side."""
    drawn = [
        f'<g transform="translate({index * WIDTH},0)">{_bars(chart) if isinstance(chart, Bars) else _lines(chart)}</g>'
        for index, chart in enumerate(charts)
    ]
    size = f'width="{WIDTH * len(charts)}" height="{HEIGHT}" viewBox="0 0 {WIDTH * len(charts)} {HEIGHT}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(drawn)}</svg>\n'
    )


def _bars(chart: Bars) -> str:
    top = max(chart.heights, default=0.0) or 1.0
    step = (WIDTH - LEFT - 16) / max(1, len(chart.labels))
    every = -(-len(chart.labels) // 12)
    marks: list[str] = []
    for index, (label, height) in enumerate(zip(chart.labels, chart.heights, strict=True)):
        x, y = LEFT + index * step, _y(height, top)
        marks.append(
            f'<rect x="{x + step * 0.1:.1f}" y="{y:.1f}" width="{step * 0.8:.1f}" height="{HEIGHT - BOTTOM - y:.1f}" '
            f'fill="{COLOURS[chart.colour]}"><title>{escape(label)}: {height:.4g} {escape(chart.unit)}</title></rect>'
        )
        if index % every == 0:
            marks.append(_text(x + step / 2, HEIGHT - BOTTOM + 16, label, "middle"))
    return _frame(chart.title, chart.unit, top) + "".join(marks)


def _lines(chart: Lines) -> str:
    top = max((y for line in chart.lines for y in line.ys), default=0.0) or 1.0
    most = max(chart.xs) or 1.0

    def at(x: float) -> float:
        return LEFT + (WIDTH - LEFT - 24) * x / most

    marks = [_text(at(x), HEIGHT - BOTTOM + 16, f"{x:g}", "middle") for x in chart.xs]
    marks.append(_text((LEFT + WIDTH) / 2, HEIGHT - 12, chart.across, "middle"))
    if chart.mark is not None:
        marks.append(
            f'<line x1="{at(chart.mark):.1f}" x2="{at(chart.mark):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" '
            f'stroke="#57606a" stroke-dasharray="4 3"><title>{chart.mark:g}</title></line>'
        )
    for index, line in enumerate(chart.lines, chart.colour):
        colour = COLOURS[index % len(COLOURS)]
        points = [(at(x), _y(y, top)) for x, y in zip(chart.xs, line.ys, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        marks.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (x, y), value, across in zip(points, line.ys, chart.xs, strict=True):
            said = f"{escape(line.name)} at {across:g}: {value:.4g} {escape(chart.unit)}"
            marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"><title>{said}</title></circle>')
        if len(chart.lines) > 1:
            below = TOP + 14 + 16 * (index - chart.colour)
            marks.append(f'<g fill="{colour}">{_text(WIDTH - 24, below, line.name, "end", "inherit")}</g>')
    return _frame(chart.title, chart.unit, top) + "".join(marks)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / top


def _frame(title: str, unit: str, top: float) -> str:
    ticks = "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - 16}" y1="{_y(value, top):.1f}" y2="{_y(value, top):.1f}" stroke="#d0d7de"/>'
        + _text(LEFT - 6, _y(value, top) + 4, f"{value:.3g}", "end")
        for value in (0.0, top / 2, top)
    )
    return f'<g font-weight="bold">{_text(LEFT, 18, title, "start")}</g>{_text(LEFT, 34, unit, "start")}{ticks}'


def _text(x: float, y: float, text: str, anchor: str, fill: str = "#24292f") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'
