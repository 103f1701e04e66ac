"""The Python hook's blocking calls: their own wait shows the end, and nothing is held past it."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.futures import Future

from commwatch.probe.torch_groups import Group
from commwatch.probe.torch_ops import c10d_ops
from commwatch.probe.torch_pending import Pending
from commwatch.probe.torch_python import PythonProbe
from commwatch.probe.waits.torch_flight import Flight
from commwatch.probe.waits.torch_handles import Handles
from commwatch.wire import events as ev
from commwatch.wire.ring import CURSOR, PROBE_NS, RingWriter

MS = 1_000_000
Ended = list[tuple[Flight, int, int, int]]


class Handle:
    """A handle, with the parts that ``Pending`` uses."""

    def __init__(self, future: Future[Any], failure: str = "") -> None:
        self._future, self._failure = future, failure

    def wait(self) -> bool:
        """Ends the operation, or runs out of time."""
        if self._failure == "timeout":
            raise RuntimeError("timed out")
        if self._failure:
            self._future.set_exception(RuntimeError(self._failure))
            raise RuntimeError(self._failure)
        self._future.set_result(None)
        return True


@pytest.fixture
def ended() -> Ended:
    """What has been seen to end."""
    return []


@pytest.fixture
def pending(ended: Ended) -> Pending:
    """One that lets go of what has ended as the probe does."""

    def finish(flight: Flight, end: int, timing: int, flag: int) -> None:
        flight.done, flight.work, flight.future = True, None, None
        ended.append((flight, end, timing, flag))

    return Pending(finish, lambda _: None)


def launched(pending: Pending, failure: str = "", ago_ns: int = 0) -> tuple[Handle, Future[Any]]:
    """A blocking call that was launched so long ago."""
    future = Future[Any]()
    handle = Handle(future, failure)
    group = Group(lambda: None, 2, (0, 1), "id", aligned=True)
    flight = Flight((), time.monotonic_ns() - ago_ns, 0, group, None, -1, True)
    pending.add_blocking(flight, handle, future)
    return handle, future


def wait(pending: Pending, handle: Handle) -> Any:
    """The wait as the user's call makes it."""
    return pending._waited(pending._by_work[id(handle)], id(handle), Handle.wait, handle)


@pytest.mark.parametrize(("failure", "flag"), [("", 0), ("peer is gone", ev.FAILED)])
def test_the_wait_tells(failure: str, flag: int, pending: Pending, ended: Ended) -> None:
    """The return of the wait is the end, well or badly; the Work is let go of at once."""
    handle, _ = launched(pending, failure)
    before = time.monotonic_ns()
    if failure:
        with pytest.raises(RuntimeError, match=failure):
            wait(pending, handle)
    else:
        assert wait(pending, handle) is True
    ((_, end, timing, flagged),) = ended
    assert before <= end <= time.monotonic_ns()
    assert (timing, flagged) == (ev.BY_FUTURE, flag)
    held = weakref.ref(handle)
    del handle
    gc.collect()  # the exception's own frames
    assert held() is None


def test_a_wait_that_runs_out_of_time(pending: Pending, ended: Ended) -> None:
    """If an operation continues without a reference to its Work, its end is still seen when it comes."""
    handle, future = launched(pending, "timeout")
    with pytest.raises(RuntimeError, match="timed out"):
        wait(pending, handle)
    assert ended == []
    held = weakref.ref(handle)
    del handle
    gc.collect()
    assert held() is None
    future.set_result(None)
    assert [(timing, flag) for _, _, timing, flag in ended] == [(ev.BY_FUTURE, 0)]


@pytest.mark.parametrize(("ago_ns", "expected"), [(0, []), (100 * MS, [ev.BY_POLL])])
def test_nobody_waits(ago_ns: int, expected: list[int], pending: Pending, ended: Ended) -> None:
    """A call whose caller waits elsewhere is found by looking, but not before its wait could have begun."""
    _, future = launched(pending, ago_ns=ago_ns)
    future.set_result(None)
    pending.poll()
    assert [timing for _, _, timing, _ in ended] == expected


def test_overtaken(pending: Pending, ended: Ended) -> None:
    """If an operation that is only counted reuses the memory of an earlier one without a wait, its wait is not taken for the earlier one's."""
    first, second = torch.ones(3), torch.ones(3)
    group = Group(lambda: None, 2, (0, 1), "id", aligned=True)
    flights = [Flight((), time.monotonic_ns(), 0, group, None, -1, True) for _ in range(2)]
    for flight, output in zip(flights, (first, second), strict=True):
        pending.add(flight, object(), (output,))
    pending.overtaken([first])
    assert [(flight, timing, flag) for flight, _, timing, flag in ended] == [(flights[0], ev.BY_NONE, ev.UNTIMED)]


def test_cost_that_is_measured_from_the_middle_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that ends in another thread while its launch is being followed costs what it costs, not all that its thread ever took."""
    probe = PythonProbe({})
    probe.ring = writer = RingWriter(tmp_path / "a.ring", {})
    group = Group(lambda: None, 2, (0, 1), "id", aligned=True)
    flight = Flight((1, 0, 0, -1, 0, 8, 0, 0), 0, 0, group, None, -1, True)
    # The thread that launched it has done with it while this one is at it.
    monkeypatch.setattr(writer, "end", lambda _: setattr(flight, "cost_of", 64))
    probe.finish(flight, 9, ev.BY_FUTURE)
    assert writer.counters[PROBE_NS] == 0


@pytest.mark.parametrize("says", [False, True])
def test_call_that_may_not_block(says: bool, tmp_path: Path) -> None:
    """The end of an operation is seen without a wait, unless its call says that it blocks: before torch 2.8, DDP's calls say nothing."""
    probe = PythonProbe({})
    probe.ring = writer = RingWriter(tmp_path / "a.ring", {})
    group = Group(lambda: None, 2, (0, 1), "id", aligned=True)
    flight = Flight((1, 0, 0, -1, 0, 8, 0, 0), 0, 0, group, None, -1, True)
    future = Future[Any]()
    probe._follow_future(flight, Handle(future), future, says)
    future.set_result(None)
    assert (flight.done, writer.counters[CURSOR]) == ((False, 0) if says else (True, 1))


@pytest.mark.parametrize("name", ["async_op", "asyncOp"])
def test_names_of_an_argument(name: str) -> None:
    """The argument that says whether a call blocks is found under its present name, and under that before torch 2.8."""
    group = "__torch__.torch.classes.c10d.ProcessGroup process_group"
    with torch.library._scoped_library("c10d", "FRAGMENT") as library:
        library.define(f"named_{name}(Tensor tensor, {group}, bool {name}) -> ()")
        (found,) = (op for op in c10d_ops() if op.name == f"named_{name}")
    assert found.async_at == 2


def test_given_up(pending: Pending, ended: Ended) -> None:
    """When the probe goes, what is in flight is held no longer and still finds its end."""
    handle, future = launched(pending)
    pending.give_up()
    held = weakref.ref(handle)
    del handle
    assert (ended, held()) == ([], None)
    future.set_result(None)
    assert [timing for _, _, timing, _ in ended] == [ev.BY_FUTURE]


def test_handles_hold_no_flight() -> None:
    """What sees how long threads are blocked keeps no operation that all other code has dropped: the sweep could not tell that it is abandoned."""
    group, handles, work = Group(lambda: None, 2, (0, 1), "id", aligned=True), Handles(), object()
    flight = Flight((), time.monotonic_ns(), 0, group, None, -1, True)
    before = sys.getrefcount(flight)
    handles.add(flight, work)
    assert handles.has(work)
    assert sys.getrefcount(flight) == before
