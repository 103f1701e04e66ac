"""What the routes of the query API share: times, windows, filters, and where the answers come from."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from http import HTTPStatus
from typing import Annotated, TypeVar

from fastapi import Depends, Query, Request, Response

from commwatch.answers import Agent
from commwatch.host import HostWatch
from commwatch.nccl import NcclLogs
from commwatch.questions import Problem, Text
from commwatch.worker import Worker

MOST_ROWS = 10_000
_T = TypeVar("_T")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_time(text: str, now_s: float) -> float:
    """Unix seconds, an ISO 8601 time, or an age such as ``15m``; raises ``ValueError``."""
    age = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])", text)
    if age:
        return now_s - float(age[1]) * _SECONDS[age[2]]
    if re.fullmatch(r"\d{1,12}(\.\d{1,9})?", text):
        return float(text)
    moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


@dataclass(frozen=True)
class Window:
    """The stretch of time a query is about, in ns of wall time."""

    from_ns: int
    until_ns: int


def window(
    since: Annotated[
        str | None,
        Query(description="Begin: Unix seconds, ISO 8601, or an age such as 15m. Default: all that is kept."),
    ] = None,
    until: Annotated[str | None, Query(description="End, in the same forms. Default: now.")] = None,
) -> Window:
    """Query parameters ``since`` and ``until``."""
    now = time.time()
    bounds = []
    for name, text, default in (("since", since, 0.0), ("until", until, now + 1)):
        try:
            value = default if text is None else parse_time(text, now)
        except (ValueError, OverflowError):
            raise Problem(
                HTTPStatus.BAD_REQUEST, f"{name}={text}: give Unix seconds, an ISO 8601 time, or an age such as 15m"
            ) from None
        bounds.append(int(min(max(value, 0), 9e9) * 1e9))
    if bounds[0] > bounds[1]:
        raise Problem(HTTPStatus.BAD_REQUEST, f"since={since} is later than until={until or 'now'}")
    return Window(*bounds)


Span = Annotated[Window, Depends(window)]
JobFilter = Annotated[str | None, Query(description="Job id; default: all jobs.")]
Limit = Annotated[int, Query(ge=1, le=MOST_ROWS, description="Most rows to return.")]


def known_parameters(request: Request) -> None:
    """A misspelt parameter must not pass for a filter that found everything."""
    route = request.app.openapi()["paths"][request.scope["route"].path][request.method.lower()]
    known = [parameter["name"] for parameter in route.get("parameters", ()) if parameter["in"] == "query"]
    for name in request.query_params:
        if name not in known:
            raise Problem(HTTPStatus.BAD_REQUEST, f"{name}: no such parameter; there are {', '.join(known) or 'none'}")


def of_app(name: str, kind: type[_T]) -> Callable[[Request], _T]:
    """What ``application`` has left for the routes under a name."""

    def get(request: Request) -> _T:
        found = getattr(request.app.state, name)
        assert isinstance(found, kind)
        return found

    return get


AgentOf = Annotated[Agent, Depends(of_app("agent", Agent))]
LogsOf = Annotated[NcclLogs, Depends(of_app("logs", NcclLogs))]
HostOf = Annotated[HostWatch, Depends(of_app("host", HostWatch))]
WorkerOf = Annotated[Worker, Depends(of_app("worker", Worker))]


def answered(text: Text) -> Response:
    """What the worker has answered, as it is."""
    return Response(text.body, headers=dict(text.headers), media_type=text.media_type)
