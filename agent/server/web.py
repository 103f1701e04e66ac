"""The web face of an agent: the query API, ``/metrics``, ``/healthz``, ``/readyz`` and ``/docs``."""

from __future__ import annotations

import time
from collections.abc import Callable
from html import escape
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from fastapi.staticfiles import StaticFiles
from prometheus_client import CollectorRegistry

from commwatch import __version__
from commwatch.alerts.catalogue import shipped
from commwatch.analysis.queries import QueryService
from commwatch.report.html_frame import page, prose, table
from commwatch.server.live_feed import LiveFeed
from commwatch.server.problems import answer, answer_problems
from commwatch.server.routes import alerts, diagnosis, gpus, jobs, profiles, stream, witnesses
from commwatch.server.routes.stream import Feed, Topic
from commwatch.server.scrape import Scrape
from commwatch.server.services import Watchers
from commwatch.server.worker import Worker

_STATIC = Path(__file__).parent / "static"


def application(
    agent: QueryService,
    worker: Worker,
    watchers: Watchers,
    registry: CollectorRegistry,
    healthy: Callable[[], str | None],
    ready: Callable[[], str | None],
    ending: Callable[[], bool],
) -> FastAPI:
    """The whole web face of an agent.

    Args:
        worker: answers the questions that read much of the history.
        watchers: what runs beside the intake.
        healthy: says why the agent is broken, ``None`` if it is not.
        ready: says why it cannot answer yet or properly, ``None`` if it can.
        ending: whether the agent is about to end: then streams do, too.
    """
    app = FastAPI(
        title="commwatch",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        description="The communication of the training jobs on this node.",
    )
    app.state.agent = agent
    app.state.worker = worker
    app.state.logs = watchers.logs
    app.state.profiles = watchers.profiles
    app.state.gpus = watchers.gpus
    app.state.witnesses = watchers.witnesses
    app.state.host = watchers.host
    app.state.alerts = watchers.alerts
    app.state.evidence = watchers.evidence
    app.state.scraped = (None, None)
    app.state.trouble = ready
    look = LiveFeed(agent, worker, watchers, ready)
    topics = [
        Topic("moment", look.moment, 1.0),
        Topic("timeline", look.timeline, 2.0),
        Topic("operations", look.operations, 5.0),
        Topic("told", look.told, 10.0, "worker"),
    ]
    app.state.feed = Feed(Topic("past", look.past, 0.0, "history"), topics, ending)
    for part in (jobs, alerts, diagnosis, gpus, profiles, stream, witnesses):
        app.include_router(part.router)
    answer_problems(app)

    scrape = Scrape(registry)

    # These three are no plain functions: they need none of the threads that answers are worked out in.
    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """For Prometheus."""
        app.state.scraped = (time.time(), request.headers.get("user-agent"))
        try:
            text, content_type = await scrape.page(request.headers.get("accept", ""))
        except TimeoutError:
            return answer(HTTPStatus.SERVICE_UNAVAILABLE, "the metrics are not ready in time")
        return Response(text, headers={"Content-Type": content_type})

    @app.get("/healthz", response_class=PlainTextResponse)
    async def healthz() -> Response:
        """200 while the agent works."""
        return _state(healthy())

    @app.get("/readyz", response_class=PlainTextResponse)
    async def readyz() -> Response:
        """200 once the agent drains rings and keeps history."""
        return _state(ready())

    @app.get("/docs", include_in_schema=False, response_class=HTMLResponse)
    def docs() -> str:
        return _docs_page(app.openapi())

    @app.get("/runbook", include_in_schema=False, response_class=HTMLResponse)
    def runbook() -> str:
        return prose("Runbook", shipped("runbook.md"))

    @app.get("/", include_in_schema=False)
    def live_page() -> FileResponse:
        return FileResponse(_STATIC / "live.html")

    # Links, as an editable install makes them, lead to our own files.
    app.mount("/static", StaticFiles(directory=_STATIC, follow_symlink=True), name="static")
    return app


def _state(trouble: str | None) -> Response:
    return PlainTextResponse(
        f"{trouble or 'ok'}\n", HTTPStatus.OK if trouble is None else HTTPStatus.SERVICE_UNAVAILABLE
    )


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
