"""Delivery in the agent: made from the settings, and shown in ``/metrics``."""

from __future__ import annotations

from pathlib import Path
from socket import gethostname

from commwatch_agent.alerting.notifications import address_of, delivery_of, readings
from commwatch_agent.config import load
from commwatch_collectors.registry import Reading
from tests.helpers import PATIENCE_S, wait_for
from tests.receivers import Server, alert


def test_delivery_of_the_settings(tmp_path: Path) -> None:
    """The receivers in the settings get alerts with links to the agent, counted by receiver and result."""
    with Server() as server:
        file = tmp_path / "commwatch.toml"
        file.write_text(f'[[receivers]]\nkind = "webhook"\nname = "hook"\nurl = "{server.url}"\n')
        delivery = delivery_of(load({"HOME": "/home/someone"}, file), "http://agent:9477")
        delivery.send([alert(rank="1"), alert(rank="2"), alert("Quiet", severity="info")])
        sent = Reading("notifications_total", ("hook", "sent"), 2)
        wait_for(lambda: sent in readings(delivery), "the message")
        delivery.close(PATIENCE_S)
        assert readings(delivery) == [
            sent,
            Reading("notifications_total", ("hook", "failed"), 0),
            Reading("notifications_total", ("hook", "dropped"), 0),
            Reading("notifications_waiting", ("hook",), 0),
        ]
        (asked,) = server.asked
        assert asked.json["externalURL"] == "http://agent:9477"


def test_address_for_people() -> None:
    """Links lead to the host by its name where the agent listens on all of its addresses."""
    home = {"HOME": "/home/someone"}
    assert address_of(load(home, host="10.0.0.7"), 9477) == "http://10.0.0.7:9477"
    assert address_of(load(home, host="::1"), 9477) == "http://[::1]:9477"
    assert address_of(load(home, host="0.0.0.0"), 1) == f"http://{gethostname()}:1"
