"""Delivery in the agent: made from the settings, and shown in ``/metrics``."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from socket import AF_INET, SOCK_DGRAM, gethostname, socket

import pytest

from commwatch_agent.config_sources import load
from commwatch_agent.notify.delivery_setup import address_of, delivery_of, readings
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


#: Hosts to listen on, and those of links then; ``None``: this machine's name.
HOSTS = [
    ("127.0.0.1", "127.0.0.1"), ("localhost", "localhost"), ("::1", "[::1]"), ("10.0.0.7", "10.0.0.7"), ("node7", "node7"),
    ("fd00::7", "[fd00::7]"), ("0.0.0.0", None), ("0", None), ("::", None), ("::0", None), ("0:0:0:0:0:0:0:0", None),
]  # fmt: skip


@pytest.mark.parametrize(("host", "expected"), HOSTS)
def test_address_for_people(host: str, expected: str | None) -> None:
    """Links lead to the host by its name where the agent listens on all of its addresses, however those are written."""
    config = load({"HOME": "/home/someone"}, host=host)
    assert address_of(config, 9477) == f"http://{expected or gethostname()}:9477"


def test_address_of_a_machine_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine calls itself localhost, links have the address that leads to others, if there is one."""
    monkeypatch.setattr("commwatch_agent.notify.delivery_setup.gethostname", lambda: "localhost.localdomain")
    with closing(socket(AF_INET, SOCK_DGRAM)) as way:
        try:
            way.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no way to others")
        own = way.getsockname()[0]
    assert address_of(load({"HOME": "/home/someone"}, host="0.0.0.0"), 1) == f"http://{own}:1"
