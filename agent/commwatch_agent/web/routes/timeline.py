"""Routes of a job's timeline as a file for Perfetto."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from commwatch_agent.incidents.stored import of_run
from commwatch_agent.questions import trace_files
from commwatch_agent.questions.answer import ApiError, job_exists
from commwatch_agent.questions.report_sources import WITHIN_S
from commwatch_agent.questions.services import Services
from commwatch_agent.questions.trace_files import MOST_TIMELINE
from commwatch_agent.report.chrome_trace import TraceMark
from commwatch_agent.report.incident_marks import marks_of
from commwatch_agent.report.timeline_export import Window as Part
from commwatch_agent.report.timeline_parts import Page, TimelinePart
from commwatch_agent.web.problems import ERRORS
from commwatch_agent.web.routes.params import (
    JobFilter,
    OthersOf,
    QueriesOf,
    Scope,
    ServicesOf,
    Since,
    Until,
    WorkerOf,
    answered,
    now_of,
    seconds_of_end,
    some_job,
    sound_parameters,
    window,
)

router = APIRouter(prefix="/api/v1", responses=ERRORS, dependencies=[Depends(sound_parameters)])
Last = Annotated[
    str | None,
    Query(
        description="How much of the job's end it covers, such as 30s, 5m or 2h; all: the whole job. Default: 30s. Not with since or until."
    ),
]
LAST = "30s"


def part(request: Request, agent: QueriesOf, last: Last = None, since: Since = None, until: Until = None) -> Part:
    """Query parameters ``last``, ``since`` and ``until``."""
    if since is until is None:
        return Part(seconds_of_end(LAST if last is None else last))
    if last is not None:
        raise ApiError(HTTPStatus.BAD_REQUEST, f"last={last}: not together with since or until")
    span = window(since, until, now_of(agent, request.query_params.get("job"), since, until))
    return Part(None, None, span.from_ns, None if until is None else span.until_ns)


PartOf = Annotated[Part, Depends(part)]


@router.get("/timeline", response_class=Response, responses={200: {"content": {"application/gzip": {}}}})
def timeline(
    agent: QueriesOf,
    worker: WorkerOf,
    services: ServicesOf,
    others: OthersOf,
    of: PartOf,
    *,
    job: JobFilter = None,
    scope: Scope = "node",
) -> Response:
    """The operations of a job (the latest by default) as a compressed Chrome trace for Perfetto: at most the latest 50,000."""
    named = some_job(agent, job, scope)
    marks = _marks(services, named)
    most, heard = MOST_TIMELINE, None
    if scope == "job":
        most //= others.number + 1
        heard = others.ask(f"timeline_part?job,last,since,until,limit={most}", within_s=WITHIN_S)
    return answered(worker.text(trace_files.timeline, named, window=of, most=most, marks=marks, heard=heard))


@router.get("/timeline_part", response_model=TimelinePart)
def timeline_part(
    agent: QueriesOf,
    worker: WorkerOf,
    services: ServicesOf,
    of: PartOf,
    *,
    job: Annotated[str, Query(description="Job id.")],
    from_ns: Annotated[int | None, Query(ge=0, le=1 << 62, description="As returned with the first page.")] = None,
    cursor: Annotated[str | None, Query(description="As returned with the previous page.")] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_TIMELINE, description="Maximum number of operations.")] = MOST_TIMELINE,
) -> Response:
    """A page of the timeline of this node by its own clock, latest end first, for the timeline of another."""
    job_exists(agent, job)
    page = Page(of.last_s, from_ns, cursor, limit, of.since_ns, of.until_ns)
    marks = _marks(services, job) if cursor is None else []
    return answered(worker.text(trace_files.timeline_part, job, page=page, marks=marks))


def _marks(services: Services, job: str) -> list[TraceMark]:
    latest = {each.id: each for each in services.incidents.incidents()}
    stored = of_run(services.queries.path, services.queries.stored(job))
    return list(marks_of(latest.get(each.id, each) for each in stored))
