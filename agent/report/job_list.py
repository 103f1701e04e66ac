"""The jobs of a history with their headline figures, as values and as text."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict

from commwatch.analysis.queries import QueryService
from commwatch.core import terminal_text
from commwatch.core.cells import StepSums
from commwatch.core.terminal_text import width
from commwatch.core.units import percent, seconds
from commwatch.core.views import JobFigures, JobView
from commwatch.history.history import History
from commwatch.ingest.step_accounting import LEAST_STEPS, of_known
from commwatch.report.report import columns, job_state

_HEAD = ("job", "state", "began", "lasted", "ranks", "steps", "step p50", "comm", "exposed")


def job_figures(agent: QueryService, most: int | None = None) -> list[JobFigures]:
    """Return the jobs, the latest started first; at most ``most``, ``None``: all."""
    jobs = agent.jobs()[:most]
    of_job = [{view.rank for view in agent.ranks(job.job_id)} for job in jobs]
    with History(agent.path) as history:
        return [_figures(history, job, ranks) for job, ranks in zip(jobs, of_job, strict=True)]


def _figures(history: History, job: JobView, ranks: set[int]) -> JobFigures:
    """Return a job with its figures.

    Args:
        ranks: those of its latest run.
    """
    rank_of = {ring.id: ring.rank for ring in history.rings(job.job_id) if ring.rank in ranks}
    steps, usual = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, StepSums(0, 0, 0, 0, 0, 0, 0))
    for (ring, long), sums in history.step_sums(list(rank_of)).items():
        rank = rank_of[ring]
        steps[rank] += sums.steps
        if not long:
            usual[rank] = _together([usual[rank], sums])
    enough = {rank for rank, sums in usual.items() if sums.steps >= LEAST_STEPS}
    median_ns = history.median_step_ns([ring for ring, rank in rank_of.items() if rank in enough])
    of_ranks = [[usual[rank]] for rank in enough]
    return JobFigures(
        **vars(job),
        duration_s=job.last_seen_at - job.started_at,
        steps=max(steps.values(), default=0),
        step_p50_s=None if median_ns is None else median_ns / 1e9,
        comm_share=of_known(of_ranks, lambda sums: _shares(sums)[0])[0],
        exposed_share=of_known(of_ranks, lambda sums: _shares(sums)[1])[0],
    )


def _together(sums: Iterable[StepSums]) -> StepSums:
    return StepSums(*map(sum, zip(*sums, strict=True)))


def _shares(sums: Collection[StepSums]) -> tuple[float | None, float | None]:
    return (_together(sums).shares() or (None, None)) if sums else (None, None)


def as_json(jobs: Sequence[JobFigures]) -> str:
    """Return the jobs as JSON; times in seconds."""
    return json.dumps([asdict(job) for job in jobs], indent=2)


def text(jobs: Sequence[JobFigures], cells: int) -> str:
    """Return the jobs as a table that is ``cells`` wide.

    A name that leaves no space for the figures has a line of its own, because it is an argument of other commands.
    """
    names = [terminal_text.line(job.job_id) for job in jobs]
    room = cells - width(columns(_HEAD, [("", *_cells(job)) for job in jobs], left=1)[0]) + width(_HEAD[0])
    rows = [(name if width(name) <= room else "", *_cells(job)) for name, job in zip(names, jobs, strict=True)]
    head, *lines = (line.removeprefix("  ") for line in columns(_HEAD, rows, left=2))
    found = [head]
    for job, name, row, line in zip(jobs, names, rows, lines, strict=True):
        found += [line] if row[0] else [name, line]
        indent = "    "
        found += textwrap.wrap(job.ending, cells, initial_indent=indent, subsequent_indent=indent)
    return terminal_text.lines(found)


def _cells(job: JobFigures) -> tuple[str, ...]:
    here = len(job.ranks)
    return (
        job_state(job), time.strftime("%m-%d %H:%M", time.localtime(job.started_at)), seconds(job.duration_s),
        str(here) if here == job.world_size else f"{here}/{job.world_size}", str(job.steps), seconds(job.step_p50_s),
        percent(job.comm_share), percent(job.exposed_share),
    )  # fmt: skip
