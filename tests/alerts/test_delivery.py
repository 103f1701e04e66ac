"""Delivery with real threads and servers: a receiver that becomes available again misses nothing, and no receiver waits for another."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

from commwatch_alerts.delivery import Delivered, Delivery, Retry
from commwatch_alerts.model import FIRING, RESOLVED, Alert
from commwatch_alerts.outbox import Batch, Policy
from commwatch_alerts.receivers.hooks import Webhook
from commwatch_alerts.receivers.sending import CannotSend, Receiver
from tests.helpers import PATIENCE_S, free_port, wait_for
from tests.receivers import OK, Answer, Server, alert, raw, status

POLICY = Policy(4 * 3600.0)
#: Back-off without waiting.
AT_ONCE = Retry(0.01, 0.05)


def hook(server: Server | str, name: str = "hook", limit_s: float = 1.0) -> Webhook:
    """A webhook that leads to a server."""
    return Webhook(
        name, POLICY, server if isinstance(server, str) else server.url, "http://agent:9477", limit_s=limit_s
    )


def ended(one: Alert) -> Alert:
    """Return the alert in the state resolved."""
    return replace(one, state=RESOLVED, resolved_at=one.active_at + 600)


@contextmanager
def delivering(*receivers: Receiver, retry: Retry = AT_ONCE, close_s: float = PATIENCE_S) -> Iterator[Delivery]:
    """A delivery, closed at the end."""
    delivery = Delivery(receivers, retry=retry)
    try:
        yield delivery
    finally:
        delivery.close(close_s)


def how(delivery: Delivery, name: str = "hook") -> Delivered:
    """Return the counts and the trouble of the only receiver."""
    return next(each for each in delivery.delivered() if each.receiver == name)


def got(server: Server) -> list[tuple[str, int]]:
    """Return status and number of alerts of the messages that a server has accepted."""
    return [(asked.json["status"], len(asked.json["alerts"])) for asked in server.asked]


def test_firing_then_resolved() -> None:
    """A firing alert is one message however often it is sent, and its end is one."""
    with Server() as server, delivering(hook(server)) as delivery:
        for _ in range(5):
            delivery.send([alert()])
        wait_for(lambda: how(delivery).sent == 1, "the message")
        for _ in range(5):
            delivery.send([ended(alert())])
        delivery.close(PATIENCE_S)
        assert got(server) == [(FIRING, 1), (RESOLVED, 1)]
        assert how(delivery) == Delivered("hook", 2, 0, 0, 0, trouble=None)


FAULTS: dict[str, Callable[[Server], Answer]] = {
    "500": lambda server: status(500, "boom"),
    "429": lambda server: status(429, "", Retry_After="0"),
    "408": lambda server: status(408),
    "garbage": lambda server: raw(b"\x00\xff garbage\r\n\r\n"),
    "an endless line": lambda server: raw(b"HTTP/1.1 200 " + b"x" * 100_000),
    "closed": lambda server: raw(b""),
    "half an answer": lambda server: raw(b"HTTP/1.1 20"),
    "never": lambda server: server.never,
    "drip": lambda server: server.drip,
    "endless 100": lambda server: raw(b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_that_pass(fault: str) -> None:
    """A receiver that fails once, in any way, gets the message at the next attempt; the counts show both."""
    with Server(OK) as server:
        server._answers[:0] = [FAULTS[fault](server)]
        with delivering(hook(server, limit_s=0.3)) as delivery:
            delivery.send([alert()])
            wait_for(lambda: how(delivery).sent == 1, "the message")
            assert (how(delivery).failed, how(delivery).waiting, how(delivery).trouble) == (1, 0, None)
            assert got(server) == [(FIRING, 1), (FIRING, 1)]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (status(400, "bad request"), "answers 400: bad request"),
        (status(404), "answers 404"),
        (status(302, "", Location="http://127.0.0.1/hook"), "answers 302, a redirect, which is not followed"),
    ],
)
def test_faults_that_stay(answer: Answer, says: str) -> None:
    """A message that is refused for good is not tried again, but the next change is sent; redirects are not followed, so there is no loop."""
    with Server(answer) as server, delivering(hook(server)) as delivery:
        delivery.send([alert()])
        wait_for(lambda: how(delivery).failed == 1, "the refusal")
        assert says in (how(delivery).trouble or "")
        for _ in range(5):
            delivery.send([alert()])
        delivery.send([ended(alert())])
        wait_for(lambda: how(delivery).failed == 2, "the refusal of the end")
        assert got(server) == [(FIRING, 1), (RESOLVED, 1)]


def test_flood_of_an_answer() -> None:
    """Of a response of gigabytes, a few KB are read, and one line is reported."""
    with Server() as server:
        server._answers[:] = [server.flood]
        with delivering(hook(server, limit_s=PATIENCE_S)) as delivery:
            delivery.send([alert()])
            wait_for(lambda: how(delivery).failed == 1, "the refusal")
            assert len(how(delivery).trouble or "") < 400


def test_receiver_that_is_down_and_comes_back() -> None:
    """Messages wait while the receiver is down, and have the state of the moment when it is up again."""
    delivery = Delivery([hook(f"http://127.0.0.1:{free_port()}/hook")], retry=AT_ONCE)
    delivery.send([alert()])
    wait_for(lambda: how(delivery).failed >= 3, "three attempts")
    assert "connection refused" in (how(delivery).trouble or "")
    delivery.send([ended(alert()), alert("LinkSaturated")])
    assert how(delivery).waiting == 2
    delivery.close(PATIENCE_S)
    assert how(delivery).sent == 0


def test_retry_after_is_heeded() -> None:
    """``Retry-After`` takes precedence over the back-off; closing does not wait for it."""
    with Server(status(429, "", Retry_After="600"), OK) as server:
        with delivering(hook(server)) as delivery:
            delivery.send([alert()])
            wait_for(lambda: how(delivery).failed == 1, "the refusal")
            for n in range(20):
                delivery.send([alert(), alert(rank=str(n))])
            assert (len(server.asked), how(delivery).waiting) == (1, 21)
        assert got(server) == [(FIRING, 1), (FIRING, 21)]  # the last try, at the end


@dataclass
class Gate:
    """A receiver that stays in ``send`` until the test releases it."""

    name: str
    policy: Policy = POLICY
    entered: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    batches: list[Batch] = field(default_factory=list)

    def send(self, batch: Batch, now_s: float) -> None:
        self.entered.set()
        assert self.go.wait(PATIENCE_S)
        self.batches.append(batch)


def test_none_waits_for_another() -> None:
    """While one receiver is stuck, and another is dead, a third gets everything, and ``send`` returns."""
    stuck = Gate("stuck")
    with Server() as server:
        dead = hook(f"http://127.0.0.1:{free_port()}/hook", "dead")
        with delivering(stuck, dead, hook(server)) as delivery:
            delivery.send([alert()])
            assert stuck.entered.wait(PATIENCE_S)
            for n in range(10):
                delivery.send([alert(f"Alert{n}")])
            wait_for(lambda: how(delivery).sent == 11, "the messages to the third")
            assert (stuck.batches, how(delivery, "stuck").waiting) == ([], 11)
            assert how(delivery, "dead").sent == 0
            stuck.go.set()
            wait_for(lambda: how(delivery, "stuck").waiting == 0, "the first")


def test_a_thousand_at_once() -> None:
    """A thousand alerts of a hundred jobs arrive, a message for each job, while the receiver fails every other time."""
    with Server(*[status(500), OK] * 100, OK) as server, delivering(hook(server)) as delivery:
        many = [alert(job_id=f"job-{n % 100}", rank=str(n)) for n in range(1000)]
        delivery.send(many)
        wait_for(lambda: how(delivery).waiting == 0, "all messages")
        delivery.send([ended(one) for one in many])
        wait_for(lambda: how(delivery).waiting == 0, "all ends")
        assert how(delivery).dropped == 0
        told = {(each["labels"]["rank"], each["status"]) for asked in server.asked for each in asked.json["alerts"]}
        assert told == {(str(n), state) for n in range(1000) for state in (FIRING, RESOLVED)}


def test_what_is_full_is_counted() -> None:
    """If a receiver is stuck and its queue is full, further alerts are counted as dropped."""
    stuck = Gate("hook", Policy(3600, most_waiting=5))
    with delivering(stuck) as delivery:
        delivery.send([alert("First")])
        assert stuck.entered.wait(PATIENCE_S)
        delivery.send([alert(rank=str(n)) for n in range(20)])
        assert (how(delivery).dropped, how(delivery).waiting) == (16, 5)
        stuck.go.set()
        wait_for(lambda: how(delivery).waiting == 0, "the rest")


def test_close_tells_what_waits() -> None:
    """Closing sends the waiting messages; if a receiver is stuck, it waits no longer than the given time."""
    slow, stuck = Gate("slow"), Gate("stuck")
    slow.go.set()
    delivery = Delivery([slow, stuck])
    delivery.send([alert(f"Alert{n}") for n in range(50)])
    delivery.close(0.2)
    assert len(slow.batches) == 50
    assert stuck.batches == []
    stuck.go.set()


def test_back_off() -> None:
    """Waits double up to the most, less a random part of at most half."""
    assert [Retry(1, 300, lambda: 0.0).wait_s(n) for n in (1, 2, 3, 9, 10, 1000)] == [1, 2, 4, 256, 300, 300]
    assert Retry(1, 300, lambda: 1.0).wait_s(3) == 2


def test_back_off_begins_anew() -> None:
    """Failures are counted in a row: after a message that has arrived the first wait is the shortest again."""
    counted: list[int] = []

    @dataclass(frozen=True)
    class Counting(Retry):
        def wait_s(self, failures: int) -> float:
            counted.append(failures)
            return 0.01

    with (
        Server(status(500), status(500), OK, status(500), OK) as server,
        delivering(hook(server), retry=Counting()) as delivery,
    ):
        delivery.send([alert()])
        wait_for(lambda: how(delivery).sent == 1, "the message")
        delivery.send([ended(alert())])
        wait_for(lambda: how(delivery).sent == 2, "the end")
    assert counted == [1, 2, 1]


def test_trouble_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """A failure of a receiver is logged once, not at each attempt, and so is its recovery."""
    with (
        Server(*[status(503, "busy")] * 5, OK) as server,
        caplog.at_level(logging.INFO, "commwatch"),
        delivering(hook(server)) as delivery,
    ):
        delivery.send([alert()])
        wait_for(lambda: how(delivery).sent == 1, "the message")
    said = [record.getMessage() for record in caplog.records]
    assert said[:2] == [
        f"receiver hook: http://127.0.0.1:{server.port}: answers 503: busy",
        "receiver hook: works again",
    ]
    assert [line.partition(" sent ")[0] for line in said[2:]] == ["receiver hook:"]


def test_message_that_cannot_be_written(caplog: pytest.LogCaptureFixture) -> None:
    """An alert that a receiver cannot format costs only its message; the receiver continues."""

    @dataclass(frozen=True)
    class Picky:
        name: str = "hook"
        policy: Policy = POLICY

        def send(self, batch: Batch, now_s: float) -> None:
            if batch.alerts[0].name == "Odd":
                raise ValueError("secret of the alert")
            if batch.alerts[0].name == "Again":
                raise CannotSend("not now")

    with delivering(Picky(), close_s=1.0) as delivery:
        delivery.send([alert("Odd"), alert("Plain")])
        wait_for(lambda: how(delivery).waiting == 0, "both")
        assert (how(delivery).sent, how(delivery).failed) == (1, 1)
    assert "secret" not in caplog.text
