"""When processes end: noted in their order, and for processes that are watched only."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import closing

import pytest

from commwatch_agent.ingest.rings import process_ends
from commwatch_agent.ingest.rings.process_ends import ProcessEnds
from tests.helpers import wait_for


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])


def kernel_tells() -> bool:
    return tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 15)


def noted(ends: ProcessEnds, pid: int) -> bool:
    ends.tick()
    return ends.at(pid) is not None


def test_in_order() -> None:
    """The ends of killed processes are noted in the order in which they came, before they are waited for; what is forgotten is not known."""
    with closing(ProcessEnds()) as ends:
        first, second, other = sleeper(), sleeper(), sleeper()
        try:
            for process in (first, second, second):
                ends.watch(process.pid)
            before = time.monotonic_ns()
            for process in (second, first, other):
                process.kill()
                ends.tick()
            wait_for(lambda: noted(ends, first.pid) and noted(ends, second.pid), "both ends")
            assert before < (ends.at(second.pid) or 0) <= (ends.at(first.pid) or 0) <= time.monotonic_ns()
            assert ends.at(other.pid) is None
            ends.forget(first.pid)
            assert ends.at(first.pid) is None
        finally:
            for process in (first, second, other):
                process.kill()
                process.wait()


@pytest.mark.parametrize("waited_for", [False, True])
@pytest.mark.parametrize(("code", "status"), [("os.kill(os.getpid(), 9)", -9), ("os._exit(3)", 3), ("0", None)])
def test_how_they_ended(code: str, status: int | None, waited_for: bool) -> None:
    """The signal or the exit code of a process is noted with its end, whether or not its parent has waited for it; 0 is not told from not known."""
    command = [sys.executable, "-S", "-c", f"import os; input(); {code}"]
    with closing(ProcessEnds()) as ends, subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        ends.watch(process.pid)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        if waited_for:
            process.wait()
        wait_for(lambda: noted(ends, process.pid), "the end")
        # Before Linux 6.15, only a process that was not waited for has a status.
        assert ends.status(process.pid) == (status if kernel_tells() or not waited_for else None)
        ends.forget(process.pid)
        assert ends.status(process.pid) is None


def test_killed_by_one_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was killed by the time of another one's end has ended with it, however long the kernel takes to end it."""
    killed: set[int] = set()
    monkeypatch.setattr(process_ends, "is_killed", killed.__contains__)
    with closing(ProcessEnds()) as ends:
        first, slow, other = sleeper(), sleeper(), sleeper()
        try:
            for process in (first, slow, other):
                ends.watch(process.pid)
            killed.add(slow.pid)
            first.kill()
            wait_for(lambda: noted(ends, first.pid), "the first end")
            assert ends.at(slow.pid) is None
            other.kill()
            wait_for(lambda: noted(ends, other.pid), "another end")
            slow.kill()
            wait_for(lambda: noted(ends, slow.pid), "the slow end")
            assert ends.at(slow.pid) == ends.at(first.pid) != ends.at(other.pid)
        finally:
            for process in (first, slow, other):
                process.kill()
                process.wait()


def test_processes_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not exist, and one more than may be watched, are not watched, and end nothing."""
    monkeypatch.setattr(process_ends, "_MOST", 1)
    with closing(ProcessEnds()) as ends, sleeper() as first, sleeper() as second:
        ends.watch(1 << 30)
        ends.watch(first.pid)
        ends.watch(second.pid)
        first.kill()
        second.kill()
        wait_for(lambda: noted(ends, first.pid), "the end")
        assert (ends.at(second.pid), ends.at(1 << 30)) == (None, None)
    ends.watch(os.getpid())  # the intake ends after the thread that waits for ends
    assert ends.at(os.getpid()) is None
