"""A comparison as text, JSON and HTML."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict

from commwatch_agent.compare.bootstrap import CONFIDENCE, Shift
from commwatch_agent.compare.comparison import (
    CORE_WAIT,
    LEAST_CHANGE,
    LEAST_POINTS,
    Comparison,
    Figure,
    KindFigures,
    Side,
)
from commwatch_agent.compare.incidents import BETTER, GONE, NEW, SAME, WORSE, IncidentChange, IncidentSums
from commwatch_agent.model.views import ITERATIONS, JobView
from commwatch_agent.report import html_frame
from commwatch_agent.report.report_text import job_state
from commwatch_agent.text import terminal_text
from commwatch_agent.text.plain_table import CELLS, columns, paragraph
from commwatch_agent.text.units import moment, percent, rate, seconds, size
from commwatch_alerts.model import INFO

_FIGURE_HEAD = ("figure", "B compared with A", "A", "B")
_KIND_HEAD = ("group", "op", "size", "count", "p50", "p99", "busbw", "p50 changes", "busbw changes")
#: What of operations is left out in a narrow terminal, the least important first.
_LESS_OF_KINDS = ("p99", "count", "busbw changes", "busbw")
_SETTING_HEAD = ("setting", "A", "B")
_INCIDENT_HEAD = ("incident", "B compared with A", "A", "B")
#: How incidents differ, in words.
_CHANGES = {NEW: "new", WORSE: "costs more", GONE: "no longer", BETTER: "costs less", SAME: "about the same"}
#: Most incidents in the headline, of those that differ in one way.
_MOST_NAMED = 3
#: The words for a figure that is larger, and for one that is smaller.
_WORDS = {
    "busbw": ("higher", "lower"),
    **dict.fromkeys(("comm_share", "exposed_share", "wait_share"), ("higher", "lower")),
}
_TITLES = {
    "step_p50": "step time, median",
    "step_p95": "step time, p95",
    "step_mean": "step time, mean",
    "comm_share": "comm share",
    "exposed_share": "exposed share",
    "wait_share": "waiting for late ranks",
    CORE_WAIT: "waiting for a CPU core",
}
_INCLUDES = "Times and busbw of operations include waiting for late ranks: they change with it, too."
NOTE = (
    f"Intervals: {percent(CONFIDENCE)} confidence, block bootstrap over the steps. A change under {percent(LEAST_CHANGE)}, or under"
    f" {100 * LEAST_POINTS:.0f} percentage point of a share, does not count as a difference. Times are of a step, and the number of its samples is not"
    " recorded: with another batch size or gradient accumulation, compare the time per sample."
)


def says(figure: Figure) -> str:
    """Return in words how a figure differs: ``slower by 4.1 to 6.8%``; ``–`` if a job lacks it."""
    if figure.change is None:
        return "–"
    if figure.differs is None or figure.low is None or figure.high is None:
        why = "of the last half minute" if figure.name == CORE_WAIT else "too few samples for an interval"
        return f"{_signed(figure.change, figure)}, {why}"
    if not figure.differs:
        found = "too small to count" if figure.low > 0 or figure.high < 0 else "no difference found"
        return f"{found} ({_signed(figure.low, figure, bare=True)} to {_signed(figure.high, figure)})"
    larger, smaller = _WORDS.get(figure.name, ("slower", "faster"))
    ends = dict.fromkeys(_number(end) for end in sorted((abs(figure.low), abs(figure.high))))
    return f"{larger if figure.change > 0 else smaller} by {' to '.join(ends)}{_unit(figure)}"


def _unit(figure: Figure) -> str:
    return "%" if figure.relative else " points"


def _number(part: float) -> str:
    return f"{100 * part:.1f}" if abs(part) < 0.0995 else f"{100 * part:.0f}"


def _signed(part: float, figure: Figure, bare: bool = False) -> str:
    return f"{'+' if part >= 0 else '−'}{_number(abs(part))}{'' if bare else _unit(figure)}"


def headline(comparison: Comparison) -> str:
    """Return the result for the step time as one line."""
    figure = comparison.figures[0]
    if figure.change is None:
        found = "The step times cannot be compared: " + (comparison.too_few or "they are not known")
    else:
        found = f"Job B compared with job A: step time {says(figure)}"
    return "; ".join([found, *incidents_that_differ(comparison.incidents)])


def incidents_that_differ(incidents: Iterable[IncidentChange]) -> list[str]:
    """Return the incidents that are not about the same, nor for information only, as ``no longer: Late rank: rank 1``."""
    titles: dict[str, list[str]] = {}
    for each in incidents:
        if each.change != SAME and each.severity != INFO:
            titles.setdefault(_CHANGES[each.change], []).append(each.title)
    return [
        f"{change}: {', '.join(names[:_MOST_NAMED])}{f' and {len(names) - _MOST_NAMED} more' if len(names) > _MOST_NAMED else ''}"
        for change, names in titles.items()
    ]


def _incident_cells(change: IncidentChange) -> tuple[str, ...]:
    return change.title, _CHANGES[change.change], _cost(change.a), _cost(change.b)


def _cost(sums: IncidentSums | None) -> str:
    """Return how often there was an incident, and at which cost, as ``2 ×, 4m00s of rank time per hour``."""
    if sums is None:
        return "–"
    if sums.cost_per_hour is not None:
        return f"{sums.count} ×, {seconds(sums.cost_per_hour)} of rank time per hour"
    return f"{sums.count} ×" if sums.share is None else f"{sums.count} ×, {percent(sums.share)} of the time"


def _side(side: Side) -> str:
    job = side.job
    left_out = f"{side.warm_up} of warm-up and {side.long} long ones left out"
    compared = f"{side.steps} {'iterations' if job.step_source == ITERATIONS else 'steps'} compared"
    return f"{job.job_id} ({job_state(job)}), began {moment(job.started_at)}; {compared}, {left_out}"


def _shifts(comparison: Comparison) -> list[str]:
    """Return of each job whose speed changed amid its steps about where, and from what to what, as a sentence."""
    sides = (("A", comparison.a), ("B", comparison.b))
    return [_shift(name, side.job, side.shift) for name, side in sides if side.shift is not None]


def _shift(name: str, job: JobView, found: Shift) -> str:
    where = f"{'iteration' if job.step_source == ITERATIONS else 'step'} {found.at}"
    return (
        f"The speed of {name} changed at about {where}, from {seconds(found.before_s)} to {seconds(found.after_s)}: that is no warm-up, so both "
        "parts are compared. If other work on the machine caused it, the difference is not that of the jobs."
    )


def _figure_cells(figure: Figure) -> tuple[str, ...]:
    show = seconds if figure.relative else percent
    return (_TITLES[figure.name], says(figure), show(figure.a), show(figure.b))


def _kind_cells(kind: KindFigures) -> tuple[str, ...]:
    bound = "–" if kind.size is None else f"≤ {size(kind.size)}"
    return (
        kind.group, kind.op, bound, _both(str(kind.count_a), str(kind.count_b)), _both(seconds(kind.p50.a), seconds(kind.p50.b)),
        _both(seconds(kind.p99.a), seconds(kind.p99.b)), _both(rate(kind.busbw.a), rate(kind.busbw.b)),
        *(_range(kind, figure) for figure in (kind.p50, kind.busbw)),
    )  # fmt: skip


def _both(a: str, b: str) -> str:
    return a if a == b else f"{a} → {b}"


def _range(kind: KindFigures, figure: Figure) -> str:
    """Return the interval of a change: ``+4.1 to +6.8%``; in words if there is no change or no interval."""
    if not kind.count_a or not kind.count_b:
        return "only in B" if kind.count_b else "only in A"
    if figure.change is None:
        return "–"
    if figure.differs is None or figure.low is None or figure.high is None:
        return "too few"
    return (
        f"{_signed(figure.low, figure, bare=True)} to {_signed(figure.high, figure)}"
        if figure.differs
        else "none found"
    )


def text(comparison: Comparison, cells: int = CELLS) -> str:
    """Return the comparison as text for a terminal of ``cells`` columns."""
    lines = ["", *paragraph(headline(comparison), cells, rest="    "), ""]
    for name, side in (("A", comparison.a), ("B", comparison.b)):
        lines += paragraph(_side(side), cells, first=f"  {name}  ", rest="         ")
    lines.append("")
    lines += columns(_FIGURE_HEAD, [_figure_cells(each) for each in comparison.figures], 2, cells)
    for remark in filter(None, (*_shifts(comparison), comparison.work)):
        lines += ["", *paragraph(remark, cells, first="  ")]
    if comparison.too_few:
        lines += ["", *paragraph(f"No intervals: {comparison.too_few}.", cells, first="  ", rest="    ")]
    if comparison.kinds:
        lines += [
            "",
            *columns(_KIND_HEAD, [_kind_cells(each) for each in comparison.kinds], 2, cells, optional=_LESS_OF_KINDS),
        ]
        lines += ["", *paragraph(_INCLUDES, cells, first="  ")]
    if comparison.incidents:
        rows = [_incident_cells(each) for each in comparison.incidents]
        lines += ["", *columns(_INCIDENT_HEAD, rows, 4, cells), ""]
        for each in comparison.incidents:
            lines += paragraph(f"{each.title}: {each.says}", cells, first="  ")
    settings = [(name, *map(_known, pair)) for name, pair in comparison.settings.items()]
    lines += [
        "",
        *(columns(_SETTING_HEAD, settings, 3, cells) if settings else ["  No setting that the history keeps differs."]),
    ]
    return terminal_text.lines([*lines, "", *paragraph(NOTE, cells, first="  "), ""])


def _known(value: str) -> str:
    return value or "–"


def as_json(comparison: Comparison) -> str:
    """Return the comparison as JSON."""
    return json.dumps({"headline": headline(comparison), **asdict(comparison)}, indent=2)


def html(comparison: Comparison) -> str:
    """Return the comparison as one HTML file without external resources."""
    sides = [("A", _side(comparison.a)), ("B", _side(comparison.b))]
    figures = [_figure_cells(each) for each in comparison.figures]
    body = [f"<p><b>{html_frame.text(headline(comparison))}</b></p>", html_frame.table((), sides)]
    body += ["<h2>Steps</h2>", html_frame.table(_FIGURE_HEAD, figures, "numbers")]
    body += [f"<p>{html_frame.text(each)}</p>" for each in filter(None, (*_shifts(comparison), comparison.work))]
    body += [f"<p>No intervals: {html_frame.text(comparison.too_few)}.</p>"] if comparison.too_few else []
    if comparison.incidents:
        incidents = [_incident_cells(each) for each in comparison.incidents]
        body += ["<h2>Incidents</h2>", html_frame.table(_INCIDENT_HEAD, incidents)]
        body += [f"<p>{html_frame.text(f'{each.title}: {each.says}')}</p>" for each in comparison.incidents]
    if comparison.kinds:
        body += [
            "<h2>Operations</h2>",
            html_frame.table(_KIND_HEAD, [_kind_cells(each) for each in comparison.kinds], "numbers kinds"),
        ]
    settings = [(name, *map(_known, pair)) for name, pair in comparison.settings.items()]
    body += [
        "<h2>Settings that differ</h2>",
        html_frame.table(_SETTING_HEAD, settings) or "<p>None that the history keeps.</p>",
    ]
    body.append(f"<p>{NOTE}</p>")
    title = f"commwatch compare: {comparison.a.job.job_id}, {comparison.b.job.job_id}"
    return html_frame.page(title, "\n".join(body))
