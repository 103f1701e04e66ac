"""What the HTML report draws of a job: shares over time, bandwidth against size, who waited. A table stands behind each plot."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from commwatch import pages
from commwatch.advice import LIMIT
from commwatch.answers import Agent
from commwatch.bandwidth import bus_factor
from commwatch.collectors.spans import spans
from commwatch.model import Curve
from commwatch.plots import COLOURS, Point, Series, even_axis, heat, legend, log_axis, plot
from commwatch.report import MOST_STEPS, percent, rate, seconds, size
from commwatch.summary import Row
from commwatch.views import GroupView, StepView

#: Pieces of the job's time, operations, groups in one plot, and ranks in the matrix, at most.
_MOST_PIECES, _MOST_PLOTS, _MOST_ROWS = 100, 8, 64
_CURVE_POINTS = 24
_SIZES = {float(1 << power): size(1 << power) for power in range(0, 60, 4)}
_RATES = {10.0**power: rate(10.0**power) for power in range(15)}
_STRETCHES_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600, 7200, 14400, 43200, 86400, 604800)


@dataclass(frozen=True)
class Material:
    """What the plots are drawn from."""

    steps: list[StepView]
    #: By group, op and size; by rank and group.
    by_size: list[Row]
    waits: list[Row]
    #: What operations should take, by group and op.
    curves: Mapping[tuple[str, str], Curve]
    groups: list[GroupView]


def gather(agent: Agent, job_id: str) -> Material:
    """Out of the history; raises ``StoreError`` where it cannot be read."""
    until = time.time_ns()
    return Material(
        steps=agent.steps(0, until, job_id, None, MOST_STEPS),
        by_size=agent.summary(0, until, ["group", "op", "size"], {"job_id": job_id})[1],
        waits=agent.summary(0, until, ["rank", "group"], {"job_id": job_id})[1],
        curves=agent.curves(job_id),
        groups=agent.groups(job_id),
    )


def figures(material: Material) -> str:
    """The sections of the page; those of which nothing is known are left out."""
    return "\n".join([_shares(material.steps), _bandwidths(material), _waits(material.waits), _groups(material.groups)])


def _figure(drawn: str, series: Sequence[Series], head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A plot, what its colours mean, and its numbers."""
    numbers = f"<details><summary>the numbers</summary>{pages.table(head, rows)}</details>"
    return f"<figure><figcaption>{legend(series)}</figcaption>{drawn}{numbers}</figure>"


# -- shares over time -------------------------------------------------------------------------


def shares(steps: Sequence[StepView]) -> list[tuple[float, float | None, float | None]]:
    """Seconds since the first step began, communication and exposed share of the steps whose middle lies in a piece of time.

    Long steps are left out. A share is ``None`` where there is no step, or it is not known of one of them.
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
    found = []
    for i, here in enumerate(among):
        duration = sum(step.duration_s for step in here)
        exposed = [step.exposed_s for step in here if step.exposed_s is not None]
        known = bool(here) and len(exposed) == len(here)
        comm = sum(step.comm_s for step in here) / duration if here else None
        found.append(((i + 0.5) * piece_s, comm, sum(exposed) / duration if known else None))
    return found


def _shares(steps: Sequence[StepView]) -> str:
    points = shares(steps)
    if not points:
        return ""
    series = [
        Series("communication", "line", 0, [Point(at, comm) for at, comm, _ in points]),
        Series("exposed", "line", 1, [Point(at, exposed) for at, _, exposed in points]),
    ]
    series = [each for each in series if any(point.y is not None for point in each.points)]
    most = max(comm for _, comm, _ in points if comm is not None)
    end = points[-1][0] + points[0][0]
    every = next((each for each in _STRETCHES_S if end / each <= 6), _STRETCHES_S[-1])
    x = even_axis(
        "time since the first step",
        0,
        end,
        [(n * every, seconds(n * every) if n else "0") for n in range(int(end / every) + 1)],
    )
    y = even_axis("share", 0, max(0.5, min(1.0, most * 1.1)), [(n / 10, percent(n / 10)) for n in range(11)])
    above = sum(comm is not None and comm > LIMIT for _, comm, _ in points)
    says = f"At most {percent(most)} of step time is communication; it is above the line of 30 % in {above} of {len(points)} pieces of time."
    drawn = plot("shares", "Communication share over time", says, x, y, series, LIMIT)
    rows = [(seconds(at), percent(comm), percent(exposed)) for at, comm, exposed in points]
    return f"<h2>Shares over time</h2><p>{says}</p>" + _figure(drawn, series, ("at", "communication", "exposed"), rows)


# -- bandwidth against size -------------------------------------------------------------------


def _bandwidths(material: Material) -> str:
    """A plot for each operation, most time first; dots as measured, dashes as it should be."""
    by_op: dict[str, list[Row]] = {}
    for row in material.by_size:
        if row.busbw and row.bytes:
            by_op.setdefault(str(row.by["op"]), []).append(row)
    if not by_op:
        return ""
    most_time = sorted(by_op.items(), key=lambda item: -sum(row.seconds for row in item[1]))
    plots = [_bandwidth(i, op, rows, material.curves) for i, (op, rows) in enumerate(most_time[:_MOST_PLOTS])]
    words = "Dots: bus bandwidth as measured, waits for late ranks included. Dashes: what it should be, by a reference or by the job's own best."
    return f"<h2>Bandwidth against size</h2><p>{words}</p>" + "".join(plots)


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
    x = log_axis("size", [point.x for point in points], 16, _SIZES)
    y = log_axis("bus bandwidth", [point.y for point in points if point.y], 10, _RATES)
    best = max(rows, key=lambda row: row.busbw or 0)
    says = f"{op}: at best {rate(best.busbw)}, at {size(_mean_bytes(best))} in group {best.by['group']}."
    drawn = plot(f"busbw{number}", f"Bus bandwidth of {op} against size", says, x, y, series)
    cells = [
        (group, size(_mean_bytes(row)), str(row.count), rate(row.busbw), _of_expected(row, curves))
        for group, its in by_group.items()
        for row in its
    ]
    return f"<h3>{escape(op)}</h3>" + _figure(drawn, series, ("group", "size", "count", "busbw", "expected"), cells)


def _mean_bytes(row: Row) -> float:
    return row.bytes / row.count


def _expected(curve: Curve, op: str, group_size: int, low: float, high: float) -> list[Point]:
    """The curve's bus bandwidth between two sizes; two octaves where they are one."""
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


# -- who waited, and in which groups ----------------------------------------------------------


def _waits(rows: Sequence[Row]) -> str:
    """Rank by group; where there are many ranks, those that waited most."""
    known = {(int(str(row.by["rank"])), str(row.by["group"])): row.wait_s for row in rows if row.wait_s is not None}
    if not known:
        return ""
    sums: dict[int, float] = {}
    by_group: dict[str, float] = {}
    for (rank, group), wait_s in known.items():
        sums[rank] = sums.get(rank, 0.0) + wait_s
        by_group[group] = by_group.get(group, 0.0) + wait_s
    ranks = sorted(sorted(sums, key=lambda rank: (-sums[rank], rank))[:_MOST_ROWS])
    groups = sorted(by_group, key=lambda group: -by_group[group])[:COLOURS]
    values = {
        (j, i): (known[rank, group], seconds(known[rank, group]))
        for j, rank in enumerate(ranks)
        for i, group in enumerate(groups)
        if (rank, group) in known
    }
    least = min(sums, key=lambda rank: (sums[rank], rank))
    says = f"Waiting for late ranks, by rank and group: rank {least} waited least, {seconds(sums[least])} in all; who waits least is waited for."
    if len(ranks) < len(sums) or len(groups) < len(by_group):
        says += f" Shown: {len(ranks)} of {len(sums)} ranks, {len(groups)} of {len(by_group)} groups, those with most of it."
    drawn = heat("waits", "Waiting by rank and group", says, [f"rank {rank}" for rank in ranks], groups, values)
    cells = [(str(rank), group, seconds(wait_s)) for (rank, group), wait_s in sorted(known.items())]
    return f"<h2>Waits</h2><p>{says}</p>" + _figure(drawn, (), ("rank", "group", "wait"), cells)


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
    return "<h2>Process groups</h2>" + pages.table(head, rows)
