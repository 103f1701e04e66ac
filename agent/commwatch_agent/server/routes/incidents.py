"""Routes of incidents: what is wrong, and what was."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Response

from commwatch_agent.incidents.answers import IncidentDetails, IncidentFilter, IncidentView, details_of, view_of
from commwatch_agent.nodes.merging import JobWide
from commwatch_agent.server.history_queries import job_exists
from commwatch_agent.server.problems import ERRORS
from commwatch_agent.server.routes.params import (
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
    the_job,
)

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
    own = [
        view_of(each) for each in services.incidents.incidents() if job in (None, each.job_id) and wanted.holds(each)
    ]
    about = {"wanted": wanted, "own": own, "limit": limit}
    if scope == "node":
        return answered(worker.text("incidents", job=job, **about))
    heard = others.ask("incidents?job,state,kind,severity,since,until,limit")
    return answered(worker.text("job_incidents", job=the_job(job), **about, heard=heard))


@router.get("/incidents/{incident_id}", response_model=IncidentDetails)
def incident(services: ServicesOf, worker: WorkerOf, incident_id: str) -> Response:
    """One incident with its evidence."""
    own = next((details_of(each) for each in services.incidents.incidents() if each.id == incident_id), None)
    return answered(worker.text("incident", incident_id=incident_id, own=own))
