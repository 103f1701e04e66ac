"""Prometheus and Alertmanager as a site runs them: with the files of ``commwatch manifest prometheus``, and a chat for their messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers import commwatch, free_port
from tests.prometheus import Prometheus, started
from tests.receivers import Server, started_alertmanager


@contextmanager
def paging(place: Path, *agents: str | Path) -> Iterator[tuple[Prometheus, Server]]:
    """Both, and the server of the chat. Unchanged but for the folder of the secrets, which a site has in ``/etc``.

    Args:
        agents: as the command takes them.
    """
    port, out, secrets = free_port(), place / "etc", place / "secrets"
    flags = ("--out", out, "--interval", "5s", "--alertmanager", f"127.0.0.1:{port}")
    done = commwatch("manifest", "prometheus", *flags, *agents)
    assert (done.returncode, done.stderr) == (0, "")
    routes = out / "alertmanager.yml"
    routes.write_text(routes.read_text().replace("/etc/alertmanager/secrets", str(secrets)))
    secrets.mkdir()
    with (
        Server() as chat,
        started_alertmanager(place, routes, port),
        started(place, out / "prometheus.yml") as prometheus,
    ):
        (secrets / "slack_url").write_text(chat.url)
        yield prometheus, chat


def titles(chat: Server) -> list[str]:
    """The titles of the messages so far."""
    return [asked.json["attachments"][0]["title"] for asked in list(chat.asked)]
