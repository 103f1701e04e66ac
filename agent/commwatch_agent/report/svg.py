"""Plots as SVG inside an HTML page: functions from numbers to text, without scripts or external resources. Pure.

Colours come from CSS classes, so that light and dark pages are readable. Numbers are in tooltips and in the table that the
page puts behind each plot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from math import ceil, floor, log10
from typing import NamedTuple

from commwatch_agent.text.terminal_text import clean, cut

#: Number of colours; further series begin again with the first.
COLOURS = 8
#: Size of a drawing: about as many pixels as a phone has, so that text stays readable on it.
_WIDTH, _HEIGHT = 440, 246
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 28, 24, 46
_ROW, _NAME, _HEAD = 22, 62, 22
#: A matrix with more rows than this has lower ones.
_MANY_ROWS, _LOW_ROW = 16, 15
_NAME_CELLS, _LEGEND_CELLS = 9, 40
#: Cells of a matrix with room for fewer letters have no text.
_LEAST_CELLS = 6
#: Least ratio of high to low on a logarithmic axis.
_LEAST_SPAN = 4

_LIGHT = ("#1d6fd1", "#c2410c", "#15803d", "#9333ea", "#b45309", "#0e7490", "#be185d", "#4d7c0f")
_DARK = ("#7ab6ff", "#ff9d6b", "#62d68b", "#cfa2ff", "#f5b942", "#5cd3e8", "#ff8ac0", "#b4dc5e")
#: CSS for a page with plots.
STYLE = (
    """
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 0 3rem }
.plots section { min-width: 0 }
figure { margin: .75rem 0; max-width: 38rem; break-inside: avoid }
figcaption { margin-bottom: .25rem }
figcaption span { display: inline-block; max-width: 100%; margin-right: 1em; overflow-wrap: anywhere }
summary { cursor: pointer; font-size: .9em }
svg { display: block; width: 100%; height: auto; font: 12.5px system-ui, sans-serif }
svg text { fill: currentColor }
svg .grid { stroke: currentColor; stroke-opacity: .15 }
svg .limit { stroke: #dc2626; stroke-dasharray: 4 3 }
svg .line { fill: none; stroke-width: 1.5 }
svg .dashes { fill: none; stroke-width: 1.2; stroke-dasharray: 5 4 }
svg .heat { fill: #e0592a }
"""
    + "\n".join(f".c{i} {{ color: {colour}; stroke: {colour} }}" for i, colour in enumerate(_LIGHT))
    + "\n@media (prefers-color-scheme: dark) {\n"
    + "\n".join(f".c{i} {{ color: {colour}; stroke: {colour} }}" for i, colour in enumerate(_DARK))
    + "\n}\nsvg circle { fill: color-mix(in srgb, currentColor 60%, transparent) }\n"
)


class Axis(NamedTuple):
    """An axis from ``low`` to ``high``, which differ; with ``log``, both are above 0."""

    label: str
    low: float
    high: float
    #: Values and their labels.
    ticks: list[tuple[float, str]]
    log: bool = False

    def part(self, value: float) -> float:
        """Return the position of a value, from 0 at ``low`` to 1 at ``high``."""
        if self.log:
            return log10(value / self.low) / log10(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


class Point(NamedTuple):
    """A point and the text of its tooltip; a line has a gap where ``y`` is ``None``."""

    x: float
    y: float | None
    says: str = ""


@dataclass(frozen=True)
class Series:
    """Points of one kind (``line``, ``dots`` or ``dashes``), from left to right."""

    name: str
    kind: str
    #: 0 to ``COLOURS`` - 1.
    colour: int
    points: Sequence[Point]


def even_axis(label: str, low: float, high: float, ticks: Sequence[tuple[float, str]]) -> Axis:
    """Return a linear axis with those of the ticks that lie on it."""
    high = high if high > low else low + 1
    return Axis(label, low, high, [tick for tick in ticks if low <= tick[0] <= high])


def log_axis(label: str, values: Sequence[float], base: float, written: Mapping[float, str]) -> Axis:
    """Return a logarithmic axis around ``values`` (above 0), from tick to tick or in whole powers of ``base``.

    Args:
        written: labels by value; those on the axis become ticks.
    """
    low = base ** floor(_exponent(min(values), base))
    high = base ** ceil(_exponent(max(values), base))
    low = max((tick for tick in written if low <= tick <= min(values)), default=low)
    high = high if high > low else low * base
    high = min((tick for tick in written if max(*values, low * _LEAST_SPAN) <= tick <= high), default=high)
    return Axis(label, low, high, [tick for tick in written.items() if low <= tick[0] <= high], log=True)


def _exponent(value: float, base: float) -> float:
    return round(log10(value) / log10(base), 9)


def plot(
    name: str, title: str, says: str, x: Axis, y: Axis, *, series: Sequence[Series], limit: float | None = None
) -> str:
    """Return a plot of series over two axes as SVG.

    Args:
        name: identifies the plot on its page: letters and digits.
        says: a description in words, for people who cannot see the plot.
        limit: a value of ``y`` to mark with a line.
    """
    parts = [_grid(x, y)]
    if limit is not None and y.low <= limit <= y.high:
        at = _y(y, limit)
        parts.append(f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
    parts += [_drawn(each, x, y) for each in series]
    return _svg(name, title, says, _HEIGHT, parts)


def heat(
    name: str,
    title: str,
    says: str,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    values: Mapping[tuple[int, int], tuple[float, str]],
) -> str:
    """Return a matrix as SVG: a larger value has a stronger colour; of many columns, only some have a name.

    Args:
        values: value (0 or more) and text by row and column; other cells stay empty.
    """
    most = max((value for value, _ in values.values()), default=0.0) or 1.0
    wide = (_WIDTH - _NAME) / max(1, len(columns))
    room = max(1, int(wide / 7))
    # If columns are too narrow for their names, one name spans several columns.
    every = 1 if room >= _LEAST_CELLS else ceil(_LEAST_CELLS * 7 / wide)
    parts = []
    for i in range(0, len(columns), every):
        at, anchor = (_NAME + (i + 0.5) * wide, "middle") if every == 1 else (_NAME + i * wide, "start")
        label = _text(cut(clean(columns[i]), int(min(every, len(columns) - i) * wide / 7)))
        if every > 1 and label != _text(columns[i]):
            continue
        parts.append(
            f'<text x="{at:.1f}" y="14" text-anchor="{anchor}">{label}<title>{_text(columns[i])}</title></text>'
        )
    high = _ROW if len(rows) <= _MANY_ROWS else _LOW_ROW
    for j, row in enumerate(rows):
        parts.append(
            f'<text x="0" y="{_HEAD + j * high + (high + 9) // 2}">{_text(cut(clean(row), _NAME_CELLS))}</text>'
        )
    for (j, i), (value, written) in sorted(values.items()):
        left, top = _NAME + i * wide, _HEAD + j * high
        hint = f"<title>{_text(rows[j])}, {_text(columns[i])}: {_text(written)}</title>"
        parts.append(
            f'<rect class="heat" x="{left:.1f}" y="{top}" width="{wide - 1:.1f}" height="{high - 1}" fill-opacity="{0.85 * value / most:.3f}">{hint}</rect>'
        )
        if room >= _LEAST_CELLS:
            parts.append(
                f'<text x="{left + wide / 2:.1f}" y="{top + (high + 9) // 2}" text-anchor="middle">{_text(cut(clean(written), room))}</text>'
            )
    return _svg(name, title, says, _HEAD + high * len(rows), parts)


def legend(series: Sequence[Series]) -> str:
    """Return the legend as HTML: each colour and series once."""
    names = dict.fromkeys((each.colour, each.name) for each in series if each.name)
    return "".join(
        f'<span><b class="c{colour}">■</b> {_text(cut(clean(name), _LEGEND_CELLS))}</span>' for colour, name in names
    )


def _svg(name: str, title: str, says: str, height: int, parts: Sequence[str]) -> str:
    head = f'<title id="{name}-title">{_text(title)}</title><desc id="{name}-says">{_text(says)}</desc>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-labelledby="{name}-title {name}-says">{head}{"".join(parts)}</svg>'
    )


def _text(text: str) -> str:
    return escape(clean(text))


def _x(axis: Axis, value: float) -> float:
    return _LEFT + axis.part(value) * (_WIDTH - _LEFT - _RIGHT)


def _y(axis: Axis, value: float) -> float:
    return _HEIGHT - _BOTTOM - axis.part(value) * (_HEIGHT - _TOP - _BOTTOM)


def _grid(x: Axis, y: Axis) -> str:
    parts = []
    for value, written in x.ticks:
        at = _x(x, value)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 21}" text-anchor="middle">{_text(written)}</text>')
    for value, written in y.ticks:
        at = _y(y, value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{at + 4:.1f}" text-anchor="end">{_text(written)}</text>')
    parts.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{_text(x.label)}</text>'
    )
    parts.append(f'<text x="0" y="12">{_text(y.label)}</text>')
    return "".join(parts)


def _drawn(series: Series, x: Axis, y: Axis) -> str:
    """Return a series as SVG: dots, or lines between gaps; a point between two gaps is a dot."""
    colour = f"c{series.colour % COLOURS}"
    if series.kind == "dots":
        return "".join(_dot(point, x, y, colour, 3.5) for point in series.points)
    parts = []
    for there, run in groupby(series.points, key=lambda point: point.y is not None):
        points = list(run)
        if not there:
            continue
        if len(points) == 1:
            parts.append(_dot(points[0], x, y, colour, 2.0))
            continue
        at = " ".join(f"{_x(x, point.x):.1f},{_y(y, point.y):.1f}" for point in points if point.y is not None)
        parts.append(f'<polyline class="{series.kind} {colour}" points="{at}"/>')
    return "".join(parts)


def _dot(point: Point, x: Axis, y: Axis, colour: str, radius: float) -> str:
    if point.y is None:
        return ""
    hint = f"<title>{_text(point.says)}</title>" if point.says else ""
    return f'<circle class="{colour}" cx="{_x(x, point.x):.1f}" cy="{_y(y, point.y):.1f}" r="{radius}">{hint}</circle>'
