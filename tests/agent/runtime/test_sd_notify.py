"""What is sent to a supervisor: that the agent answers, that its intake lives, that it ends."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commwatch_agent.config_sources import load
from commwatch_agent.daemon import Daemon
from commwatch_agent.runtime.sd_notify import ALIVE, READY, STOPPING, notify
from tests.helpers import agent, clean_env, wait_for


@contextmanager
def supervisor(address: str) -> Iterator[socket.socket]:
    """A socket like systemd's, which keeps what is sent to it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(address.replace("@", "\0", 1) if address.startswith("@") else address)
        listening.setblocking(False)
        yield listening


def received(listening: socket.socket) -> list[str]:
    """Return all messages since the last call."""
    found = []
    while True:
        try:
            found.append(listening.recv(4096).decode())
        except BlockingIOError:
            return found


def test_life_of_an_agent(tmp_path: Path) -> None:
    """Ready when it answers, alive again and again, stopping when it is ended, and what comes is in this order."""
    with supervisor(str(tmp_path / "notify")) as listening:
        heard: list[str] = []

        def times(state: str) -> int:
            heard.extend(received(listening))
            return heard.count(state)

        with agent(tmp_path / "run", env=clean_env(NOTIFY_SOCKET=str(tmp_path / "notify"))) as running:
            wait_for(lambda: times(ALIVE) >= 3 and times(READY), "signs of life")
            running.process.terminate()
            assert running.process.wait(60) == 0
            assert (times(READY), times(STOPPING)) == (1, 1)
        assert heard.index(READY) < heard.index(STOPPING)
        assert set(heard) == {READY, ALIVE, STOPPING}


def test_stuck_intake_is_not_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the intake does not finish a pass, no sign of life is sent; afterwards it is."""
    address = str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    daemon = Daemon(load(os.environ, None, dir=str(tmp_path / "run"), port=0))
    (tmp_path / "run" / "rings").mkdir(exist_ok=True)
    ticking = threading.Thread(target=daemon._tick)

    def in_the_intake() -> bool:
        frame = sys._current_frames().get(ticking.ident or 0)
        while frame is not None and not frame.f_code.co_filename.endswith("intake.py"):
            frame = frame.f_back
        return frame is not None

    with supervisor(address) as listening:
        with daemon._lock:
            ticking.start()
            wait_for(in_the_intake, "the intake to wait for the lock")
            assert received(listening) == []
        ticking.join(60)
        assert received(listening) == [ALIVE]


def test_addresses(tmp_path: Path) -> None:
    """Messages reach a path and an abstract address; a missing receiver, no address, or a full mailbox is neither an error nor a wait."""
    for address in (str(tmp_path / "notify"), f"@commwatch-test-{os.getpid()}"):
        with supervisor(address) as listening:
            notify(READY, {"NOTIFY_SOCKET": address})
            assert received(listening) == [READY]
    for nobody in (
        {},
        {"NOTIFY_SOCKET": ""},
        {"NOTIFY_SOCKET": str(tmp_path / "none")},
        {"NOTIFY_SOCKET": "vsock:2:1"},
    ):
        notify(READY, nobody)
    with supervisor(str(tmp_path / "full")) as listening:
        for _ in range(10_000):
            notify(ALIVE, {"NOTIFY_SOCKET": str(tmp_path / "full")})
        assert 0 < len(received(listening)) < 10_000
