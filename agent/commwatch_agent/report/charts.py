"""Plots of the HTML report: shares over time, bandwidth against size, waits. Each plot has a table of its numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log2, log10

from commwatch_agent.analysis.advice_facts import BOTTLENECK_SHARE
from commwatch_agent.analysis.advice_input import MOST_STEPS, nccl_choices
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.ingest.step_accounting import comm_share, exposed_share
from commwatch_agent.model.alpha_beta import Curve
from commwatch_agent.model.api_views import Row
from commwatch_agent.model.bandwidth import bus_factor
from commwatch_agent.model.nccl_views import NcclOperations
from commwatch_agent.model.views import GroupView, StepView, WaitView
from commwatch_agent.report import html_frame
from commwatch_agent.report.svg import COLOURS, Axis, Point, Series, even_axis, heat, legend, log_axis, plot
from commwatch_agent.text.units import percent, rate, seconds, size
from commwatch_collectors.spans import spans

#: Most intervals of the job's time, plots of bandwidth, and ranks in a matrix.
_MOST_PIECES, _MOST_PLOTS, _MOST_ROWS = 100, 8, 64
#: Most columns in the matrix of ranks and time.
_MOST_COLUMNS = 36
_CURVE_POINTS = 24
_STRETCHES_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600, 7200, 14400, 43200, 86400, 604800)


@dataclass(frozen=True)
class Material:
    """The data that the plots show."""

    steps: list[StepView]
    #: One row per group, op and size; one row per rank and group, of operations in steps if there are any.
    by_size: list[Row]
    waits: list[Row]
    #: One per rank and time slot.
    waits_at: list[WaitView]
    #: Expected durations, by group label and op.
    curves: Mapping[tuple[str, str], Curve]
    groups: list[GroupView]
    #: What NCCL chose, where its plugin reports it; the most time first.
    choices: list[NcclOperations]


NOTHING = Material([], [], [], [], {}, [], [])


def gather(agent: QueryService, job_id: str) -> Material:
    """Read the data from the history; raise ``StoreError`` if it cannot be read."""
    totals = agent.totals(job_id, [["group", "op", "size"], ["rank", "group", "startup"]])
    by_size, waits = totals.rows
    in_steps = [row for row in waits if not row.by["startup"]]
    return Material(
        steps=agent.latest_steps(0, job_id, MOST_STEPS)[0],
        by_size=by_size,
        waits=in_steps or waits,
        waits_at=totals.waits,
        curves=totals.curves,
        groups=agent.groups(job_id),
        choices=nccl_choices(agent, job_id),
    )


def figures(material: Material, late: Collection[int] = ()) -> str:
    """Return the sections of the page as HTML; sections without data are left out. ``late``: the ranks that the others wait for."""
    small = [_shares(material.steps), _waits(material.waits, late) + _waits_over_time(material.waits_at)]
    together = "".join(f"<section>{each}</section>" for each in small if each)
    parts = [
        f'<div class="plots">{together}</div>' if together else "",
        _bandwidths(material),
        _groups(material.groups),
    ]
    return "\n".join(parts)


def _figure(drawn: str, series: Sequence[Series], head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a plot with its legend and a table of its numbers as HTML."""
    numbers = f"<details><summary>the numbers</summary>{html_frame.table(head, rows)}</details>"
    return f"<figure><figcaption>{legend(series)}</figcaption>{drawn}{numbers}</figure>"


# -- shares over time -------------------------------------------------------------------------


def shares(steps: Sequence[StepView]) -> list[tuple[float, float | None, float | None]]:
    """Return (seconds since the first step began, communication share, exposed share) by interval; shares are 0 to 1.

    A step belongs to the interval of its middle. Long steps are left out. A share is ``None`` without steps, or if it is
    not known for more than one in ten of them.
    """
    usual = [step for step in steps if not step.long]
    if not usual:
        return []
    began, ended = min(step.start_at for step in usual), max(step.end_at for step in usual)
    pieces = max(1, min(_MOST_PIECES, len({step.seq for step in usual})))
    piece_s = (ended - began) / pieces or 1.0
    among: list[list[StepView]] = [[] for _ in range(pieces)]
    for step in usual:
        middle = (step.start_at + step.end_at) / 2
        among[min(pieces - 1, int((middle - began) / piece_s))].append(step)
    return [((i + 0.5) * piece_s, comm_share(here), exposed_share(here)) for i, here in enumerate(among)]


def _shares(steps: Sequence[StepView]) -> str:
    points = shares(steps)
    known = [comm for _, comm, _ in points if comm is not None]
    if not known:
        return ""
    series = [
        Series("communication", "line", 0, [Point(at, comm) for at, comm, _ in points]),
        Series("exposed", "line", 1, [Point(at, exposed) for at, _, exposed in points]),
    ]
    series = [each for each in series if any(point.y is not None for point in each.points)]
    most = max(known)
    end = points[-1][0] + points[0][0]
    longest = _STRETCHES_S[-1]
    every = next((each for each in _STRETCHES_S if end / each <= 6), longest * ceil(end / longest / 6))
    x = even_axis(
        "time since the first step",
        0,
        end,
        [(n * every, seconds(n * every) if n else "0") for n in range(int(end / every) + 1)],
    )
    y = even_axis("share", 0, max(0.5, min(1.0, most * 1.1)), [(n / 10, percent(n / 10)) for n in range(11)])
    above, unknown = sum(comm > BOTTLENECK_SHARE for comm in known), len(points) - len(known)
    says = (
        f"At most {percent(most)} of step time is communication; it is above the 30% line in {above} of {len(known)} intervals"
        f"{f', and not known in {unknown} more' if unknown else ''}."
    )
    drawn = plot("shares", "Communication share over time", says, x, y, series=series, limit=BOTTLENECK_SHARE)
    rows = [(seconds(at), percent(comm), percent(exposed)) for at, comm, exposed in points]
    return f"<h2>Shares over time</h2><p>{says}</p>" + _figure(drawn, series, ("at", "communication", "exposed"), rows)


# -- bandwidth against size -------------------------------------------------------------------


def _bandwidths(material: Material) -> str:
    """Return one plot per operation as HTML, most time first: dots are measured, dashes are expected."""
    by_op: dict[str, list[Row]] = {}
    for row in material.by_size:
        if row.busbw and row.bytes:
            by_op.setdefault(str(row.by["op"]), []).append(row)
    if not by_op:
        return ""
    most_time = sorted(by_op.items(), key=lambda item: -sum(row.seconds for row in item[1]))
    plots = [_bandwidth(i, op, rows, material.curves) for i, (op, rows) in enumerate(most_time[:_MOST_PLOTS])]
    caption = "Dots: measured bus bandwidth, including waits for late ranks. Dashes: expected bus bandwidth, from a reference or the job's own best."
    together = "".join(f"<section>{each}</section>" for each in plots)
    return f'<h2>Bandwidth against size</h2><p>{caption}</p><div class="plots">{together}</div>'


def _bandwidth(number: int, op: str, rows: Sequence[Row], curves: Mapping[tuple[str, str], Curve]) -> str:
    by_group: dict[str, list[Row]] = {}
    for row in sorted(rows, key=_mean_bytes):
        by_group.setdefault(str(row.by["group"]), []).append(row)
    series = []
    most_time = sorted(by_group.items(), key=lambda item: -sum(row.seconds for row in item[1]))
    for colour, (group, its) in enumerate(most_time[:COLOURS]):
        dots = [
            Point(
                _mean_bytes(row),
                row.busbw,
                f"{group}, {size(_mean_bytes(row))}: {rate(row.busbw)}, {row.count} operations",
            )
            for row in its
        ]
        series.append(Series(group, "dots", colour, dots))
        curve = curves.get((group, op))
        n = its[0].group_size
        if curve is not None and n is not None:
            expected = _expected(curve, op, n, dots[0].x, dots[-1].x)
            series += [Series(group, "dashes", colour, expected)] if expected else []
    points = [point for each in series for point in each.points]
    x = _sizes([point.x for point in points])
    y = _rates([point.y for point in points if point.y])
    best = max(rows, key=lambda row: row.busbw or 0)
    says = f"{op}: at most {rate(best.busbw)}, at {size(_mean_bytes(best))} in group {best.by['group']}."
    drawn = plot(f"busbw{number}", f"Bus bandwidth of {op} against size", says, x, y, series=series)
    cells = [
        (group, size(_mean_bytes(row)), str(row.count), rate(row.busbw), _of_expected(row, curves))
        for group, its in by_group.items()
        for row in its
    ]
    return f"<h3>{html_frame.text(op)}</h3>" + _figure(
        drawn, series, ("group", "size", "count", "busbw", "expected"), cells
    )


def _sizes(values: Sequence[float]) -> Axis:
    """Return an axis of sizes in bytes with a few ticks, at powers of 2."""
    octaves = log2(max(values) / min(values))
    bits = next(bits for bits in (2, 4, 6, 8, 10, 20) if octaves <= 5 * bits or bits == 20)
    written = {float(1 << power): size(1 << power).replace(".0 ", " ") for power in range(0, 60, bits)}
    return log_axis("size", values, 1 << bits, written)


def _rates(values: Sequence[float]) -> Axis:
    """Return an axis of rates with ticks at powers of 10: also between them if they are few, only at some if they are many."""
    decades = log10(max(values) / min(values))
    base, steps = (1000, (1,)) if decades > 8 else (10, (1,) if decades > 1.5 else (1, 2, 5))
    powers = (float(base) ** power for power in range(15))
    return log_axis(
        "bus bandwidth", values, base, {step * power: rate(step * power) for power in powers for step in steps}
    )


def _mean_bytes(row: Row) -> float:
    return row.bytes / row.count


def _expected(curve: Curve, op: str, group_size: int, low: float, high: float) -> list[Point]:
    """Return the curve's bus bandwidth between two sizes in bytes; over two octaves if the sizes are equal."""
    low, high = (low, high) if high > low else (low / 2, high * 2)
    sizes = [low * (high / low) ** (i / (_CURVE_POINTS - 1)) for i in range(_CURVE_POINTS)]
    found = [(each, _speed(curve, op, group_size, each)) for each in sizes]
    return [Point(each, speed) for each, speed in found if speed is not None]


def _speed(curve: Curve, op: str, group_size: int, size_bytes: float) -> float | None:
    time_s, factor = curve.time_s(op, group_size, size_bytes), bus_factor(op, group_size)
    return None if not time_s or factor is None else factor * size_bytes / time_s


def _of_expected(row: Row, curves: Mapping[tuple[str, str], Curve]) -> str:
    curve = curves.get((str(row.by["group"]), str(row.by["op"])))
    return rate(
        None
        if curve is None or row.group_size is None
        else _speed(curve, str(row.by["op"]), row.group_size, _mean_bytes(row))
    )


# -- waits, and process groups ----------------------------------------------------------------


def _waits(rows: Sequence[Row], late: Collection[int]) -> str:
    """Return the waits by rank and group as HTML; of many ranks, only those of ``_shown``."""
    known = {(int(str(row.by["rank"])), str(row.by["group"])): row.wait_s for row in rows if row.wait_s is not None}
    if not known:
        return ""
    sums: dict[int, float] = {}
    by_group: dict[str, float] = {}
    for (rank, group), wait_s in known.items():
        sums[rank] = sums.get(rank, 0.0) + wait_s
        by_group[group] = by_group.get(group, 0.0) + wait_s
    ranks = _shown(sums)
    groups = sorted(by_group, key=lambda group: -by_group[group])[:COLOURS]
    values = {
        (j, i): (known[rank, group], seconds(known[rank, group]))
        for j, rank in enumerate(ranks)
        for i, group in enumerate(groups)
        if (rank, group) in known
    }
    least = min(sums, key=lambda rank: (sums[rank], rank))
    in_steps = any("startup" in row.by and not row.by["startup"] for row in rows)
    says = f"Waiting for late ranks{' in steps' * in_steps}, by rank and group: rank {least} waited least, {seconds(sums[least])} in all"
    says += ", so the others wait for it." if least in late else "."
    if len(ranks) < len(sums) or len(groups) < len(by_group):
        says += f" Shown: {len(ranks)} of {len(sums)} ranks, {len(groups)} of {len(by_group)} groups, those that waited most, and rank {least}."
    drawn = heat("waits", "Waiting by rank and group", says, [f"rank {rank}" for rank in ranks], groups, values=values)
    cells = [(str(rank), group, seconds(wait_s)) for (rank, group), wait_s in sorted(known.items())]
    return f"<h2>Waits</h2><p>{says}</p>" + _figure(drawn, (), ("rank", "group", "wait"), cells)


def _shown(sums: Mapping[int, float]) -> list[int]:
    """Return the ranks that waited most and the one that waited least, in ascending order."""
    ranks = sorted(sums, key=lambda rank: (-sums[rank], rank))
    return sorted([*ranks[: _MOST_ROWS - 1], *ranks[_MOST_ROWS - 1 :][-1:]])


def over_time(waits: Sequence[WaitView]) -> tuple[float, dict[tuple[int, int], float]]:
    """Return the length of an interval in s, and the waits in s by rank and interval; no waits if one slot has them all.

    An interval is a whole number of the longest slots, so that each slot lies in one interval.
    """
    unit_s = max((each.length_s for each in waits), default=1.0)
    began = min((each.start_at for each in waits), default=0.0) // unit_s
    units = ceil(max((each.start_at + each.length_s for each in waits), default=0.0) / unit_s - began)
    together = ceil(units / _MOST_COLUMNS)
    sums: dict[tuple[int, int], float] = {}
    for each in waits:
        at = each.rank, int((each.start_at / unit_s - began) / together)
        sums[at] = sums.get(at, 0.0) + each.wait_s
    return unit_s * together, sums if units > 1 else {}


def _waits_over_time(waits: Sequence[WaitView]) -> str:
    """Return the waits by rank and time as HTML: a late rank is pale, the ranks that wait for it are dark."""
    piece_s, known = over_time(waits)
    if not known:
        return ""
    sums: dict[int, float] = {}
    for (rank, _), wait_s in known.items():
        sums[rank] = sums.get(rank, 0.0) + wait_s
    ranks = _shown(sums)
    times = [_clock(i * piece_s) for i in range(1 + max(i for _, i in known))]
    values = {
        (j, i): (known[rank, i], seconds(known[rank, i]))
        for j, rank in enumerate(ranks)
        for i in range(len(times))
        if (rank, i) in known
    }
    (most, at), longest_s = max(known.items(), key=lambda item: item[1])
    says = (
        f"Waiting for late ranks, by rank and time, in intervals of {_clock(piece_s)}. The longest wait is that of "
        f"rank {most}: {seconds(longest_s)} in the interval from {times[at]}. Where the others are dark, they wait for "
        "the pale rank."
    )
    drawn = heat("waiting", "Waiting by rank and time", says, [f"rank {rank}" for rank in ranks], times, values=values)
    cells = [(str(rank), times[i], seconds(wait_s)) for (rank, i), wait_s in sorted(known.items())]
    return f"<h3>Over time</h3><p>{says}</p>" + _figure(drawn, (), ("rank", "from", "wait"), cells)


def _clock(time_s: float) -> str:
    """Return a time in s as minutes and seconds, with hours if there are any: ``1:20``, ``2:00:00``."""
    minutes, second = divmod(round(time_s), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}" if minutes >= 60 else f"{minutes}:{second:02d}"


def _groups(groups: Sequence[GroupView]) -> str:
    if not groups:
        return ""
    head = ("group", "id", "ranks", "members", "backend")
    rows = [
        (
            group.group,
            group.group_id,
            str(group.size),
            "–" if group.members is None else spans(group.members),
            group.backend or "–",
        )
        for group in groups
    ]
    return "<h2>Process groups</h2>" + html_frame.table(head, rows)
