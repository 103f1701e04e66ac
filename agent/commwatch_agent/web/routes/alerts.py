"""Routes of the alerts that the agent itself has raised."""

from __future__ import annotations

from http import HTTPStatus
from typing import Literal

from fastapi import APIRouter, Depends, Response

from commwatch_agent.incidents.alerts import alert_view
from commwatch_agent.job.merging import JobWide
from commwatch_agent.model.api_views import AlertsView
from commwatch_agent.questions import incidents as questions
from commwatch_agent.questions.answer import ApiError, job_exists, text_of
from commwatch_agent.web.problems import ERRORS
from commwatch_agent.web.routes.params import (
    JobFilter,
    Limit,
    OthersOf,
    QueriesOf,
    Scope,
    ServicesOf,
    answered,
    sound_parameters,
)
from commwatch_alerts.model import Alert

router = APIRouter(prefix="/api/v1", responses=ERRORS, dependencies=[Depends(sound_parameters)])


@router.get("/alerts", response_model=AlertsView | JobWide[AlertsView])
def alerts(
    agent: QueriesOf,
    services: ServicesOf,
    others: OthersOf,
    *,
    scope: Scope = "node",
    state: Literal["pending", "firing", "resolved"] | None = None,
    severity: Literal["info", "warning", "critical"] | None = None,
    job: JobFilter = None,
    limit: Limit = 100,
) -> Response:
    """The alerts that the agent has raised by itself: active and resolved ones, at most ``limit`` of each."""

    def wanted(alert: Alert) -> bool:
        return (
            state in (None, alert.state)
            and severity in (None, alert.labels.get("severity"))
            and job in (None, alert.labels.get("job_id"))
        )

    active, past = ([alert for alert in some if wanted(alert)] for some in services.incidents.alerts())
    if not active and not past:
        job_exists(agent, job)
    active.sort(key=lambda alert: alert.active_at)
    shown = (services.evidence.linked(some[:limit]) for some in (active, past))
    own = AlertsView(*([alert_view(alert) for alert in some] for some in shown))
    if scope == "node":
        return answered(text_of(own))
    heard = others.ask("alerts?state,severity,job,limit")
    return answered(services.worker.text(questions.alerts, own=own, limit=limit, heard=heard))


@router.get("/alerts/{alert_id}/evidence")
def alert_evidence(services: ServicesOf, alert_id: str) -> Response:
    """Evidence captured when an alert began to fire: ranks, verdicts, operations, steps, stacks, messages, counters."""
    alert = next((alert for some in services.incidents.alerts() for alert in some if alert.id == alert_id), None)
    if alert is None:
        raise ApiError(HTTPStatus.NOT_FOUND, f"no alert {alert_id}; /api/v1/alerts lists the alerts")
    try:
        found = services.evidence.read(alert)
    except OSError as error:
        detail = f"the evidence of alert {alert_id} cannot be read: {error.strerror}"
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, detail) from None
    if found is None:
        raise ApiError(HTTPStatus.NOT_FOUND, f"no evidence of alert {alert_id}, or none yet")
    return Response(found, media_type="application/json")
