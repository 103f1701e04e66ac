"""Routes of a job's timeline as a file for Perfetto."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response

from commwatch.report.timeline_parts import Page, TimelinePart
from commwatch.runtime.peers import SELF
from commwatch.server.history_queries import job_exists
from commwatch.server.job_timelines import MOST_TIMELINE
from commwatch.server.problems import ERRORS
from commwatch.server.report_sources import WITHIN_S
from commwatch.server.routes.params import (
    JobFilter,
    OthersOf,
    QueriesOf,
    Scope,
    ServicesOf,
    WorkerOf,
    answered,
    seconds_of_end,
    some_job,
    sound_parameters,
)

router = APIRouter(prefix="/api/v1", responses=ERRORS, dependencies=[Depends(sound_parameters)])
Last = Annotated[
    str, Query(description="How much of the job's end it covers, such as 30s, 5m or 2h; all: the whole job.")
]
LAST = "30s"


@router.get("/timeline", response_class=Response, responses={200: {"content": {"application/gzip": {}}}})
def timeline(
    agent: QueriesOf,
    worker: WorkerOf,
    services: ServicesOf,
    others: OthersOf,
    *,
    job: JobFilter = None,
    last: Last = LAST,
    scope: Scope = "node",
) -> Response:
    """The operations of a job (the latest by default) as a compressed Chrome trace for Perfetto: at most the latest 50,000."""
    last_s = seconds_of_end(last)
    named = some_job(agent, job, scope)
    marks = services.evidence.marks(named)
    if scope == "node":
        return answered(worker.text("timeline", job=named, last_s=last_s, marks=marks))
    nodes = sum(peer.state != SELF for peer in services.peers.views()) + 1
    page = Page(last_s, None, None, MOST_TIMELINE // nodes)
    heard = others.ask(f"timeline_part?job,last={last},limit={page.most}", within_s=WITHIN_S)
    return answered(worker.text("job_timeline", job=named, page=page, marks=marks, heard=heard))


@router.get("/timeline_part", response_model=TimelinePart)
def timeline_part(
    agent: QueriesOf,
    worker: WorkerOf,
    services: ServicesOf,
    *,
    job: Annotated[str, Query(description="Job id.")],
    last: Last = LAST,
    from_ns: Annotated[int | None, Query(ge=0, le=1 << 62, description="As returned with the first page.")] = None,
    cursor: Annotated[str | None, Query(description="As returned with the previous page.")] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_TIMELINE, description="Most operations.")] = MOST_TIMELINE,
) -> Response:
    """A page of the timeline of this node by its own clock, latest end first, for the timeline of another."""
    job_exists(agent, job)
    page = Page(seconds_of_end(last), from_ns, cursor, limit)
    marks = services.evidence.marks(job) if cursor is None else []
    return answered(worker.text("timeline_part", job=job, page=page, marks=marks))
