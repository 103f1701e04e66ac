"""Faults beside the intake: logged once, shown in ``/metrics``, and tried again; the rest continues."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from commwatch_agent.config_sources import load
from commwatch_agent.daemon import Daemon
from commwatch_agent.runtime.periodic import OVER, PeriodicThread, known
from commwatch_agent.sources.nccl import NcclLogs
from commwatch_collectors.registry import Reading
from tests.helpers import Trainer, operation, wait_for


def test_a_look_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected error is logged once with its traceback, and the calls continue; its end is logged as well."""
    stop, looks, closed = threading.Event(), iter([None, KeyError("a"), KeyError("b"), None, None]), threading.Event()
    states: list[bool] = []

    def tick() -> None:
        states.append(beside.failing)
        result = next(looks, ...)
        if result is ...:
            stop.set()
        elif result is not None:
            raise result

    beside = PeriodicThread("odd", tick, 0.0, stop, closed.set)
    with caplog.at_level(logging.INFO, "commwatch"):
        beside.thread.start()
        beside.thread.join(60)
    assert closed.is_set()
    assert states == [False, False, True, True, False, False]
    first, second = caplog.records
    assert (first.levelname, second.getMessage()) == ("ERROR", "odd: working again")
    assert "KeyError: 'a'" in caplog.text
    assert "in tick" in caplog.text


def test_what_it_said_before_is_not_told() -> None:
    """While a thread fails its collector is down, also one that has no readings; those of others stay."""
    fine = [Reading("a", (), 1.0)]
    stop = threading.Event()
    bad, good, quiet = (PeriodicThread(name, lambda: None, 1.0, stop) for name in ("bad", "good", "quiet"))
    bad.failing = quiet.failing = True
    assert known([("bad", fine), ("good", fine)], [bad, good, quiet]) == [
        ("bad", None),
        ("good", fine),
        ("quiet", None),
    ]


def test_pauses_are_uneven() -> None:
    """Pauses differ by up to a part of them, so that looks do not follow the rhythm of what they look at; their mean is the period."""
    pauses: list[float] = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            return self.is_set()

    looks = iter(range(1000))
    beside = PeriodicThread("uneven", lambda: OVER if next(looks, None) is None else None, 1.0, Stop(), uneven=0.3)
    beside.thread.start()
    beside.thread.join(60)
    assert len(pauses) == 1000
    assert 0.7 <= min(pauses) < 0.75
    assert 1.25 < max(pauses) <= 1.3
    assert sum(pauses) / 1000 == pytest.approx(1.0, abs=0.05)


def test_agent_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An agent with an unexpected error in one thread reads records, logs the error once, and shows it in ``/metrics``."""
    looks = threading.Semaphore(0)

    def tick(self: NcclLogs) -> None:
        looks.release()
        raise RecursionError("nobody has thought of it")

    monkeypatch.setattr(NcclLogs, "tick", tick)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # the agent is no main thread here
    with Trainer(tmp_path / "run" / "rings" / "a.ring") as trainer, caplog.at_level(logging.ERROR, "commwatch"):
        trainer.write([operation(start_ns=0, end_ns=9)] * 5)
        daemon = Daemon(load({}, None, dir=tmp_path / "run", state=tmp_path / "state", port=0))
        running = threading.Thread(target=daemon.run)
        running.start()
        try:
            for _ in range(3):
                assert looks.acquire(timeout=60)
            wait_for(lambda: daemon._intake.read == 5, "the records")
            page = generate_latest(daemon._registry).decode()
        finally:
            daemon.stop()
            running.join(60)
    assert 'commwatch_collector_up{collector="nccl_log"} 0.0' in page
    assert 'op="all_reduce",rank="0"} 5.0' in page
    (said,) = [record for record in caplog.records if "nccl_log" in record.getMessage()]
    assert said.exc_info is not None


def test_web_server_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent whose web server ends by itself ends, too, and says that it failed: its supervisor starts another."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    daemon = Daemon(load({}, None, dir=tmp_path / "run", state=tmp_path / "state", port=0))
    monkeypatch.setattr(daemon._server, "run", lambda **_: None)
    assert daemon.run() is False


def test_nothing_more_to_do() -> None:
    """A thread whose work is over ends before the agent does, and closes what it has."""
    stop, closed = threading.Event(), threading.Event()
    calls = iter([None, OVER])
    beside = PeriodicThread("once", lambda: next(calls), 0.0, stop, closed.set)
    beside.thread.start()
    beside.thread.join(60)
    assert closed.is_set()
    assert next(calls, "none left") == "none left"


def test_without_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that looks at jobs waits while there is none, calls at once when one begins, and ends at once with the agent."""
    monkeypatch.setattr("commwatch_agent.runtime.periodic.IDLE_S", 3600.0)
    stop, jobs, calls = threading.Event(), threading.Event(), threading.Semaphore(0)
    beside = PeriodicThread("jobs", calls.release, 0.0, stop, jobs=jobs)
    beside.thread.start()
    assert calls.acquire(timeout=60)
    assert not calls.acquire(timeout=0.1)
    jobs.set()
    assert calls.acquire(timeout=60)
    assert calls.acquire(timeout=60)
    jobs.clear()
    stop.set()
    jobs.set()
    beside.thread.join(60)
    assert not beside.thread.is_alive()
