"""Incidents as log records: one when each opens, gets worse, and ends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import ScopeLogs, SeverityNumber

from commwatch_agent.incidents.answers import view_of
from commwatch_agent.incidents.incident import Incident
from commwatch_agent.otlp.resource import JOB, SCOPE, put, resource
from commwatch_alerts.model import CRITICAL, INFO, SEVERITIES, WARNING

#: Most events that wait for the receiver; beyond them, the oldest are dropped.
MOST_WAITING = 1000
#: How incidents change.
OPENED, WORSE, ENDED = "opened", "worse", "ended"
_SEVERITIES = {
    INFO: SeverityNumber.SEVERITY_NUMBER_INFO,
    WARNING: SeverityNumber.SEVERITY_NUMBER_WARN,
    CRITICAL: SeverityNumber.SEVERITY_NUMBER_ERROR,
}


@dataclass(frozen=True)
class Event:
    """A change of an incident."""

    #: ``commwatch.incident.opened`` and similar.
    name: str
    #: Unix time in s.
    at_s: float
    #: One of ``SEVERITIES``.
    severity: str
    text: str
    #: ``job_id`` among them, if it concerns a job.
    attributes: Mapping[str, str | float | list[int]]


def request(events: Iterable[Event], attributes: Mapping[str, str], now_ns: int) -> ExportLogsServiceRequest:
    """Return events as one request, in their order.

    Args:
        attributes: of the agent's resource; events of a job have its ``job_id`` in addition.
        now_ns: Unix time.
    """
    made, scopes = ExportLogsServiceRequest(), dict[str, ScopeLogs]()
    for event in events:
        job = str(event.attributes.get(JOB, ""))
        if job not in scopes:
            of_job = made.resource_logs.add(resource=resource(attributes, job))
            scopes[job] = of_job.scope_logs.add(scope=SCOPE)
        record = scopes[job].log_records.add(
            time_unix_nano=int(event.at_s * 1e9),
            observed_time_unix_nano=now_ns,
            severity_number=_SEVERITIES[event.severity],
            severity_text=event.severity,
            event_name=event.name,
        )
        record.body.string_value = event.text
        for key, value in event.attributes.items():
            put(record.attributes.add(), key, value)
    return made


def of_incident(incident: Incident, change: str, at_s: float) -> Event:
    """Return that an incident has ``opened``, got ``worse`` or ``ended``."""
    view = view_of(incident)
    about = {
        "id": view.id,
        "kind": view.kind,
        "severity": view.severity,
        "cause": view.cause,
        "place": view.place,
        "remedy": view.remedy,
        "ranks": view.ranks,
        "waiting": view.waiting,
        "nodes": ", ".join(view.nodes),
        "group": view.group,
        "group_id": view.group_id,
        "op": view.op,
        "seq": view.seq,
        "began_at": view.began_at,
        "ended_at": view.ended_at,
        "outcome": view.outcome,
        "cost_rank_s": view.cost_rank_s,
        "share": view.share,
        "consequence_of": view.consequence_of,
    }
    known = {f"commwatch.incident.{name}": value for name, value in about.items() if value not in (None, "", [])}
    severity = INFO if change == ENDED else view.severity
    job = {JOB: view.job_id} if view.job_id else {}
    return Event(f"commwatch.incident.{change}", at_s, severity, f"{view.title}: {view.says}", {**job, **known})


class Events:
    """The events that the receiver does not have yet. Any thread may call this.

    Args:
        since_s: Unix time; incidents that ended before were sent by an earlier agent.
    """

    def __init__(self, since_s: float = 0.0) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Event] = deque()
        self._since_s = since_s
        self._known: dict[str, Incident] = {}
        #: Events that were dropped, because too many waited, or because the receiver refused them.
        self.dropped = 0

    def note(self, incidents: Iterable[Incident], now_s: float) -> None:
        """Take in the incidents in memory at a Unix time; between two calls, an incident may open and end."""
        before, self._known = self._known, {each.id: each for each in incidents if each.state != "pending"}
        self.put_back(
            event for each in self._known.values() for event in self._changes(before.get(each.id), each, now_s)
        )

    def _changes(self, before: Incident | None, now: Incident, now_s: float) -> Iterator[Event]:
        if before is None and now.ended_at is not None and now.ended_at < self._since_s:
            return
        if before is None or (before.ended_at is not None and now.ended_at is None):
            yield of_incident(now, OPENED, now.seen_at if before is None else now_s)
        elif SEVERITIES.index(now.severity) > SEVERITIES.index(before.severity):
            yield of_incident(now, WORSE, now_s)
        if now.ended_at is not None and (before is None or before.ended_at != now.ended_at):
            yield of_incident(now, ENDED, now.ended_at)

    def take(self) -> list[Event]:
        """Return all waiting events, which no longer wait."""
        with self._lock:
            taken = list(self._waiting)
            self._waiting.clear()
        return taken

    def drop(self, number: int) -> None:
        """Count events that were taken, and that the receiver refused."""
        with self._lock:
            self.dropped += number

    def put_back(self, events: Iterable[Event]) -> None:
        """Make events wait."""
        with self._lock:
            self._waiting = deque(sorted((*self._waiting, *events), key=lambda event: event.at_s))
            while len(self._waiting) > MOST_WAITING:
                self._waiting.popleft()
                self.dropped += 1
