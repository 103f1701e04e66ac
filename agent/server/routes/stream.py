"""``/api/v1/stream``: what the live page shows, as server-sent events."""

from __future__ import annotations

from fastapi import APIRouter, Depends
from fastapi.responses import StreamingResponse

from commwatch.server.event_stream import EventStream
from commwatch.server.problems import ERRORS
from commwatch.server.routes.params import JobFilter, sound_parameters


def router(events: EventStream) -> APIRouter:
    """Return the route; all its clients share ``events``."""
    routes = APIRouter(prefix="/api/v1", responses=ERRORS, dependencies=[Depends(sound_parameters)])

    @routes.get("/stream", response_class=StreamingResponse, responses={200: {"content": {"text/event-stream": {}}}})
    async def stream(job: JobFilter = None) -> StreamingResponse:
        """What the page at `/` shows, as server-sent events: `past` once, `moment` each second, others less often."""
        headers = {"X-Accel-Buffering": "no"}
        return StreamingResponse(events.follow(job), media_type="text/event-stream", headers=headers)

    return routes
