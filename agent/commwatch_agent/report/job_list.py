"""Jobs with their headline figures as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from commwatch_agent.model.views import ITERATIONS, JobFigures
from commwatch_agent.report.report_text import job_state
from commwatch_agent.text import terminal_text
from commwatch_agent.text.plain_table import columns, paragraph
from commwatch_agent.text.terminal_text import MOST_CELLS, width
from commwatch_agent.text.units import day_time, percent, seconds, zone

_HEAD = ("job", "state", "began", "lasted", "ranks", "steps", "step p50", "comm", "exposed")


def as_json(jobs: Sequence[JobFigures]) -> str:
    """Return the jobs as JSON; times in seconds."""
    return json.dumps([asdict(job) for job in jobs], indent=2)


def text(jobs: Sequence[JobFigures], cells: int) -> str:
    """Return the jobs as a table that is ``cells`` wide.

    A name that leaves no space for the figures has a line of its own, because it is an argument of other commands.
    """
    names = [terminal_text.line(job.job_id) for job in jobs]
    zones = {zone(job.started_at) for job in jobs}
    heads = tuple(f"began ({', '.join(sorted(zones))})" if head == "began" else head for head in _HEAD)
    figures = [_cells(job, len(zones) > 1) for job in jobs]
    room = cells - width(columns(heads, [("", *each) for each in figures], 1, MOST_CELLS)[0]) + width(_HEAD[0])
    rows = [(name if width(name) <= room else "", *each) for name, each in zip(names, figures, strict=True)]
    head, *lines = (line.removeprefix("  ") for line in columns(heads, rows, 2, MOST_CELLS))
    found = [head]
    for job, name, row, line in zip(jobs, names, rows, lines, strict=True):
        found += [line] if row[0] else [name, line]
        earlier = f"earlier: {', '.join(job.earlier)}" if job.earlier else ""
        for more in (job.ending, terminal_text.line(earlier)):
            found += paragraph(more, cells, first="    ") if more else []
    return terminal_text.lines(found)


def _cells(job: JobFigures, with_zone: bool) -> tuple[str, ...]:
    here, steps = len(job.ranks), f"{job.steps}{' iter' * (job.step_source == ITERATIONS)}"
    return (
        job_state(job), f"{day_time(job.started_at)}{f' {zone(job.started_at)}' if with_zone else ''}", seconds(job.duration_s),
        str(here) if here == job.world_size else f"{here}/{job.world_size}", steps, seconds(job.step_p50_s),
        percent(job.comm_share), percent(job.exposed_share),
    )  # fmt: skip
