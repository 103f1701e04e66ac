"""Runs the modules of tests in several processes: forks of the one that has collected them all.

Each process of pytest-xdist would import, compile and collect all modules itself, for ten seconds of a core.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import pytest
from _pytest.capture import CaptureManager
from _pytest.reports import BaseReport
from _pytest.terminal import TerminalReporter

_FORK = get_context("fork")


def module_of(item: pytest.Item) -> str:
    """Return the path of the module of a test."""
    return item.nodeid.partition("::")[0]


@dataclass(frozen=True)
class _Worker:
    number: int
    process: ForkProcess
    connection: Connection
    #: Tests that it has been given, by their places among all, and that have not ended.
    given: deque[int]


class Workers:
    """Plugin that gives modules, in the order of their tests, to as many processes as asked for, each when it begins the last test it has."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._workers: dict[Connection, _Worker] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all tests; leave it to pytest what to do if there is none, or an error in a module."""
        if session.testsfailed or session.config.option.collectonly or not session.items:
            return None
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        assert isinstance(reporter, TerminalReporter)
        reporter.showfspath = False  # lines of several modules would be mixed
        modules: dict[str, list[int]] = {}
        for place, item in enumerate(session.items):
            modules.setdefault(module_of(item), []).append(place)
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        waiting = deque(modules.values())
        for number in range(min(self._number, len(waiting))):
            self._start(session, number, ())
        while self._workers:
            for connection in wait(list(self._workers)):
                assert isinstance(connection, Connection)
                self._listen(session, self._workers[connection], waiting)
            if session.shouldfail or session.shouldstop:
                waiting.clear()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def _start(self, session: pytest.Session, number: int, first: Sequence[int]) -> None:
        assert threading.active_count() == 1, "a fork would lack the other threads, but not what they hold"
        capture = session.config.pluginmanager.getplugin("capturemanager")
        assert isinstance(capture, CaptureManager)
        ours, theirs = _FORK.Pipe()
        capture.stop_global_capturing()  # each process has files of its own
        process = _FORK.Process(target=self._work, args=(session, number, theirs, capture, first))
        process.start()
        capture.start_global_capturing()
        theirs.close()
        self._workers[ours] = _Worker(number, process, ours, deque(first))

    # -- the first process ------------------------------------------------------------------------

    def _listen(self, session: pytest.Session, worker: _Worker, waiting: deque[list[int]]) -> None:
        hook = session.config.hook
        try:
            kind, content = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            self._ended(session, worker)
            return
        if kind == "next":
            module = waiting.popleft() if waiting else []
            worker.given.extend(module)
            with suppress(BrokenPipeError):  # it has ended, and its connection will say so
                worker.connection.send(module)
        elif kind == "start":
            hook.pytest_runtest_logstart(**content)
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=session.config, data=content)
            hook.pytest_runtest_logreport(report=report)
        else:
            worker.given.popleft()
            hook.pytest_runtest_logfinish(**content)

    def _ended(self, session: pytest.Session, worker: _Worker) -> None:
        """Have the tests that a process leaves behind run in another; that during which it ended has failed."""
        del self._workers[worker.connection]
        worker.connection.close()
        worker.process.join()
        if worker.given:
            item = session.items[worker.given.popleft()]
            why = f"the process of this test has ended with {worker.process.exitcode}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
            session.config.hook.pytest_runtest_logreport(report=report)
        elif worker.process.exitcode:
            raise RuntimeError(f"a process of tests has ended with {worker.process.exitcode} after its last test")
        if worker.given:
            self._start(session, worker.number, worker.given)

    # -- the others -------------------------------------------------------------------------------

    def _work(
        self,
        session: pytest.Session,
        number: int,
        connection: Connection,
        capture: CaptureManager,
        first: Sequence[int],
    ) -> None:
        for other in self._workers:
            other.close()
        self._workers.clear()
        config = session.config
        config.get_terminal_writer()._file = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
        capture.start_global_capturing()
        factory = config._tmp_path_factory  # type: ignore[attr-defined]
        factory._basetemp = factory.getbasetemp() / f"w{number}"
        factory._basetemp.mkdir(exist_ok=True)
        config.pluginmanager.register(_Messages(config, connection))
        before: pytest.Item | None = None
        for place in _places(connection, first):
            item = session.items[place]
            if before is not None:
                config.hook.pytest_runtest_protocol(item=before, nextitem=item)
            before = item
        if before is not None:
            config.hook.pytest_runtest_protocol(item=before, nextitem=None)
        os._exit(0)  # without a wait for threads that a test may have left behind


def _places(connection: Connection, first: Sequence[int]) -> Iterator[int]:
    """Yield the tests that a process has to run: ``first``, then the modules that it is given."""
    places = first
    while True:
        yield from places
        connection.send(("next", None))
        places = connection.recv()
        if not places:
            return


class _Messages:
    """Plugin that sends the first process what is reported in this one."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._connection.send(("start", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._connection.send(("finish", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: BaseReport) -> None:
        data: dict[str, Any] = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))
