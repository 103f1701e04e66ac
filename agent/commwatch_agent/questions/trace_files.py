"""API queries for the timeline of a job, on this node or on all its nodes; they run in the worker process."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from http import HTTPStatus
from typing import IO

from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.job.merging import Heard
from commwatch_agent.questions.answer import ApiError, Text, as_file, job_exists
from commwatch_agent.questions.heard import read
from commwatch_agent.report.chrome_trace import TraceMark
from commwatch_agent.report.timeline_export import Window, export, write
from commwatch_agent.report.timeline_parts import Page, TimelinePart, part_of, trace_of
from commwatch_agent.runtime.whole_files import LEVEL

#: Most operations in a timeline: `commwatch timeline` has no limit, but an answer is made in memory, and other questions wait for it.
MOST_TIMELINE = 50_000


def timeline(
    agent: QueryService, job: str, *, window: Window, most: int, marks: list[TraceMark], heard: Heard | None = None
) -> Text:
    """Return a part of a job as a compressed Chrome trace.

    Args:
        most: most operations of each node: of this one, and as the other agents were asked.
    """
    if heard is None:
        return _packed(job, lambda out: export(agent.path, job, window._replace(most=most), marks, out))
    found, nodes = read(heard, TimelinePart)
    page = Page(window.last_s, None, None, most, window.since_ns, window.until_ns)
    parts = [part_of(agent.path, job, page, marks), *(part for (part,) in found)]
    about = {"nodes": vars(nodes)}
    return _packed(job, lambda out: write([trace_of(part) for part in parts], job, window, about, out))


def timeline_part(agent: QueryService, job: str, *, page: Page, marks: list[TraceMark]) -> TimelinePart:
    """Return a page of the timeline for another node; ``marks``: for the first page."""
    job_exists(agent, job)
    try:
        return part_of(agent.path, job, page, marks)
    except ValueError:
        detail = f"cursor={page.cursor}: not a cursor of this route; begin again without it"
        raise ApiError(HTTPStatus.BAD_REQUEST, detail) from None


def _packed(job: str, export: Callable[[IO[str]], object]) -> Text:
    packed = io.BytesIO()
    # Without the time, so that equal answers are equal.
    with gzip.GzipFile("", "wb", LEVEL, packed, mtime=0) as file, io.TextIOWrapper(file, encoding="utf-8") as out:
        export(out)
    return as_file(packed.getvalue(), "application/gzip", "timeline", job, "json.gz")
