"""Send a test alert and its end through a receiver, to check that it works."""

from __future__ import annotations

from dataclasses import replace

from commwatch_alerts.model import FIRING, INFO, RESOLVED, Alert
from commwatch_alerts.outbox import Batch
from commwatch_alerts.receivers.sending import CannotSend, Receiver

NAME = "CommwatchTest"


def trial(receiver: Receiver, now_s: float) -> str | None:
    """Send a firing and a resolved test alert; return what went wrong, ``None`` if nothing.

    Args:
        now_s: Unix time.
    """
    labels = {"alertname": NAME, "severity": INFO}
    annotations = {
        "summary": "This is a test of commwatch's alerts",
        "description": "This alert was sent by `commwatch alerts test`. Nothing is wrong.",
    }
    firing = Alert(NAME, labels, annotations, 1.0, FIRING, active_at=now_s, fired_at=now_s)
    try:
        for alert in (firing, replace(firing, state=RESOLVED, resolved_at=now_s)):
            receiver.send(Batch((alert,), (("alertname", NAME),)), now_s)
    except CannotSend as error:
        return str(error)
    return None
