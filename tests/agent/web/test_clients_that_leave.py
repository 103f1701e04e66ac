"""Clients that ask and do not wait for the answer."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.helpers import agent


def test_nothing_is_said_of_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A client that leaves before its turn is no error of the agent's: its log has no traceback, and it goes on."""
    with agent(tmp_path) as running:
        where = urlsplit(running.url)
        for _ in range(12):
            with socket.create_connection((where.hostname, where.port)) as client:
                client.sendall(b"GET /api/v1/summary?job=none HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert running.get("/api/v1/jobs") == []
    assert "Traceback" not in capfd.readouterr().err
