"""The incidents of a job as marks of a timeline. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from commwatch_agent.incidents.incident import Incident
from commwatch_agent.report.chrome_trace import TraceMark


def marks_of(incidents: Iterable[Incident]) -> Iterator[TraceMark]:
    """Yield the incidents at their begin, for each rank that they name, and their alerts when they began to fire."""
    for incident in incidents:
        about = {"says": incident.says, "severity": incident.severity, "id": incident.id}
        for rank in incident.ranks or (None,):
            yield TraceMark(int(incident.began_at * 1e9), f"incident {incident.kind}", rank, about)
        for alert in incident.alerts:
            if alert.fired_at is not None:
                summary = {"summary": alert.annotations.get("summary", "")}
                yield TraceMark(int(alert.fired_at * 1e9), f"alert {alert.name}", None, summary)
