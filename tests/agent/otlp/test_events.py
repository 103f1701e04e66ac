"""Alerts and verdicts as log records: one at the begin and one at the end, and a bound on those that wait."""

from __future__ import annotations

from dataclasses import replace

from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, SeverityNumber

from commwatch_agent.analysis.verdicts import Verdict
from commwatch_agent.otlp.events import MOST_WAITING, Event, Events, request
from commwatch_alerts.model import FIRING, RESOLVED
from tests.otlp import attributes, labels
from tests.receivers import NOON, alert

HANG = Verdict(
    kind="hang", cause="dead", job_id="train", group_id="world", group="dp", seq=7, op="all_reduce", ranks=[1], waiting=[0, 2],
    since_s=9.5, says="process dead: rank 1 was killed or crashed",
)  # fmt: skip


def records(events: Events) -> list[LogRecord]:
    """What would be sent now."""
    made = request(events.take(), {"service.name": "commwatch"}, int(NOON * 1e9))
    assert all(len(of_job.scope_logs) == 1 for of_job in made.resource_logs)
    return [record for of_job in made.resource_logs for record in of_job.scope_logs[0].log_records]


def test_alert() -> None:
    """An alert that goes on firing is one record, with its labels and texts; its end is another."""
    events = Events()
    for _ in range(3):
        events.note_alerts([alert()])
    events.note_alerts([alert(state=RESOLVED)])
    events.note_alerts([])
    begin, end = records(events)
    assert (begin.event_name, end.event_name) == ("commwatch.alert.begin", "commwatch.alert.end")
    assert begin.body.string_value == end.body.string_value == "CommShareHigh of a job"
    assert (begin.time_unix_nano, end.time_unix_nano) == (int((NOON + 60) * 1e9), int((NOON + 600) * 1e9))
    assert (begin.severity_number, begin.severity_text) == (SeverityNumber.SEVERITY_NUMBER_WARN, "warning")
    assert end.severity_number == SeverityNumber.SEVERITY_NUMBER_INFO
    found = attributes(begin.attributes)
    assert (found["alertname"], found["job_id"], found["value"]) == ("CommShareHigh", "train", 0.42)
    assert found["description"] == "comm share 42%"
    assert found["id"] == attributes(end.attributes)["id"] == alert().id


def test_second_occurrence() -> None:
    """An alert that fires again after its end is a new record with another id."""
    events = Events()
    events.note_alerts([alert()])
    events.note_alerts([alert(state=RESOLVED), alert(at=NOON + 900)])
    found = [(record.event_name, attributes(record.attributes)["id"]) for record in records(events)]
    begin, end = "commwatch.alert.begin", "commwatch.alert.end"
    assert found == [(begin, alert().id), (end, alert().id), (begin, alert(at=NOON + 900).id)]


def test_verdict() -> None:
    """A verdict is one record with its sentence and the ranks, until it is gone or names other ranks."""
    events = Events()
    events.note_verdicts([HANG], NOON)
    events.note_verdicts([replace(HANG, since_s=20)], NOON + 15)
    events.note_verdicts([replace(HANG, ranks=[1, 3])], NOON + 30)
    events.note_verdicts([], NOON + 45)
    made = records(events)
    found = [
        (record.event_name.rpartition(".")[2], attributes(record.attributes)["ranks"], record.time_unix_nano / 1e9)
        for record in made
    ]
    assert found == [
        ("begin", [1], NOON),
        ("end", [1], NOON + 30),
        ("begin", [1, 3], NOON + 30),
        ("end", [1, 3], NOON + 45),
    ]
    assert made[0].body.string_value == HANG.says
    about = attributes(made[0].attributes)
    assert (about["kind"], about["cause"], about["op"], about["seq"], about["waiting"]) == (
        "hang",
        "dead",
        "all_reduce",
        7,
        [0, 2],
    )
    assert "cost_share" not in about


def test_resources() -> None:
    """The records of a job are under a resource with its job_id."""
    events = Events()
    events.note_alerts([alert(job_id="a"), alert(job_id="b"), alert(job_id="")])
    made = request(events.take(), {"service.name": "commwatch"}, 1)
    found = [labels(of_job.resource.attributes) for of_job in made.resource_logs]
    assert found == [{"service.name": "commwatch", **more} for more in ({"job_id": "a"}, {"job_id": "b"}, {})]


def test_bound() -> None:
    """The events that wait are bounded: the oldest are dropped, also of those that come back after a failure, and counted."""
    events = Events()
    many = [Event("commwatch.alert.begin", NOON + n, "info", str(n), {}) for n in range(MOST_WAITING + 5)]
    events.put_back(many[5:])
    taken = events.take()
    assert events.take() == []
    events.put_back(many[:5])
    events.put_back(taken)
    assert events.dropped == 5
    assert events.take() == many[5:]


def test_firing_is_not_lost() -> None:
    """An alert that is not in a round without a resolution, as after new rules, is a new one when it comes back."""
    events = Events()
    events.note_alerts([alert(state=FIRING)])
    events.note_alerts([])
    events.note_alerts([alert(state=FIRING)])
    assert [record.event_name for record in records(events)] == ["commwatch.alert.begin"] * 2
