"""The alerts of an incident, in the form of Alertmanager's: one for each rule of the table that holds for it. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from commwatch_agent.incidents.incident import AlertState, Incident
from commwatch_alerts.model import FIRING, PENDING, RESOLVED, Alert


def alerts_of(incident: Incident) -> Iterator[Alert]:
    """Yield the alerts of an incident."""
    for each in incident.alerts:
        yield Alert(
            name=each.name,
            labels=each.labels,
            annotations=each.annotations,
            value=each.value,
            state=_state(each),
            active_at=each.active_at,
            fired_at=each.fired_at,
            resolved_at=each.resolved_at,
        )


def _state(each: AlertState) -> str:
    if each.resolved_at is not None:
        return RESOLVED
    return PENDING if each.fired_at is None else FIRING
