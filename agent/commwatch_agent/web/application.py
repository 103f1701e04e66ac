"""The web application of an agent.

It serves the query API with its event stream, ``/metrics``, ``/healthz`` and ``/readyz``, and the pages: ``/`` (the live page),
``/incidents/ID``, ``/runbook`` and ``/docs``. ``gate.py`` checks each request before the application sees it.
"""

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
from commwatch_agent.model.api_views import is_prometheus
from commwatch_agent.questions.live_feed import LiveFeed
from commwatch_agent.questions.services import Services
from commwatch_agent.report.html_frame import page, prose, table
from commwatch_agent.web.event_stream import EventStream, Topic
from commwatch_agent.web.problems import answer, answer_problems
from commwatch_agent.web.routes import (
    alerts,
    diagnosis,
    gpus,
    incidents,
    jobs,
    profiles,
    reports,
    stream,
    timeline,
    whatif,
    witnesses,
)
from commwatch_agent.web.routes.runs import RunQuestions
from commwatch_agent.web.scrape import Scrape
from commwatch_alerts.catalogue import shipped

_STATIC = Path(__file__).parent / "static"


def application(services: Services, registry: CollectorRegistry) -> FastAPI:
    """Return the web application of an agent; ``registry`` holds its metrics."""
    app = FastAPI(
        title="commwatch",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        description="The communication of the training jobs on this node.",
    )
    app.state.services = services
    app.state.live = live = LiveFeed(services)
    app.state.events = _live_events(live, services.ending)
    parts = (jobs, alerts, diagnosis, gpus, incidents, profiles, reports, timeline, whatif, witnesses, stream)
    for router in (*(part.router for part in parts), incidents.pages):
        app.router.routes += router.routes  # ``include_router`` would copy them with their models, which takes 4 MB
    answer_problems(app)
    app.add_middleware(RunQuestions, queries=services.queries)
    _add_monitoring(app, services, Scrape(registry))
    _add_pages(app)
    return app


def _live_events(live: LiveFeed, ending: Callable[[], bool]) -> EventStream:
    """Return the events of the live page, with the period in seconds of each topic. docs/api.md has the topics' names."""
    topics = [
        Topic("moment", live.moment, 1.0),
        Topic("timeline", live.timeline, 2.0),
        Topic("operations", live.operations, 5.0, "nodes"),
        Topic("insights", live.insights, 10.0, "worker"),
    ]
    return EventStream(Topic("past", live.past, 0.0, "history"), topics, ending)


def _add_monitoring(app: FastAPI, services: Services, scrape: Scrape) -> None:
    """Add metrics and health. They are coroutines, so that they need none of the threads in which routes run."""

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """All metrics, in the text format of Prometheus or OpenMetrics."""
        client = request.headers.get("user-agent")
        if is_prometheus(client) or not is_prometheus(services.scraped[1]):  # a look by hand does not hide it
            services.scraped = (time.time(), client)
        try:
            text, content_type = await scrape.page(request.headers.get("accept", ""))
        except TimeoutError:
            return answer(HTTPStatus.SERVICE_UNAVAILABLE, "the metrics were not ready in time")
        return Response(text, headers={"Content-Type": content_type})

    @app.get("/healthz", response_class=PlainTextResponse)
    async def healthz() -> Response:
        """200 while the agent works, else 503."""
        return _state(services.healthy())

    @app.get("/readyz", response_class=PlainTextResponse)
    async def readyz() -> Response:
        """200 while the agent drains the rings and writes the history, else 503."""
        return _state(services.ready())


def _add_pages(app: FastAPI) -> None:
    """Add what people open in a browser: the live page, the runbook, and the description of the API."""

    @app.get("/docs", include_in_schema=False, response_class=HTMLResponse)
    def docs() -> str:
        return _docs_page(app.openapi())

    @app.get("/runbook", include_in_schema=False, response_class=HTMLResponse)
    def runbook() -> str:
        return prose(shipped("runbook.md"))

    @app.get("/", include_in_schema=False)
    def live_page() -> FileResponse:
        return FileResponse(_STATIC / "live.html")

    # Follows links, because an editable install consists of links to our own files.
    app.mount("/static", StaticFiles(directory=_STATIC, follow_symlink=True), name="static")


def _state(trouble: str | None) -> Response:
    return PlainTextResponse(
        f"{trouble or 'ok'}\n", HTTPStatus.OK if trouble is None else HTTPStatus.SERVICE_UNAVAILABLE
    )


def _docs_page(schema: dict[str, Any]) -> str:
    """Return the routes as one plain page without external resources, so that it works without internet access."""
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
