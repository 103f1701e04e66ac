"""Delivery after a restart of the agent: no message is repeated, and every receiver gets the ends of the alerts that it knows."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from commwatch_alerts.delivery import Delivery
from commwatch_alerts.kept import KeptFile
from commwatch_alerts.model import FIRING, RESOLVED, Alert
from commwatch_alerts.outbox import Batch, Outbox, Policy
from tests.alerts.test_outbox import HOURS_4, OFTEN, ended, rounds, send_due, states
from tests.helpers import PATIENCE_S, wait_for
from tests.receivers import NOON, alert

POLICY = Policy(HOURS_4)


def restarted(box: Outbox, now_s: float, *active: Alert, policy: Policy = POLICY) -> Outbox:
    """Return a new outbox with the state of ``box`` as saved an hour before ``now_s``; alerts that are not active have ended."""
    left = [{**one, "ago_s": one["ago_s"] + 3600} for one in json.loads(json.dumps(box.state(100), allow_nan=False))]
    found, ids = Outbox(policy), {one.id for one in active}
    found.restore(left, now_s, lambda one: one if one.id in ids or one.state == RESOLVED else ended(one))
    return found


def test_what_fires_on() -> None:
    """A sent alert is not repeated before its interval is over, which includes the time without an agent; its end is sent."""
    box, one = Outbox(POLICY), alert()
    box.take([one], 0)
    send_due(box, 0)
    box = restarted(box, 0, one)
    again = HOURS_4 - 3600 - 100
    assert [at for at, _ in rounds(box, [one], 0, again + 60)] == [again + (-again % 15)]
    box.take([ended(one)], 20_000)
    assert states(send_due(box, 20_000)) == [[("", RESOLVED)]]


def test_what_has_ended() -> None:
    """The end of an alert that ended without an agent is sent once, and not to a receiver without ``send_resolved``."""
    box = Outbox(POLICY)
    box.take([alert(rank="1"), alert(rank="2")], 0)
    send_due(box, 0)
    assert send_due(restarted(box, 0, policy=Policy(HOURS_4, send_resolved=False)), 0) == []
    box = restarted(box, 0, alert(rank="2"))
    assert states(send_due(box, 0)) == [[("1", RESOLVED), ("2", FIRING)]]
    assert send_due(restarted(box, 0, alert(rank="2")), 0) == []


def test_end_that_waits() -> None:
    """An end that a receiver has not accepted is kept over a restart."""
    box = Outbox(POLICY)
    box.take([alert()], 0)
    send_due(box, 0)
    box.take([ended(alert())], 15)
    batch = box.next(15)
    assert batch is not None
    box.failed(batch, 16, again=True)
    assert states(send_due(restarted(box, 0), 0)) == [[("", RESOLVED)]]


def test_what_was_on_its_way() -> None:
    """An alert that may have been sent is sent again if it still fires, else its end is sent; one that was never tried is not sent."""
    box = Outbox(POLICY)
    box.take([alert("Tried"), alert("Untried")], 0)
    assert box.next(0) is not None
    assert states(send_due(restarted(box, 0, alert("Tried")), 0)) == [[("", FIRING)]]
    (batch,) = send_due(restarted(box, 0), 0)
    assert [(one.name, one.state) for one in batch.alerts] == [("Tried", RESOLVED)]


# -- on disk ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ears:
    """A receiver that records everything."""

    name: str
    heard: list[tuple[str, str]]
    policy: Policy = POLICY

    def send(self, batch: Batch, now_s: float) -> None:
        self.heard.extend((one.name, one.state) for one in batch.alerts)


class Scene:
    """An agent's delivery to two receivers, with its file, under a wall clock of the test."""

    def __init__(self, directory: Path, *ears: Ears) -> None:
        self.path, self.now = directory / "told.json", NOON
        self.ears = ears or (Ears("one", []), Ears("two", []))
        self.delivery = Delivery(self.ears, file=KeptFile(self.path), wall=lambda: self.now)

    def tell(self, *alerts: Alert) -> None:
        """Send alerts that fire or have ended, and wait until all receivers have them and the file is written."""
        self.delivery.send(alerts)
        wait_for(lambda: all(each.waiting == 0 for each in self.delivery.delivered()), "everyone to be told")
        self.delivery.close(PATIENCE_S)

    def heard(self) -> list[list[tuple[str, str]]]:
        """Return the received alerts by receiver."""
        return [each.heard for each in self.ears]


def test_everyones_is_kept(tmp_path: Path) -> None:
    """The file keeps the alerts of all receivers, also of those that get nothing in this run."""
    Scene(tmp_path).tell(alert("High"))
    loud = Ears("one", []), Ears("two", [], replace(POLICY, severity="critical"))
    scene = Scene(tmp_path, *loud)
    scene.delivery.resume([alert("High")], [])
    scene.tell(alert("High"), alert("More"))
    assert scene.heard() == [[("More", FIRING)], []]
    scene = Scene(tmp_path)
    scene.delivery.resume([alert("More")], [ended(alert("High"))])
    scene.tell(alert("More"))
    assert scene.heard() == [[("High", RESOLVED)], [("High", RESOLVED), ("More", FIRING)]]


def test_when_it_ended(tmp_path: Path) -> None:
    """The end has the time of the alert if it is known, else the time when it was found to be over; only its user may read the file."""
    Scene(tmp_path).tell(alert("Known"), alert("Lost"))
    assert (tmp_path / "told.json").stat().st_mode & 0o777 == 0o600
    ends: dict[str, float | None] = {}

    @dataclass(frozen=True)
    class Reader(Ears):
        def send(self, batch: Batch, now_s: float) -> None:
            ends.update({one.name: one.resolved_at for one in batch.alerts})

    scene = Scene(tmp_path, Reader("one", []))
    scene.now = NOON + 5000
    scene.delivery.resume([], [ended(alert("Known"))])
    scene.tell()
    assert ends == {"Known": NOON + 600, "Lost": NOON + 5000}


def test_alertmanager_needs_no_memory(tmp_path: Path) -> None:
    """A receiver that gets all alerts each minute and groups them itself gets them at once after a restart."""
    Scene(tmp_path, Ears("manager", [], OFTEN)).tell(alert())
    scene = Scene(tmp_path, Ears("manager", [], OFTEN))
    scene.delivery.resume([alert()], [])
    scene.tell(alert())
    assert scene.heard() == [[("CommShareHigh", FIRING)]]


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"version": 2, "saved_at": 1, "receivers": {}}',
        b'{"version": 1, "saved_at": "x", "receivers": {}}',
        b'{"version": 1, "saved_at": 1, "receivers": []}',
        b'{"version": 1, "saved_at": 1, "receivers": {"one": [7]}}',
        b'{"version": 1, "saved_at": 1, "receivers": {"one": [{"alert": {}, "told": null, "ago_s": 1}]}}',
        b"[" * 100_000,
    ],
)
def test_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes) -> None:
    """A damaged file is renamed and logged once, and all receivers get the firing alerts."""
    scene = Scene(tmp_path)
    scene.path.write_bytes(damage)
    with caplog.at_level(logging.ERROR, "commwatch"):
        scene.delivery.resume([alert()], [])
    assert (tmp_path / "told.json.damaged").read_bytes() == damage
    assert [str(scene.path) in record.getMessage() for record in caplog.records] == [True]
    scene.tell(alert())
    assert scene.heard() == [[("CommShareHigh", FIRING)]] * 2


def test_flood(tmp_path: Path) -> None:
    """A thousand messages are written to the file in fewer writes, and all of them are in it at the end."""

    class Counting(KeptFile):
        saved = 0

        def save(self, text: str) -> bool:
            Counting.saved += 1
            return super().save(text)

    many = [alert(job_id=str(n)) for n in range(1000)]
    delivery = Delivery([Ears("one", [])], file=Counting(tmp_path / "told.json"))
    delivery.send(many)
    wait_for(lambda: delivery.delivered()[0].waiting == 0, "all of them")
    delivery.close(PATIENCE_S)
    assert Counting.saved < 500
    scene = Scene(tmp_path, Ears("one", []))
    scene.delivery.resume(many, [])
    scene.tell(*many)
    assert scene.heard() == [[]]
