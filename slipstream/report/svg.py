"""Figures as SVG text. Colours are classes of the page's style sheet, so that a chart follows light and dark.

Invariant: the value axis of shares, stacks and bars begins at 0; text that came from a run is escaped.
"""

import math
from html import escape
from itertools import accumulate

from slipstream.report.figure import Figure, Heat, Values

WIDTH, HEIGHT = 600, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 40
ACROSS, UP = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM


def drawn(chart: Figure | Heat) -> str:
    """An <svg> element without a size of its own: it is as wide as what holds it."""
    marks = _heat(chart) if isinstance(chart, Heat) else _figure(chart)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" aria-hidden="true">{marks}'
        f'<line class="cursor" y1="{TOP}" y2="{TOP + UP}"/></svg>'
    )


def left_edge(chart: Figure | Heat, index: int) -> float:
    """Where x number `index` is: the middle of its bar or cell, or its point on the line."""
    count = len(chart.xs)
    if isinstance(chart, Figure) and chart.kind != "bars":
        return LEFT + (ACROSS * index / (count - 1) if count > 1 else ACROSS / 2)
    return LEFT + ACROSS * (index + 0.5) / max(1, count)


def nice(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round values that cover low to high, a handful.

    >>> nice(0, 0.93)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    spread = max(high - low, 1e-9 * max(abs(low), abs(high)))  # else the steps drown in the values
    if spread < 1e-30:
        spread = 1.0
    raw = spread / wanted
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = max(first + 1, math.ceil(high / step - 1e-9))
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def _figure(figure: Figure) -> str:
    low, high = _range(figure)
    values = nice(low, high)
    if figure.share and (figure.kind == "stack" or 0.75 < high < 1.001):
        values = [0.0, 0.25, 0.5, 0.75, 1.0]  # an ESS of 1 is 1.0000001 now and then
    draw = {"line": _lines, "stack": _stack, "bars": _bars}[figure.kind]
    return _axes(figure, values) + draw(figure, values[0], values[-1])


def _range(figure: Figure) -> tuple[float, float]:
    if figure.kind == "stack":
        return 0.0, max(_sums(figure), default=0.0)
    found = [value for series in figure.series for value in series.ys if value is not None]
    low, high = min(found, default=0.0), max(found, default=1.0)
    return min(0.0, low), max(high, 0.0)


def _sums(figure: Figure) -> list[float]:
    return [sum(value or 0.0 for value in values) for values in zip(*(s.ys for s in figure.series), strict=True)]


def _y(value: float, low: float, high: float) -> float:
    return TOP + UP * (1 - (value - low) / (high - low))


def _axes(figure: Figure, values: list[float]) -> str:
    marks: list[str] = []
    for value in values:
        y = _y(value, values[0], values[-1])
        said = f"{value:.0%}" if figure.share else short(value)
        marks.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{said}</text>')
    return "".join(marks) + _across(figure)


def _across(chart: Figure | Heat) -> str:
    marks = [
        f'<text x="{left_edge(chart, index):.1f}" y="{TOP + UP + 16}" text-anchor="middle">{escape(text)}</text>'
        for index, text in chart.ticks
    ]
    marks.append(f'<text x="{LEFT + ACROSS / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(chart.x)}</text>')
    return "".join(marks)


def _lines(figure: Figure, low: float, high: float) -> str:
    marks: list[str] = []
    for series in figure.series:
        for stretch in _stretches(series.ys):
            points = [(left_edge(figure, i), _y(value, low, high)) for i, value in stretch]
            if len(points) == 1:
                marks.append(
                    f'<circle class="f{series.colour}" cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="3"/>'
                )
            else:
                path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
                marks.append(f'<polyline class="s{series.colour}" points="{path}"/>')
    return "".join(marks)


def _stretches(ys: Values) -> list[list[tuple[int, float]]]:
    """The values without gaps between them. A gap among measured values is bridged where every second is missing,
    as it is when evaluations are rarer than steps."""
    there = [(index, value) for index, value in enumerate(ys) if value is not None]
    if not there:
        return []
    widest = max(2.0, 2.0 * len(ys) / len(there))
    found = [[there[0]]]
    for point in there[1:]:
        if point[0] - found[-1][-1][0] > widest:
            found.append([])
        found[-1].append(point)
    return found


def _stack(figure: Figure, low: float, high: float) -> str:
    columns = [
        list(accumulate((value or 0.0 for value in values), initial=0.0))
        for values in zip(*(s.ys for s in figure.series), strict=True)
    ]
    xs = [left_edge(figure, index) for index in range(len(columns))]
    if len(columns) == 1:  # one step: a band across the whole
        xs, columns = [LEFT, LEFT + ACROSS], columns * 2
    marks: list[str] = []
    for number, series in enumerate(figure.series):
        upper = [f"{x:.1f},{_y(c[number + 1], low, high):.1f}" for x, c in zip(xs, columns, strict=True)]
        lower = [f"{x:.1f},{_y(c[number], low, high):.1f}" for x, c in zip(xs, columns, strict=True)]
        marks.append(f'<polygon class="f{series.colour}" points="{" ".join(upper + lower[::-1])}"/>')
    return "".join(marks)


def _bars(figure: Figure, low: float, high: float) -> str:
    wide = ACROSS / max(1, len(figure.xs)) * 0.84 / len(figure.series)
    marks: list[str] = []
    for number, series in enumerate(figure.series):
        for index, value in enumerate(series.ys):
            if value:
                x = left_edge(figure, index) + wide * (number - len(figure.series) / 2)
                y, zero = _y(value, low, high), _y(0, low, high)
                marks.append(
                    f'<rect class="f{series.colour}" x="{x:.1f}" y="{min(y, zero):.1f}" '
                    f'width="{max(0.5, wide - 0.5):.1f}" height="{max(1.0, abs(zero - y)):.1f}"/>'
                )
    return "".join(marks)


def _heat(heat: Heat) -> str:
    tall, wide = UP / max(1, len(heat.rows)), ACROSS / max(1, len(heat.xs))
    every = -(-len(heat.rows) // 8)
    marks: list[str] = []
    for row, (label, cells) in enumerate(zip(heat.rows, heat.cells, strict=True)):
        y = TOP + UP - tall * (row + 1)
        if row % every == 0:
            marks.append(f'<text x="{LEFT - 6}" y="{y + tall / 2 + 4:.1f}" text-anchor="end">{escape(label)}</text>')
        for column, share in enumerate(cells):
            if share > 0:
                # The root makes a hundredth visible.
                marks.append(
                    f'<rect class="f0" x="{LEFT + wide * column:.1f}" y="{y:.1f}" width="{wide + 0.3:.1f}" '
                    f'height="{tall:.1f}" opacity="{math.sqrt(share):.2f}"/>'
                )
    frame = f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{ACROSS}" height="{UP}"/>'
    return "".join(marks) + frame + _across(heat)


def short(value: float) -> str:
    """A few characters, for an axis.

    >>> short(1250000.0), short(0.25), short(2e-9)
    ('1.25M', '0.25', '2e-09')
    """
    for unit, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.4g}{sign}"
    return f"{value:.3g}"
