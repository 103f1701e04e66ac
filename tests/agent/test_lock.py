"""The lock of the jobs is held only for the totals: no file is read under it, and no request keeps the intake waiting."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from commwatch_agent.config_sources import load
from commwatch_agent.daemon import Daemon
from commwatch_agent.ingest.processes import Processes
from commwatch_agent.prometheus.exporter import Exporter
from commwatch_agent.reference.references import References
from commwatch_agent.sources import profiles
from tests.helpers import MS, PATIENCE_S, Trainer, Watch, operation, wait_for


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    """An agent without its threads, and a trainer that lives."""
    watch = Watch(tmp_path)
    with Trainer(watch.rings / "job.r0.0.ring") as trainer:
        trainer.write([operation(start_ns=n, end_ns=n + MS) for n in range(2000)])
        watch.tick()
        yield watch


def free(lock: threading.RLock) -> bool:
    """Whether another thread gets it at once."""
    found: list[bool] = []

    def take() -> None:
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join(PATIENCE_S)
    return found == [True]


def test_processes(watch: Watch) -> None:
    """The state of a trainer's process is read without the lock, and reported with its rank, but not that of an earlier process."""
    lock, pids = watch.agent._lock, []

    def state(pid: int) -> str:
        assert free(lock)
        pids.append(pid)
        return "stopped"

    (view,) = watch.agent.ranks(None)
    assert view.process is None
    Processes(watch.aggregate, lock, state=state).tick()
    assert pids == [view.visible_pid] != [os.getpid()]
    assert [view.process for view in watch.agent.ranks(None)] == ["stopped"]
    (book,) = watch.aggregate.rank_totals()
    book.pid = os.getpid()
    assert [view.process for view in watch.agent.ranks(None)] == [None]


def test_references(watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """References are not read under the lock either when metrics are scraped."""
    looks: list[bool] = []
    monkeypatch.setattr(References, "refresh", lambda _: looks.append(free(watch.agent._lock)))
    registry = CollectorRegistry()
    registry.register(
        Exporter(watch.aggregate, watch.agent._lock, lambda: 1, list, references=References(tmp_path / "references"))
    )
    looks.clear()
    assert b"commwatch_collectives_total" in generate_latest(registry)
    assert looks == [True]


def test_alive_within_a_read(tmp_path: Path) -> None:
    """An intake with many records to read reports progress before it has read all of them: a busy agent is not a stuck one."""
    watch, signs = Watch(tmp_path), []
    watch.intake._alive = lambda: signs.append(watch.intake.read)
    with Trainer(watch.rings / "job.r0.0.ring", slots=16_384) as trainer:
        trainer.write([operation(start_ns=n, end_ns=n + MS) for n in range(12_000)])
        watch.tick()
    assert len({read for read in signs if 0 < read < 12_000}) >= 4


def test_long_interval(tmp_path: Path) -> None:
    """An intake that pauses for a minute, as set, is healthy until the end of that pause, also after a change of the setting."""
    daemon = Daemon(load({}, None, port=0, dir=str(tmp_path / "run"), state=str(tmp_path / "state"), interval=60.0))
    daemon._last_alive_ns -= 70 * 10**9
    daemon.config = replace(daemon.config, interval=0.25)
    assert daemon._healthy() is None
    daemon._last_alive_ns -= 70 * 10**9
    assert re.fullmatch(r"the intake has been stuck for 14\d s", daemon._healthy() or "")


def test_housekeeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removing old logs and profiles, which may take as long as a file server does, keeps the intake from nothing."""
    go, begun = threading.Event(), threading.Event()

    def slow(_: object, __: float) -> None:
        begun.set()
        go.wait(PATIENCE_S)

    monkeypatch.setattr(profiles.Profiles, "tidy", slow)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # this is not the main thread
    daemon = Daemon(load({}, None, port=0, dir=str(tmp_path / "run"), state=str(tmp_path / "state")))
    thread = threading.Thread(target=daemon.run)
    thread.start()
    try:
        assert begun.wait(PATIENCE_S)
        with Trainer(tmp_path / "run" / "rings" / "job.r0.0.ring") as trainer:
            trainer.write([operation(start_ns=n, end_ns=n + MS) for n in range(10)])
            wait_for(lambda: daemon._intake.read == 10, "the intake")
    finally:
        go.set()
        daemon.stop()
        thread.join(PATIENCE_S)
