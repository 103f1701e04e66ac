"""``/api/v1/stream``: what the live page shows, as server-sent events."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse

from commwatch_agent.analysis.timeline import NodeBars
from commwatch_agent.questions import jobs as questions
from commwatch_agent.questions.answer import ApiError
from commwatch_agent.questions.live_feed import LiveFeed, Moment
from commwatch_agent.questions.node_now import NodeNow
from commwatch_agent.web.event_stream import EventStream
from commwatch_agent.web.problems import ERRORS
from commwatch_agent.web.routes.params import (
    JobFilter,
    QueriesOf,
    Since,
    Until,
    WorkerOf,
    answered,
    now_of,
    sound_parameters,
    window,
)

_T = TypeVar("_T")


router = APIRouter(prefix="/api/v1", responses=ERRORS, dependencies=[Depends(sound_parameters)])


async def _live(request: Request) -> LiveFeed:
    live = request.app.state.live
    assert isinstance(live, LiveFeed)
    return live


async def _events(request: Request) -> EventStream:
    events = request.app.state.events
    assert isinstance(events, EventStream)
    return events


_LiveOf = Annotated[LiveFeed, Depends(_live)]
#: All clients of the stream share it.
_EventsOf = Annotated[EventStream, Depends(_events)]


@router.get("/stream", response_class=StreamingResponse, responses={200: {"content": {"text/event-stream": {}}}})
async def stream(events: _EventsOf, job: JobFilter = None) -> StreamingResponse:
    """What the page at `/` shows, as server-sent events: `past` once, `moment` each second, others less often."""
    headers = {"X-Accel-Buffering": "no"}
    return StreamingResponse(events.follow(job), media_type="text/event-stream", headers=headers)


@router.get("/moment", response_model=Moment)
def moment(
    live: _LiveOf, job: Annotated[str | None, Query(description="Job id; default: the latest.")] = None
) -> Response:
    """What the page at `/` shows of a job at this moment: shares, step time, ranks, verdicts, alerts."""
    return Response(live.moment(job), media_type="application/json")


@router.get("/now")
def now(live: _LiveOf, job: Annotated[str, Query(description="Job id.")]) -> NodeNow:
    """What this node contributes to the live page of a job that another agent shows."""
    return _in_memory(live.node(job), job)


@router.get("/bars", response_model=NodeBars)
def bars(
    live: _LiveOf,
    worker: WorkerOf,
    agent: QueriesOf,
    *,
    job: Annotated[str, Query(description="Job id.")],
    since: Since = None,
    until: Until = None,
) -> NodeBars | Response:
    """The latest operations of a job's ranks, for the timeline on the live page of another agent.

    With `since` or `until`: the latest that ended in this time.
    """
    if since is None and until is None:
        return _in_memory(live.bars(job), job)
    span = window(since, until, now_of(agent, job, since, until))
    return answered(worker.text(questions.bars, span.from_ns, span.until_ns, job))


def _in_memory(found: _T | None, job: str) -> _T:
    if found is None:
        raise ApiError(HTTPStatus.NOT_FOUND, f"no job '{job}' in memory; /api/v1/jobs lists the jobs")
    return found
