"""Alerts and verdicts as log records: one when each begins, and one when it ends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import ScopeLogs, SeverityNumber

from commwatch_agent.analysis.verdicts import Verdict
from commwatch_agent.otlp.resource import JOB, SCOPE, put, resource
from commwatch_alerts.model import CRITICAL, FIRING, INFO, RESOLVED, WARNING, Alert

#: Most events that wait for the receiver; beyond them, the oldest are dropped.
MOST_WAITING = 1000
_SEVERITIES = {
    INFO: SeverityNumber.SEVERITY_NUMBER_INFO,
    WARNING: SeverityNumber.SEVERITY_NUMBER_WARN,
    CRITICAL: SeverityNumber.SEVERITY_NUMBER_ERROR,
}


@dataclass(frozen=True)
class Event:
    """The begin or the end of an alert or a verdict."""

    #: ``commwatch.alert.begin`` and similar.
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


def of_alert(alert: Alert) -> Event:
    """Return the begin of an alert that fires, or its end."""
    over = alert.state == RESOLVED
    at_s = alert.resolved_at if over else alert.fired_at
    about = {key: value for key, value in alert.annotations.items() if key != "summary" and value}
    return Event(
        f"commwatch.alert.{'end' if over else 'begin'}",
        alert.active_at if at_s is None else at_s,
        INFO if over else alert.labels.get("severity", WARNING),
        alert.annotations.get("summary") or alert.name,
        {**alert.labels, **about, "id": alert.id, "value": alert.value},
    )


def of_verdict(verdict: Verdict, at_s: float, *, over: bool) -> Event:
    """Return the begin or the end of a verdict, which was found at the Unix time ``at_s``."""
    about = {
        JOB: verdict.job_id,
        "kind": verdict.kind,
        "cause": verdict.cause,
        "group": verdict.group,
        "group_id": verdict.group_id,
        "op": verdict.op,
        "seq": verdict.seq,
        "ranks": verdict.ranks,
        "waiting": verdict.waiting,
        "since_s": verdict.since_s,
        "source": verdict.source,
        "cost_share": verdict.cost_share,
        "why": verdict.why,
    }
    return Event(
        f"commwatch.verdict.{'end' if over else 'begin'}",
        at_s,
        INFO if over else WARNING,
        verdict.says,
        {key: value for key, value in about.items() if value is not None and value != ""},
    )


class Events:
    """The events that the receiver does not have yet. Any thread may call this."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Event] = deque()
        self._firing: frozenset[str] = frozenset()
        self._verdicts: dict[tuple[object, ...], Verdict] = {}
        #: Events that were dropped, because too many waited, or because the receiver refused them.
        self.dropped = 0

    def note_alerts(self, alerts: Sequence[Alert]) -> None:
        """Take in all firing alerts of a round, and those resolved in it."""
        self.put_back(of_alert(alert) for alert in alerts if alert.id not in self._firing or alert.state == RESOLVED)
        self._firing = frozenset(alert.id for alert in alerts if alert.state == FIRING)

    def note_verdicts(self, verdicts: Iterable[Verdict], at_s: float) -> None:
        """Take in all present verdicts, at the Unix time ``at_s``."""
        found = {(each.job_id, each.group_id, each.kind, *each.ranks): each for each in verdicts}
        before, self._verdicts = self._verdicts, found
        self.put_back(of_verdict(each, at_s, over=True) for key, each in before.items() if key not in found)
        self.put_back(of_verdict(each, at_s, over=False) for key, each in found.items() if key not in before)

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
