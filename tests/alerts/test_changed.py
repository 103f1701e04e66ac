"""Receivers that change while the agent runs: no message is repeated or missing."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from commwatch_alerts.delivery import Delivery
from commwatch_alerts.kept import KeptFile
from commwatch_alerts.model import FIRING, RESOLVED
from commwatch_alerts.outbox import Batch
from tests.alerts.test_delivery import ended
from tests.alerts.test_delivery_after_restart import Ears
from tests.helpers import PATIENCE_S, wait_for
from tests.receivers import alert


@dataclass(frozen=True)
class Moved(Ears):
    """A receiver under its old name, but elsewhere."""


def test_receivers(tmp_path: Path) -> None:
    """Unchanged receivers continue; a new one gets all firing alerts, one with a new address gets changes only, a removed one nothing."""
    stays, goes, old = Ears("stays", []), Ears("goes", []), Ears("moves", [])
    delivery = Delivery([stays, goes, old], file=KeptFile(tmp_path / "told.json"))

    def deliver(*alerts: str) -> None:
        delivery.send([alert(name) for name in alerts])
        wait_for(lambda: all(each.waiting == 0 for each in delivery.delivered()), "everyone to be told")

    deliver("First")
    moved, new = Moved("moves", []), Ears("new", [])
    delivery.change([new, stays, moved], PATIENCE_S)
    assert [(each.receiver, each.sent) for each in delivery.delivered()] == [("new", 0), ("stays", 1), ("moves", 0)]
    deliver("First", "Second")
    delivery.send([ended(alert("First"))])
    wait_for(lambda: ("First", RESOLVED) in moved.heard, "the end")
    delivery.close(PATIENCE_S)
    both = [("First", FIRING), ("Second", FIRING), ("First", RESOLVED)]
    assert [name for name, _ in stays.heard].count("First") >= 2
    assert set(stays.heard) == set(new.heard) == set(both)
    assert ("First", FIRING) in goes.heard
    assert {name for name, _ in goes.heard + old.heard} == {"First"}
    assert moved.heard[0] == ("Second", FIRING)
    # After a restart nobody is told once more.
    again = Delivery([late := Ears("new", [])], file=KeptFile(tmp_path / "told.json"))
    again.resume([alert("Second")], [])
    again.send([alert("Second")])
    again.close(PATIENCE_S)
    assert late.heard == []


def test_receiver_that_hangs() -> None:
    """Removing a receiver during a message delays the change at most by the limit, and other receivers not at all."""
    over = threading.Event()

    class Deaf(Ears):
        def send(self, batch: Batch, now_s: float) -> None:
            over.wait(PATIENCE_S)

    delivery = Delivery([Deaf("deaf", [])])
    try:
        delivery.send([alert()])
        delivery.change([well := Ears("well", [])], 0.01)
        delivery.send([alert()])
        wait_for(lambda: well.heard == [(alert().name, FIRING)], "the other")
    finally:
        over.set()
        delivery.close(PATIENCE_S)
