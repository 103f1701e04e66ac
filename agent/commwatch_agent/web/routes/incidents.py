"""Routes of incidents: what is wrong, and what was."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Response
from fastapi.responses import HTMLResponse

from commwatch_agent.incidents.alerts import alerts_of
from commwatch_agent.incidents.answers import IncidentDetails, IncidentFilter, IncidentView, details_of, view_of
from commwatch_agent.incidents.incident import Incident
from commwatch_agent.job.merging import JobWide
from commwatch_agent.questions import incidents as questions
from commwatch_agent.questions.answer import ApiError, job_exists
from commwatch_agent.questions.incidents import no_incident
from commwatch_agent.questions.services import Services
from commwatch_agent.report.html_frame import page
from commwatch_agent.web.problems import ERRORS
from commwatch_agent.web.routes.params import (
    JobFilter,
    Limit,
    OthersOf,
    QueriesOf,
    Scope,
    ServicesOf,
    Span,
    WorkerOf,
    answered,
    sound_parameters,
)
from commwatch_alerts.export import runbook

pages = APIRouter()
router = APIRouter(prefix="/api/v1", responses=ERRORS, dependencies=[Depends(sound_parameters)])


@router.get("/incidents", response_model=list[IncidentView] | JobWide[list[IncidentView]])
def incidents(
    agent: QueriesOf,
    services: ServicesOf,
    worker: WorkerOf,
    others: OthersOf,
    span: Span,
    *,
    job: JobFilter = None,
    state: Annotated[
        list[Literal["pending", "open", "ended"]] | None, Query(description="May be repeated; default: all.")
    ] = None,
    kind: Annotated[str | None, Query(description="Only this kind.")] = None,
    severity: Annotated[
        Literal["info", "warning", "critical"] | None, Query(description="At least this severity.")
    ] = None,
    scope: Scope = "node",
    limit: Limit = 100,
) -> Response:
    """What is wrong, and what was: open incidents first, then pending and ended ones, at most ``limit`` of these.

    An incident that another one explains comes after that.
    """
    job_exists(agent, job)
    wanted = IncidentFilter(
        states=state, kind=kind, severity=severity, since=span.from_ns / 1e9, until=span.until_ns / 1e9
    )
    own = [view_of(each) for each in services.incidents.current() if job in (None, each.job_id) and wanted.holds(each)]
    heard = others.of_scope(scope, job, "incidents?job,state,kind,severity,since,until,limit")
    return answered(worker.text(questions.incidents, job, wanted=wanted, own=own, limit=limit, heard=heard))


@router.get("/incidents/{incident_id}", response_model=IncidentDetails)
def incident(services: ServicesOf, worker: WorkerOf, incident_id: str) -> Response:
    """One incident with its evidence."""
    own = next((details_of(each) for each in services.incidents.incidents() if each.id == incident_id), None)
    return answered(worker.text(questions.incident, incident_id=incident_id, own=own))


@pages.get("/incidents/{incident_id:path}", include_in_schema=False)
def incident_page(services: ServicesOf, worker: WorkerOf, incident_id: str) -> Response:
    """The page of an incident, for people: links of notifications lead here."""
    every = services.incidents.incidents()
    known = [each for each in every if incident_id in (each.id, each.consequence_of)]
    causes = {each.consequence_of for each in known if each.id == incident_id}
    own = known + [each for each in every if each.id in causes and each not in known]
    links = _links(services, known, incident_id)
    try:
        if re.fullmatch("[0-9a-f]{16}", incident_id) is None:
            raise no_incident(incident_id)
        heard = services.peers.ask(f"incidents/{incident_id}")
        found = worker.text(questions.incident_page, incident_id=incident_id, own=own, heard=heard, links=links)
    except ApiError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        text = "<p>No agent that this one knows has such an incident. The history keeps incidents as long as steps.</p>"
        body = f'{text}<p><a href="/">What is wrong now</a></p>'
        return HTMLResponse(page("No such incident", body), HTTPStatus.NOT_FOUND)
    return answered(found)


def _links(services: Services, known: list[Incident], incident_id: str) -> dict[str, list[tuple[str, str]]]:
    """Return names and addresses by kind: the section of the runbook, and what was captured when an alert of this incident fired."""
    alerts = services.evidence.linked([alert for each in known if each.id == incident_id for alert in alerts_of(each)])
    captured = [
        (f"captured when {alert.name} fired", f"/api/v1/alerts/{alert.id}/evidence")
        for alert in alerts
        if "evidence_url" in alert.annotations
    ]
    kinds = services.incidents.plan.table.kinds.values()
    return {kind.name: [("runbook", runbook("/runbook", kind.runbook)), *captured] for kind in kinds}
