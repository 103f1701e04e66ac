"""The alerts of an incident, in the form of Alertmanager's: one for each rule of the table that holds for it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from commwatch_agent.incidents.incident import JOB_ENDED, AlertState, Incident
from commwatch_agent.incidents.words import end, title
from commwatch_agent.model.api_views import AlertView
from commwatch_alerts.model import FIRING, PENDING, RESOLVED, SEVERITIES, Alert


def alerts_of(incident: Incident) -> Iterator[Alert]:
    """Yield the alerts of an incident; those that are over have its end as the annotation ``outcome``."""
    outcome = end(incident)
    for each in incident.alerts:
        over = {"outcome": outcome} if outcome and each.resolved_at is not None else {}
        yield Alert(
            name=each.name,
            labels=each.labels,
            annotations={**each.annotations, **over},
            value=each.value,
            state=_state(each),
            active_at=each.active_at,
            fired_at=each.fired_at,
            resolved_at=each.resolved_at,
        )


def alert_view(alert: Alert) -> AlertView:
    """Return an alert as the API shows it."""
    return AlertView(
        id=alert.id,
        name=alert.name,
        severity=alert.labels.get("severity", ""),
        state=alert.state,
        labels=alert.labels,
        annotations=alert.annotations,
        value=alert.value if math.isfinite(alert.value) else None,
        active_at=alert.active_at,
        fired_at=alert.fired_at,
        resolved_at=alert.resolved_at,
    )


def is_explained(incident: Incident, by_id: Mapping[str, Incident]) -> bool:
    """Return whether an incident with an alert that is at least as severe explains this one: a message on that is enough.

    That incident is open, or both ended with their job.
    """
    cause = by_id.get(incident.consequence_of or "")
    if cause is None or (cause.ended_at is not None and incident.ended_at is None):
        return False
    return any(
        (each.state == FIRING or (each.state == RESOLVED and cause.outcome == JOB_ENDED and _lasted(each)))
        and SEVERITIES.index(each.labels["severity"]) >= SEVERITIES.index(incident.severity)
        for each in alerts_of(cause)
    )


def with_cause(alert: Alert, incident: Incident, by_id: Mapping[str, Incident]) -> Alert:
    """Return an alert with the incident that explains its own, for which no alert may have been sent: its job may have ended before."""
    cause = by_id.get(incident.consequence_of or "")
    if cause is None or alert.state != FIRING:
        return alert
    because = f"It follows from: {title(cause.kind, cause.ranks, cause.cause, cause.evidence)}, {cause.says}."
    where = " ".join(filter(None, (alert.annotations.get("where", ""), because)))
    return replace(alert, annotations={**alert.annotations, "where": where})


def _lasted(alert: Alert) -> bool:
    """Return whether an alert that is over fired for long enough to be delivered."""
    return (alert.resolved_at or 0.0) > (alert.fired_at or 0.0)


def _state(each: AlertState) -> str:
    if each.resolved_at is not None:
        return RESOLVED
    return PENDING if each.fired_at is None else FIRING
