"""How long the training thread was idle: sums over given times, and two real threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from commwatch.probe.exposure import Exposure
from tests.helpers import wait_for

#: Wall time is a parameter, CPU time is this thread's own: against minutes of the one the other is nothing.
MINUTE = 60_000_000_000


def about(ns: int) -> object:
    """``ns``, less what CPU time the test itself has used."""
    return pytest.approx(ns, abs=MINUTE / 2)


def test_one_operation() -> None:
    """A period with an operation in flight counts, less the CPU time spent in it; what lies outside does not."""
    exposure = Exposure()
    exposure.begin("a", 10 * MINUTE)
    exposure.end("a", 15 * MINUTE)
    assert exposure.take(100 * MINUTE) == about(5 * MINUTE)


def test_overlapping_operations() -> None:
    """Operations in flight together count once, from the first's begin to the last's end."""
    exposure = Exposure()
    exposure.begin("a", 0)
    exposure.begin("b", 3 * MINUTE)
    exposure.begin("b", 4 * MINUTE)  # a thread begins to wait for it
    exposure.end("a", 6 * MINUTE)
    exposure.end("b", 9 * MINUTE)
    exposure.begin("c", 20 * MINUTE)
    exposure.end("c", 22 * MINUTE)
    assert exposure.take(50 * MINUTE) == about(11 * MINUTE)


def test_take_cuts_a_running_period() -> None:
    """A period that runs on over a mark is split there: each part counts in its own step, once."""
    exposure = Exposure()
    exposure.begin("a", 0)
    assert exposure.take(4 * MINUTE) == about(4 * MINUTE)
    assert exposure.take(10 * MINUTE) == about(6 * MINUTE)
    exposure.end("a", 13 * MINUTE)
    assert exposure.take(30 * MINUTE) == about(3 * MINUTE)
    assert exposure.take(40 * MINUTE) == 0


def test_in_call() -> None:
    """An operation that was over when its call returned counts whole, unless something else was in flight anyway."""
    exposure = Exposure()
    exposure.in_call(2 * MINUTE, 5 * MINUTE)
    assert exposure.take(6 * MINUTE) == 3 * MINUTE
    exposure.begin("a", 10 * MINUTE)
    exposure.in_call(11 * MINUTE, 15 * MINUTE)
    exposure.end("a", 20 * MINUTE)
    assert exposure.take(21 * MINUTE) == about(10 * MINUTE)


def test_end_of_something_unknown() -> None:
    """The end of what never began, or has ended, counts nothing."""
    exposure = Exposure()
    exposure.end("a", 5 * MINUTE)
    exposure.begin("b", 10 * MINUTE)
    exposure.end("b", 11 * MINUTE)
    exposure.end("b", 50 * MINUTE)
    assert exposure.take(60 * MINUTE) == about(MINUTE)


def test_never_negative() -> None:
    """A period in which the thread used more CPU time than passed by the given clock counts 0."""
    exposure = Exposure()
    exposure.begin("a", 0)
    burn(0.001)
    exposure.end("a", 1)
    assert exposure.take(2) == 0


def test_not_known() -> None:
    """Once CPU time says nothing (an operation on a GPU) the exposed time is not known, which is not 0."""
    exposure = Exposure()
    exposure.in_call(0, MINUTE)
    exposure.known = False
    assert exposure.take(2 * MINUTE) is None


def test_thread_that_has_ended() -> None:
    """When the watched thread is gone its periods count nothing, and nothing is raised."""
    exposure, ready, leave = Exposure(), threading.Event(), threading.Event()

    def work() -> None:
        ready.set()
        leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    exposure.watch(thread.ident or 0)
    exposure.begin("a", 0)
    leave.set()
    kernels_view = Path(f"/proc/self/task/{thread.native_id}")
    wait_for(lambda: not kernels_view.exists(), "the thread to be gone for the kernel too")
    exposure.end("a", 5 * MINUTE)
    assert exposure.take(6 * MINUTE) == 0
    # Another thread may be watched then.
    exposure.watch(threading.get_ident())
    exposure.begin("b", 10 * MINUTE)
    exposure.end("b", 12 * MINUTE)
    assert exposure.take(13 * MINUTE) == about(2 * MINUTE)


def burn(seconds: float) -> None:
    """Use so much CPU time of this thread, however long that takes."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def watched(work: Callable[[], object]) -> tuple[int, int, int]:
    """Exposed, wall and CPU time of ``work`` in a separate training thread, with an operation in flight all the time."""
    exposure, times = Exposure(), list[int]()

    def train() -> None:
        exposure.watch(threading.get_ident())
        cpu, wall = time.thread_time_ns(), time.monotonic_ns()
        exposure.begin("a", wall)
        work()
        ended = time.monotonic_ns()
        exposure.end("a", ended)
        times.extend((ended - wall, time.thread_time_ns() - cpu))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    exposed = exposure.take(0)
    assert exposed is not None
    return exposed, times[0], times[1]


def test_thread_that_computes() -> None:
    """A thread that computes beside an operation is not exposed but for the time it is kept from its core."""
    exposed, wall, cpu = watched(lambda: burn(0.05))
    assert wall - cpu <= exposed <= wall - 0.05e9


def test_thread_that_waits() -> None:
    """A thread that waits is exposed for nearly all of the wait."""

    def wait_for_another() -> None:
        other = threading.Thread(target=burn, args=(0.05,))
        other.start()
        other.join()

    exposed, wall, cpu = watched(wait_for_another)
    assert exposed >= wall - cpu
    assert exposed > wall / 2
