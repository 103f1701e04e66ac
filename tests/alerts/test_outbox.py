"""The messages for one receiver: deduplication, groups, repetition, limits. Times are parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from commwatch_alerts.model import CRITICAL, FIRING, PENDING, RESOLVED, WARNING, Alert
from commwatch_alerts.outbox import MOST_ALERTS, Batch, Outbox, Policy
from tests.receivers import alert

HOURS_4 = 4 * 3600.0
OFTEN = Policy(60.0, 900.0, grouped=False)


def ended(one: Alert) -> Alert:
    """Return the alert in the state resolved."""
    return replace(one, state=RESOLVED, resolved_at=one.active_at + 600)


def send_due(box: Outbox, now_s: float) -> list[Batch]:
    """Send all messages that are due, and return them."""
    batches = []
    while (batch := box.next(now_s)) is not None:
        box.sent(batch, now_s)
        batches.append(batch)
    return batches


def states(batches: Iterable[Batch]) -> list[list[tuple[str, str]]]:
    """Return rank and state of the alerts in each message."""
    return [[(each.labels.get("rank", ""), each.state) for each in batch.alerts] for batch in batches]


def rounds(
    box: Outbox, alerts: list[Alert], from_s: float, until_s: float
) -> list[tuple[float, list[tuple[str, str]]]]:
    """Pass the alerts every 15 s; return when a message was sent, and what it contained."""
    found, now = [], from_s
    while now <= until_s:
        box.take(alerts, now)
        found += [(now, state) for state in states(send_due(box, now))]
        now += 15
    return found


def test_once_and_again_after_four_hours() -> None:
    """A firing alert is sent once, however often it is evaluated, and again after the repeat interval; its end is sent once."""
    box, one = Outbox(Policy(HOURS_4)), alert(rank="1")
    assert rounds(box, [one], 0, HOURS_4 + 600) == [(0, [("1", FIRING)]), (HOURS_4, [("1", FIRING)])]
    assert rounds(box, [ended(one)], 20_000, 20_060) == [(20_000, [("1", RESOLVED)])]
    assert box.next(1e6) is None
    assert (box.sent_count, box.failed_count, box.dropped_count, box.waiting) == (3, 0, 0, 0)


def test_alertmanager_is_told_each_minute() -> None:
    """A firing alert is sent each minute, and its end each minute for a quarter of an hour, as Prometheus does."""
    box, one = Outbox(OFTEN), alert()
    assert [at for at, _ in rounds(box, [one], 0, 200)] == [0, 60, 120, 180]
    box.take([ended(one)], 300)
    ends, now = [], 300.0
    while now < 2000:
        ends += [(now, batch.alerts[0].state) for batch in send_due(box, now)]
        now += 15
    assert ends == [(300 + 60 * n, RESOLVED) for n in range(15)]
    assert box.due_in_s(2000) is None


def test_what_nobody_mentions_is_not_repeated() -> None:
    """An alert that the evaluator no longer reports is not repeated: Alertmanager ends it by itself."""
    box = Outbox(OFTEN)
    box.take([alert()], 0)
    assert len(send_due(box, 0)) == 1
    assert [len(send_due(box, now)) for now in (60.0, 120.0, 180.0, 3000.0)] == [1, 0, 0, 0]
    box.take([alert()], 3001)
    assert len(send_due(box, 3001)) == 1


def test_again_after_the_end() -> None:
    """A later occurrence of an alert is sent, and the end of the earlier one does not replace it."""
    box, first = Outbox(OFTEN), alert(at=1000)
    second = alert(at=5000)
    box.take([first], 0)
    send_due(box, 0)
    box.take([ended(first)], 15)
    send_due(box, 15)
    box.take([second], 30)
    (batch,) = send_due(box, 30)
    assert batch.alerts == (second,)
    assert [batch.alerts[0].state for batch in send_due(box, 90)] == [FIRING]


def test_new_occurrence_without_an_end() -> None:
    """A new occurrence is sent, even if the end of the earlier one was never reported."""
    box = Outbox(Policy(HOURS_4))
    box.take([alert(at=1000)], 0)
    send_due(box, 0)
    box.take([alert(at=5000)], 15)
    assert states(send_due(box, 15)) == [[("", FIRING)]]


def test_end_for_a_receiver_that_was_away_for_long() -> None:
    """The end of a sent alert waits for the receiver, however long the receiver is unavailable."""
    box = Outbox(Policy(HOURS_4))
    box.take([alert()], 0)
    send_due(box, 0)
    box.take([ended(alert())], 15)
    for now in (15.0, 4000.0, 90_000.0):
        batch = box.next(now)
        assert batch is not None
        box.failed(batch, now, again=True)
    assert states(send_due(box, 200_000)) == [[("", RESOLVED)]]


def test_old_end_after_a_new_beginning() -> None:
    """The end of an earlier occurrence, reported again, does not end the occurrence that fires now."""
    box, first, second = Outbox(Policy(HOURS_4)), alert(at=1000), alert(at=5000)
    box.take([second], 0)
    send_due(box, 0)
    box.take([second, ended(first)], 15)
    assert send_due(box, 15) == []
    box.take([ended(second)], 30)
    assert states(send_due(box, 30)) == [[("", RESOLVED)]]


def test_beginning_while_an_end_is_on_its_way() -> None:
    """An alert that fires again while its end is being sent is sent again."""
    box, one = Outbox(Policy(HOURS_4)), alert()
    box.take([one], 0)
    send_due(box, 0)
    box.take([ended(one)], 15)
    batch = box.next(15)
    assert batch is not None
    box.take([one], 20)
    box.sent(batch, 25)
    assert states(send_due(box, 25)) == [[("", FIRING)]]


def test_everyone_gets_a_turn() -> None:
    """If more alerts fire than can be sent in a minute, those whose last message is the oldest come first."""
    box, many = Outbox(OFTEN), [alert(rank=str(n)) for n in range(300)]
    seen = []
    for now in range(0, 300, 30):  # a message takes half a minute
        box.take(many, now)
        batch = box.next(now)
        assert batch is not None
        box.sent(batch, now)
        seen.append(batch.alerts[0].labels["rank"])
    assert seen[:6] == ["0", "100", "200"] * 2


def test_grouped_by_alert_and_job() -> None:
    """The changes of one round are one message for each alert name and job: changed alerts first, then the others that fire there."""
    box = Outbox(Policy(HOURS_4))
    a, b, c = alert(rank="1"), alert(rank="2"), alert(rank="1", job_id="other")
    other = alert("CollectiveHang", rank="1")
    box.take([a, b, c, other], 0)
    batches = send_due(box, 0)
    assert [batch.group for batch in batches] == [
        (("alertname", "CommShareHigh"), ("job_id", "train")),
        (("alertname", "CommShareHigh"), ("job_id", "other")),
        (("alertname", "CollectiveHang"), ("job_id", "train")),
    ]
    assert states(batches)[0] == [("1", FIRING), ("2", FIRING)]
    box.take([ended(a), b, c, other], 15)
    assert states(send_due(box, 15)) == [[("1", RESOLVED), ("2", FIRING)]]
    box.take([b, c, other, alert(rank="3")], 30)
    assert states(send_due(box, 30)) == [[("3", FIRING), ("2", FIRING)]]


def test_a_thousand_at_once() -> None:
    """A group of a thousand alerts is one message with a hundred of them and the number of the others; no alert is sent twice."""
    box, many = Outbox(Policy(HOURS_4)), [alert(rank=str(n)) for n in range(1000)]
    box.take(many, 0)
    (batch,) = send_due(box, 0)
    assert (len(batch.alerts), len(batch.truncated)) == (MOST_ALERTS, 900)
    box.take(many, 15)
    assert send_due(box, 15) == []
    each = Outbox(OFTEN)
    each.take(many, 0)
    batches = send_due(each, 0)
    assert [(len(batch.alerts), len(batch.truncated)) for batch in batches] == [(MOST_ALERTS, 0)] * 10
    assert {one.id for batch in batches for one in batch.alerts} == {one.id for one in many}


def test_severity() -> None:
    """A receiver gets no alerts below its severity; no receiver gets pending alerts."""
    box = Outbox(Policy(HOURS_4, severity=CRITICAL))
    box.take(
        [alert(severity=WARNING), alert(rank="7", severity=CRITICAL), replace(alert(severity=CRITICAL), state=PENDING)],
        0,
    )
    assert states(send_due(box, 0)) == [[("7", FIRING)]]


def test_severity_raised() -> None:
    """The end of an alert that was sent is sent, although a reload has raised the severity since; new alerts are not."""
    before = Outbox(Policy(HOURS_4))
    before.take([alert(rank="3", severity=WARNING)], 0)
    assert states(send_due(before, 0)) == [[("3", FIRING)]]
    box = Outbox(Policy(HOURS_4, severity=CRITICAL))
    box.restore(before.state(1), 1, lambda one: one)
    box.take([ended(alert(rank="3", severity=WARNING)), ended(alert(rank="7", severity=WARNING))], 10)
    assert states(send_due(box, 10)) == [[("3", RESOLVED)]]


def test_no_ends_where_none_are_wanted() -> None:
    """A receiver without ``send_resolved`` gets no ends, but the next occurrence."""
    box = Outbox(Policy(HOURS_4, send_resolved=False))
    assert [len(sent) for sent in (rounds(box, [alert()], 0, 15), rounds(box, [ended(alert())], 30, 45))] == [1, 0]
    assert len(rounds(box, [alert(at=9000)], 60, 90)) == 1


# -- receivers that are away --------------------------------------------------------------------


def test_end_of_what_was_never_told() -> None:
    """An alert that ends before it was sent is not sent at all; if it may have been sent, its end is sent."""
    box = Outbox(Policy(HOURS_4))
    box.take([alert()], 0)
    box.take([ended(alert())], 15)
    assert send_due(box, 15) == []
    box.take([alert()], 20)
    batch = box.next(20)
    assert batch is not None
    box.take([ended(alert())], 25)  # while it is on its way
    box.failed(batch, 30, again=True)
    assert states(send_due(box, 31)) == [[("", RESOLVED)]]


def test_end_while_the_beginning_is_on_its_way() -> None:
    """The end of an alert that ends while it is being sent is sent after it."""
    box = Outbox(Policy(HOURS_4))
    box.take([alert()], 0)
    batch = box.next(0)
    assert batch is not None
    box.take([ended(alert())], 5)
    box.sent(batch, 10)
    assert states(send_due(box, 10)) == [[("", RESOLVED)]]


def test_end_of_what_fired_before_the_agent_began() -> None:
    """The end of an alert unknown to this outbox is sent, because the agent may have been restarted."""
    box = Outbox(Policy(HOURS_4))
    assert rounds(box, [ended(alert())], 0, 0) == [(0, [("", RESOLVED)])]
    assert box.waiting == 0


def test_refused_for_good() -> None:
    """A message that a receiver refuses is not sent again before the repeat interval is over."""
    box = Outbox(Policy(HOURS_4))
    box.take([alert()], 0)
    batch = box.next(0)
    assert batch is not None
    box.failed(batch, 0, again=False)
    assert (box.next(60), box.failed_count, box.waiting) == (None, 1, 0)
    assert [at for at, _ in rounds(box, [alert()], HOURS_4 - 60, HOURS_4 + 60)] == [HOURS_4]


def test_one_message_that_fails_holds_up_no_other() -> None:
    """A group whose message fails is retried after the other groups, not before them."""
    box = Outbox(Policy(HOURS_4))
    box.take([alert("Bad"), alert("Good"), alert("Fine")], 0)
    first = box.next(0)
    assert first is not None
    box.failed(first, 0, again=True)
    assert [batch.alerts[0].name for batch in send_due(box, 1)] == ["Good", "Fine", "Bad"]


def test_room() -> None:
    """What does not fit is dropped, the oldest first, and counted; ends of what was told are never dropped; what still fires comes again."""
    box = Outbox(Policy(HOURS_4, most_waiting=10))
    known = [alert("Known", rank=str(n)) for n in range(50)]
    for at in range(0, 50, 10):
        box.take(known[at : at + 10], 0)
        send_due(box, 0)
    flood = [alert(at=1000 + n, rank=str(n)) for n in range(30)]
    box.take([*(ended(one) for one in known), *flood], 15)
    assert (box.dropped_count, box.waiting) == (20, 60)
    found = {(one.name, one.labels["rank"], one.state) for batch in send_due(box, 15) for one in batch.alerts}
    assert {("Known", str(n), RESOLVED) for n in range(50)} <= found
    assert {rank for name, rank, _ in found if name != "Known"} == {str(n) for n in range(20, 30)}
    for now in (30.0, 45.0):
        box.take(flood, now)
        found |= {(one.name, one.labels["rank"], one.state) for batch in send_due(box, now) for one in batch.alerts}
    assert {rank for name, rank, _ in found if name != "Known"} == {str(n) for n in range(30)}
    assert (box.dropped_count, box.waiting) == (30, 0)


@pytest.mark.parametrize("policy", [Policy(HOURS_4), OFTEN])
def test_nothing_is_kept_for_ever(policy: Policy) -> None:
    """An alert that is no longer reported is removed, even if its end was never sent."""
    box = Outbox(policy)
    box.take([alert()], 0)
    send_due(box, 0)
    assert box.next(7200) is None
    box.take([alert()], 7201)
    assert len(send_due(box, 7201)) == 1  # it is news again
