"""Rules and receivers that change while the agent runs: firing alerts continue, and no message is repeated or missing."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from pathlib import Path

from commwatch_alerts.delivery import Delivery
from commwatch_alerts.evaluator import LEAST_WARM_S, Evaluator
from commwatch_alerts.kept import KeptFile
from commwatch_alerts.model import FIRING, RESOLVED, Record, Rule
from commwatch_alerts.outbox import Batch
from commwatch_alerts.series import Samples
from tests.alerts.recorded import INTERVAL_S
from tests.alerts.test_delivery import ended
from tests.alerts.test_delivery_after_restart import Ears
from tests.alerts.test_evaluator import Run, rule, text
from tests.helpers import PATIENCE_S, wait_for
from tests.receivers import alert

# -- rules --------------------------------------------------------------------------------------


def change(run: Run, *rules: Rule, records: tuple[Record, ...] = ()) -> bool:
    """Give it other rules, as an agent does; True if its samples serve them."""
    evaluator = Evaluator(rules, records, text)
    same = evaluator.succeed(run.evaluator)
    if not same:
        run.samples = Samples(evaluator.needs)
    run.evaluator = evaluator
    return same


def test_threshold() -> None:
    """A new threshold applies in the next round: alerts below it end, and the others keep the time since which they are active."""
    run = Run(rule())
    assert run.states([0.5] * 5) == list("fffff")
    assert change(run, rule(expr="share > 0.4"))
    assert run.states([0.5]) == ["f"]
    assert change(run, rule(expr="share > 0.6"))
    assert run.states([0.5, 0.5]) == ["r", "-"]
    slow = Run(rule(for_s=60))
    assert slow.states([0.5] * 3) == list("ppp")
    assert change(slow, rule(expr="share > 0.4", for_s=60))
    assert slow.states([0.5, 0.5]) == ["p", "f"]


def test_other_series() -> None:
    """A rule on series that were not kept before raises nothing until there are enough samples."""
    run = Run(rule())
    assert run.states([0.5]) == ["f"]
    assert not change(run, rule(expr="max_over_time(share[2m]) > 0.3"))
    warm = int(max(LEAST_WARM_S, 120) / INTERVAL_S)
    assert run.states([None] * (warm + 2)) == ["f"] * warm + ["r", "-"]


def test_other_records() -> None:
    """The samples of a recording rule are removed with it."""
    record = Record("job:share", "share")
    run = Run(rule(expr="job:share > 0.3"), records=(record,))
    assert run.states([0.5]) == ["f"]
    assert not change(run, rule(expr="job:share > 0.3"), records=(replace(record, name="job:other"),))


def test_rule_is_taken_away() -> None:
    """A firing alert whose rule was removed is resolved with a message, a pending one is dropped; other alerts do not change."""
    run = Run(rule(), rule("Slow", for_s=60), rule("Stays"))
    assert {one.name for one in run.round(r0=0.5)} == {"High", "Slow", "Stays"}
    assert change(run, rule("Stays"))
    assert [(one.name, one.state) for one in run.round(r0=0.5)] == [("Stays", FIRING), ("High", RESOLVED)]
    assert [one.name for one in run.round(r0=0.5)] == ["Stays"]


# -- receivers ----------------------------------------------------------------------------------


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
