"""The thread behind ``commwatch.metrics``: how long it runs, and what happens without one."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

import commwatch
from commwatch.api import training
from tests.helpers import wait_for

FIGURES = {"comm/share": 0.5}


def test_rare_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that are more than a minute apart return figures from the third on; the thread ends once calls cease."""
    now_s, asked = [0.0], [0]

    def answer(*_: object) -> dict[str, float]:
        asked[0] += 1
        return FIGURES

    def at(new_s: float) -> bool:
        """Whether the thread runs when it has seen the new time."""
        before, now_s[0] = asked[0], new_s
        wait_for(lambda: not follower().is_running() or asked[0] > before + 1, "the thread to see the time")
        return follower().is_running()

    def follower() -> training._Follower:
        assert training._latest is not None
        return training._latest

    monkeypatch.setattr(training, "_latest", None)
    monkeypatch.setattr(training, "_asked", answer)
    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=lambda _: time.sleep(0.001))
    monkeypatch.setattr(training, "time", clock)
    commwatch.metrics()
    assert at(59)
    assert not at(61)
    now_s[0] = 80
    commwatch.metrics()
    assert at(160)
    assert commwatch.metrics() == FIGURES
    assert at(399)
    assert not at(401)
    now_s[0] = 100_000
    commwatch.metrics()
    assert at(103_599)
    assert not at(103_601)


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_no_thread(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: Exception) -> None:
    """A process that may have no further thread gets no figures and one line, not an exception."""

    def refused(_: threading.Thread) -> None:
        raise error

    monkeypatch.setattr(training, "_latest", None)
    monkeypatch.setattr(training, "_said", False)
    monkeypatch.setattr(threading.Thread, "start", refused)
    assert [commwatch.metrics(), commwatch.metrics()] == [{}, {}]
    assert capfd.readouterr().err == f"commwatch: no figures: {type(error).__name__}: {error}\n"


def test_broken_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while the process looks for its own rank reaches no script either."""

    def broken() -> None:
        raise ValueError("broken")

    monkeypatch.setattr(training, "_said", False)
    monkeypatch.setattr(training, "_place", broken)
    monkeypatch.setattr(training, "Client", lambda **_: None)
    assert (list(commwatch.summary()), commwatch.last_step()) == ([], None)
