"""The REST query API: read-only, JSON, errors as problem details (RFC 9457). Response models stand beside the routes."""

from __future__ import annotations

import csv
import io
import re
import sqlite3
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from html import escape
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException

from commwatch import __version__
from commwatch.operations import Operation, Place, place_of
from commwatch.pages import page, table
from commwatch.store import StoreError
from commwatch.summary import DIMENSIONS, Row
from commwatch.views import Agent, GroupView, JobView, RankView, StepView

MOST_ROWS = 10_000
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Problem(Exception):
    """What the caller did wrong, as problem details."""

    def __init__(self, status: HTTPStatus, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


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


@dataclass(frozen=True)
class Summary:
    """Operations added up. ``since`` and ``until`` are what was really covered: whole roll-ups of 10 s (older: 5 min)."""

    since: float | None
    until: float | None
    by: list[str]
    rows: list[Row]


@dataclass(frozen=True)
class Operations:
    """Single operations, newest first; give ``cursor`` back for the next page, ``None`` = there is none."""

    operations: list[Operation]
    cursor: str | None


@dataclass(frozen=True)
class Collective:
    """One collective, its ranks side by side."""

    group_id: str
    seq: int
    #: All ranks of the group are here, in one symmetric operation: transfer and waits are defined.
    complete: bool
    transfer_s: float | None
    #: The rank the others waited for, and how long (their median).
    late_rank: int | None
    lateness_s: float | None
    ranks: list[RankInCollective]


@dataclass(frozen=True)
class RankInCollective:
    """One rank's part; ``wait_s``: the part of its duration spent waiting for the last rank."""

    wait_s: float | None
    operation: Operation


@dataclass(frozen=True)
class ProblemDetails:
    """What went wrong (RFC 9457)."""

    type: str
    title: str
    status: int
    #: Names what was wrong, and what would be right.
    detail: str


def _known_parameters(request: Request) -> None:
    """A misspelt parameter must not pass for a filter that found everything."""
    route = request.app.openapi()["paths"][request.scope["route"].path]["get"]
    known = [parameter["name"] for parameter in route.get("parameters", ()) if parameter["in"] == "query"]
    for name in request.query_params:
        if name not in known:
            raise Problem(HTTPStatus.BAD_REQUEST, f"{name}: no such parameter; there are {', '.join(known) or 'none'}")


_PROBLEM: dict[str, Any] = {
    "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "A parameter is wrong; the detail names it.", **_PROBLEM},
    404: {"description": "There is no such thing; the detail names it.", **_PROBLEM},
    422: {"description": "A parameter is not of its type; the detail names it.", **_PROBLEM},
    503: {"description": "The history cannot be read.", **_PROBLEM},
}
router = APIRouter(prefix="/api/v1", responses=_ERRORS, dependencies=[Depends(_known_parameters)])


def _agent_of(request: Request) -> Agent:
    agent = request.app.state.agent
    assert isinstance(agent, Agent)
    return agent


AgentOf = Annotated[Agent, Depends(_agent_of)]


def _job_exists(agent: Agent, job: str | None) -> None:
    if job is not None and not agent.has_job(job):
        raise Problem(HTTPStatus.NOT_FOUND, f"no job '{job}' in the history; /api/v1/jobs lists them")


@router.get("/jobs")
def jobs(agent: AgentOf) -> list[JobView]:
    """The jobs of this node, newest first."""
    return agent.jobs()


@router.get("/summary")
def summary(
    agent: AgentOf,
    span: Span,
    job: JobFilter = None,
    by: Annotated[str, Query(description=f"Comma-separated, of {', '.join(DIMENSIONS)}.")] = "group,op",
    group: str | None = None,
    op: str | None = None,
    rank: int | None = None,
) -> Summary:
    """Operations by group and op, or by what else is asked: counts, bytes, percentiles, bandwidths, waits."""
    dimensions = [part.strip() for part in by.split(",") if part.strip()]
    for dimension in dimensions:
        if dimension not in DIMENSIONS:
            raise Problem(
                HTTPStatus.BAD_REQUEST, f"by={dimension}: unknown dimension; there are {', '.join(DIMENSIONS)}"
            )
    _job_exists(agent, job)
    covered, rows = agent.summary(
        span.from_ns, span.until_ns, dimensions, {"job_id": job, "group": group, "op": op, "rank": rank}
    )
    return Summary(covered[0], covered[1], dimensions, rows)


@router.get("/ops", response_model=Operations, responses={200: {"content": {"text/csv": {}}}})
def ops(
    agent: AgentOf,
    span: Span,
    job: JobFilter = None,
    group: str | None = None,
    group_id: str | None = None,
    op: str | None = None,
    rank: int | None = None,
    seq: Annotated[int | None, Query(ge=0)] = None,
    min_seconds: Annotated[float | None, Query(ge=0, description="Only operations that took at least so long.")] = None,
    limit: Limit = 100,
    cursor: Annotated[str | None, Query(description="As returned by the page before.")] = None,
    format: Annotated[Literal["json", "csv"], Query()] = "json",  # noqa: A002 - the name in the URL
) -> Operations | Response:
    """Single operations, newest first."""
    _job_exists(agent, job)
    before: Place | None = None
    if cursor is not None:
        try:
            before = place_of(cursor)
        except ValueError:
            raise Problem(HTTPStatus.BAD_REQUEST, f"cursor={cursor}: not one this API has given out") from None
    same = {"job_id": job, "group": group, "group_id": group_id, "op": op, "rank": rank, "seq": seq}
    checks = [(name, value) for name, value in same.items() if value is not None]

    def wanted(operation: Operation) -> bool:
        slow = min_seconds is None or (operation.duration_s is not None and operation.duration_s >= min_seconds)
        return slow and all(getattr(operation, name) == value for name, value in checks)

    found = agent.operations(span.from_ns, span.until_ns, before, wanted, limit + 1)
    page = found[:limit]
    following = page[-1].id if len(found) > limit else None
    if format == "csv":
        return Response(_csv(page), media_type="text/csv", headers={"X-Next-Cursor": following} if following else None)
    return Operations(page, following)


@router.get("/collectives/{group_id}/{seq}")
def collective(agent: AgentOf, group_id: str, seq: Annotated[int, Path(ge=0, lt=1 << 32)]) -> Collective:
    """The ranks of one collective side by side."""
    found = agent.collective(group_id, seq)
    if found is None:
        raise Problem(
            HTTPStatus.NOT_FOUND,
            f"no collective {seq} of group '{group_id}' in the raw history; /api/v1/groups lists the groups",
        )
    operations, waits = found
    return Collective(
        group_id=group_id,
        seq=seq,
        complete=waits is not None,
        transfer_s=None if waits is None else waits.transfer_ns / 1e9,
        late_rank=None if waits is None else waits.late.rank,
        lateness_s=None if waits is None else waits.lateness_ns / 1e9,
        ranks=[
            RankInCollective(
                next((wait / 1e9 for part, wait in waits.waits if part.rank == o.rank), None)
                if waits is not None
                else None,
                o,
            )
            for o in operations
        ],
    )


@router.get("/steps")
def steps(
    agent: AgentOf, span: Span, job: JobFilter = None, rank: int | None = None, limit: Limit = 100
) -> list[StepView]:
    """Training steps, newest first."""
    _job_exists(agent, job)
    return agent.steps(span.from_ns, span.until_ns, job, rank, limit)


@router.get("/ranks")
def ranks(agent: AgentOf, job: JobFilter = None) -> list[RankView]:
    """The ranks of this node: state, last collective, operations in flight and for how long."""
    _job_exists(agent, job)
    return agent.ranks(job)


@router.get("/groups")
def groups(agent: AgentOf, job: JobFilter = None) -> list[GroupView]:
    """The process groups that were used."""
    _job_exists(agent, job)
    return agent.groups(job)


def _csv(operations: list[Operation]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Operation)])
    writer.writeheader()
    writer.writerows(asdict(operation) for operation in operations)
    return text.getvalue()


def application(
    agent: Agent, registry: CollectorRegistry, healthy: Callable[[], str | None], ready: Callable[[], str | None]
) -> FastAPI:
    """The whole web face of an agent.

    Args:
        healthy: says why the agent is broken, ``None`` if it is not.
        ready: says why it cannot answer yet or properly, ``None`` if it can.
    """
    app = FastAPI(
        title="commwatch",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        description="The communication of the training jobs on this node.",
    )
    app.state.agent = agent
    app.include_router(router)
    _problems(app)
    _add_schema(app, ProblemDetails)

    @app.get("/metrics", response_class=PlainTextResponse)
    def metrics(request: Request) -> Response:
        """For Prometheus."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"Content-Type": content_type})

    @app.get("/healthz", response_class=PlainTextResponse)
    def healthz() -> Response:
        """200 while the agent works."""
        return _state(healthy())

    @app.get("/readyz", response_class=PlainTextResponse)
    def readyz() -> Response:
        """200 once the agent drains rings and keeps history."""
        return _state(ready())

    @app.get("/docs", include_in_schema=False, response_class=HTMLResponse)
    def docs() -> str:
        return _docs_page(app.openapi())

    @app.get("/", include_in_schema=False, response_class=HTMLResponse)
    def root() -> str:
        links = "".join(f'<li><a href="{path}">{path}</a></li>' for path in ("/docs", "/metrics", "/api/v1/jobs"))
        return page("commwatch", f"<p>The agent runs.</p><ul>{links}</ul>")

    return app


def _add_schema(app: FastAPI, model: type) -> None:
    """Put a model that only error answers use among the components of the API's description."""
    build = app.openapi

    def openapi() -> dict[str, Any]:
        schema = build()
        schema["components"]["schemas"][model.__name__] = TypeAdapter(model).json_schema()
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def _state(trouble: str | None) -> Response:
    return PlainTextResponse(
        f"{trouble or 'ok'}\n", HTTPStatus.OK if trouble is None else HTTPStatus.SERVICE_UNAVAILABLE
    )


def _problems(app: FastAPI) -> None:
    def answer(status: int, detail: str) -> JSONResponse:
        body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
        return JSONResponse(body, status, media_type="application/problem+json")

    @app.exception_handler(Problem)
    async def problem(_: Request, error: Problem) -> JSONResponse:
        return answer(error.status, error.detail)

    @app.exception_handler(StoreError)
    @app.exception_handler(sqlite3.Error)
    async def unreadable(_: Request, error: Exception) -> JSONResponse:
        return answer(HTTPStatus.SERVICE_UNAVAILABLE, f"the history cannot be read: {error}")

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        detail = (
            f"there is nothing at {request.url.path}; /docs lists what there is"
            if error.status_code == HTTPStatus.NOT_FOUND
            else str(error.detail)
        )
        response = answer(error.status_code, detail)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        what = "; ".join(
            f"{'.'.join(str(part) for part in e['loc'][1:])}={e.get('input')}: {e['msg']}" for e in error.errors()
        )
        return answer(HTTPStatus.UNPROCESSABLE_ENTITY, what)


def _docs_page(schema: dict[str, Any]) -> str:
    """The routes as one plain page: nothing from elsewhere, so it also works where there is no way out."""
    body = [
        '<p>Schemas of all answers: <a href="/openapi.json">openapi.json</a>. Errors: problem details (RFC 9457).</p>'
    ]
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            body.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            body.append(f"<p>{escape(route.get('description', ''))}</p>")
            rows = [(p["name"], p["in"], p.get("description", "")) for p in route.get("parameters", ())]
            body.append(table((), rows))
    return page("commwatch API", "\n".join(body))
