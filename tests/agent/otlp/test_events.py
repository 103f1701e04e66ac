"""Incidents as log records: one for each change, and a bound on those that wait."""

from __future__ import annotations

from dataclasses import replace

from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, SeverityNumber

from commwatch_agent.incidents.incident import Incident
from commwatch_agent.otlp.events import MOST_WAITING, Event, Events, request
from tests.otlp import attributes, labels
from tests.receivers import NOON

HANG = Incident(
    "0c7d", "hang", "warning", "open", "train", "run", ("world", "7"), NOON, NOON + 10, NOON + 20, cause="dead",
    group_id="world", group="dp", seq=7, op="all_reduce", ranks=(1,), waiting=(0, 2), nodes=("node1", "node2"), cost_rank_s=20.0,
    says="process dead: rank 1 died (no clean end)",
)  # fmt: skip


def records(events: Events) -> list[LogRecord]:
    """What would be sent now."""
    made = request(events.take(), {"service.name": "commwatch"}, int(NOON * 1e9))
    assert all(len(of_job.scope_logs) == 1 for of_job in made.resource_logs)
    return [record for of_job in made.resource_logs for record in of_job.scope_logs[0].log_records]


def changes(events: Events) -> list[tuple[str, float]]:
    """What would be sent now: the changes and their times, in s after noon."""
    return [(each.event_name.rpartition(".")[2], each.time_unix_nano / 1e9 - NOON) for each in records(events)]


def test_changes() -> None:
    """An incident is one record when it opens, when its severity rises, and when it ends; what else changes is none, nor is a pending one."""
    events = Events()
    events.note([replace(HANG, state="pending")], NOON)
    events.note([HANG], NOON + 15)
    events.note([replace(HANG, last_at=NOON + 30)], NOON + 30)
    events.note([replace(HANG, severity="critical")], NOON + 45)
    events.note([replace(HANG, severity="critical", state="ended", ended_at=NOON + 50)], NOON + 60)
    events.note([], NOON + 75)
    opened, worse, ended = records(events)
    assert [each.event_name for each in (opened, worse, ended)] == [
        "commwatch.incident.opened",
        "commwatch.incident.worse",
        "commwatch.incident.ended",
    ]
    assert [each.time_unix_nano for each in (opened, worse, ended)] == [
        int((NOON + after_s) * 1e9) for after_s in (10, 45, 50)
    ]
    assert [(each.severity_number, each.severity_text) for each in (opened, worse, ended)] == [
        (SeverityNumber.SEVERITY_NUMBER_WARN, "warning"),
        (SeverityNumber.SEVERITY_NUMBER_ERROR, "critical"),
        (SeverityNumber.SEVERITY_NUMBER_INFO, "info"),
    ]
    assert {each.body.string_value for each in (opened, worse, ended)} == {f"Hang: rank 1: {HANG.says}"}
    about = attributes(opened.attributes)
    expected = {
        "id": "0c7d", "kind": "hang", "severity": "warning", "cause": "dead", "ranks": [1], "waiting": [0, 2], "group": "dp",
        "group_id": "world", "op": "all_reduce", "seq": 7, "began_at": NOON, "cost_rank_s": 20.0, "nodes": "node1, node2",
    }  # fmt: skip
    assert about.pop("commwatch.incident.remedy")
    assert about == {"job_id": "train", **{f"commwatch.incident.{name}": value for name, value in expected.items()}}
    assert attributes(ended.attributes)["commwatch.incident.ended_at"] == NOON + 50


def test_between_two_pushes() -> None:
    """An incident that opens and ends between two pushes has both records; one that ended before the agent began has none, an open one has."""
    over = replace(HANG, state="ended", ended_at=NOON + 30)
    events = Events(NOON + 20)
    events.note([over, replace(HANG, id="old", state="ended", ended_at=NOON + 15), replace(HANG, id="open")], NOON + 40)
    assert changes(events) == [("opened", 10), ("opened", 10), ("ended", 30)]


def test_comes_back() -> None:
    """An incident that goes on after its end opens again; if it has ended once more by the next push, that is its end."""
    over = replace(HANG, state="ended", ended_at=NOON + 30)
    events = Events()
    events.note([over], NOON + 40)
    events.note([HANG], NOON + 55)
    events.note([over], NOON + 70)
    events.note([replace(over, ended_at=NOON + 80)], NOON + 85)
    assert changes(events) == [("opened", 10), ("ended", 30), ("ended", 30), ("opened", 55), ("ended", 80)]


def test_resources() -> None:
    """The records of a job are under a resource with its job_id."""
    events = Events()
    events.note([replace(HANG, id=job, job_id=job) for job in ("a", "b", "")], NOON)
    made = request(events.take(), {"service.name": "commwatch"}, 1)
    found = [labels(of_job.resource.attributes) for of_job in made.resource_logs]
    assert found == [{"service.name": "commwatch", **more} for more in ({"job_id": "a"}, {"job_id": "b"}, {})]


def test_bound() -> None:
    """The events that wait are bounded: the oldest are dropped, also of those that come back after a failure, and counted."""
    events = Events()
    many = [Event("commwatch.incident.opened", NOON + n, "info", str(n), {}) for n in range(MOST_WAITING + 5)]
    events.put_back(many[5:])
    taken = events.take()
    assert events.take() == []
    events.put_back(many[:5])
    events.put_back(taken)
    assert events.dropped == 5
    assert events.take() == many[5:]
