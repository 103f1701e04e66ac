"""Finds the ends of operations for which the probe has set no callback: by the caller's wait, or by polling.

An operation that a blocking call waits for needs no callback, which would take the GIL in the backend's thread.

A Work (PyTorch's handle of an operation) is held only while other code holds it too (or until it completes): once our reference is the last one in
Python, it is dropped. A send or recv then has no observable end; a collective still has ``wait_tensor``, which is
recognised by the memory it waits for.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from commwatch.probe.waits.torch_flight import Flight
from commwatch.probe.waits.torch_handles import Handles
from commwatch.wire import events as ev
from commwatch.wire.handlers import raised_by_handler
from commwatch.wire.ring import IN_FLIGHT_SLOTS, RingWriter

HEARTBEAT_S = 1.0
_POLL_FIRST_S, _POLL_SLOWEST_S = 0.002, 0.05
#: References to a Work that only we hold: the flight's attribute and the argument of getrefcount.
_ONLY_OURS = 2


def _only_claimed() -> int:
    """Return the references to a flight that no code will end: the table of flights, a local variable, the argument of getrefcount."""
    claimed = [object()]
    flight = claimed[0]
    return sys.getrefcount(flight)  # from Python 3.14 on, without the argument


_ONLY_CLAIMED = _only_claimed()
_SURELY_HANDED_OVER_NS = 1_000_000_000
#: Ns after the launch by which a blocking call has begun its wait.
_SURELY_WAITING_NS = 50_000_000
#: Operations kept without their Work, for wait_tensor to claim.
_MOST_UNCLAIMED = 256
#: Ns that they are kept, well before they would look like a hang.
_LONGEST_UNCLAIMED_NS = 5_000_000_000
#: Most seconds that the end of the process waits for callbacks; and after the last one, for torch to drop it.
_MOST_EXIT_S, _DROP_S = 30.0, 0.01


class FlightTable:
    """The flights in the ring's table of operations in flight."""

    def __init__(self) -> None:
        #: By slot; the last one is for flights that found the table full.
        self.flights: list[Flight | None] = [None] * (IN_FLIGHT_SLOTS + 1)
        #: Slots that no flight claimed at the latest sweep, and their stamps.
        self._unclaimed: dict[int, int] = {}

    def sweep(self, writer: RingWriter, finish: Callable[[Flight, int, int, int], None]) -> None:
        """End abandoned operations: a signal handler raised during our bookkeeping of them.

        Args:
            finish: as for ``Pending``.
        """
        claimed, taken = self.flights, writer.taken()
        for slot in taken:
            flight = claimed[slot]
            # ``Exposure`` holds a reference while the flight is watched.
            if flight is not None and sys.getrefcount(flight) <= _ONLY_CLAIMED + flight.watched:
                finish(flight, time.monotonic_ns(), ev.BY_NONE, ev.UNTIMED)
        unclaimed = {at: stamp for at, stamp in taken.items() if (each := claimed[at]) is None or each.done}
        for at, _ in unclaimed.items() & self._unclaimed.items():
            claimed[at] = None
            writer.end(at)
        self._unclaimed = unclaimed


def _memory_of(outputs: Any) -> tuple[int, ...]:
    """Return the addresses of the storages of the tensors in ``outputs``."""
    tensors = outputs if isinstance(outputs, (list, tuple)) else (outputs,)
    strided = (t for t in tensors if isinstance(t, torch.Tensor) and t.layout is torch.strided)
    return tuple(address for t in strided if (address := _address(t)))


def _address(tensor: Any) -> int:
    """Return the address of a tensor's storage; 0: it has no memory, such as a fake tensor or an empty one."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except RuntimeError as error:
        if raised_by_handler(error):
            raise
        return 0


class Pending:
    """Operations without a callback, and the waits that end them.

    Args:
        finish: called as ``finish(flight, end_ns, timing, flag)`` when an end has been seen, or never will be.
        wait_begins: called with the flight a thread begins to wait for.
        wake: ends the sleep of the thread that polls.
    """

    def __init__(
        self,
        finish: Callable[[Flight, int, int, int], None],
        wait_begins: Callable[[Flight], None],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._finish, self._wait_begins, self._wake = finish, wait_begins, wake
        self._by_work: dict[int, Flight] = {}
        self._by_memory: dict[int, Flight] = {}
        self._pause = HEARTBEAT_S
        #: A blocking call was added since the last poll. It does not wake the thread, so the thread polls again soon.
        self._blocking = False
        #: Exceptions of a signal handler in a callback in this thread.
        self._raised: list[BaseException] = []
        #: Futures with a callback that has not been called, by the id of their flight; and whether there was ever one.
        self._called_later: dict[int, Any] = {}
        self._ever_called = self._leaving = False
        #: Asynchronous collectives that a callback ends.
        self.handles = Handles()
        self._original: Any = None
        self._replacement: Any = None
        self._library: torch.library.Library | None = None

    def add_blocking(self, flight: Flight, work: Any, future: Any) -> None:
        """Add an operation whose caller will wait for it at once."""
        flight.work, flight.future = work, future
        self._by_work[id(work)] = flight
        self._blocking = True

    def ended(self, flight: Flight, timing: int, future: Any) -> None:
        """Finish an operation whose future is ready."""
        end = time.monotonic_ns()
        try:
            future.value()
        except Exception as error:  # the operation failed; its owner learns that from its own wait
            if raised_by_handler(error):
                raise
            error.__traceback__ = error.__context__ = (
                None  # a future may keep it; our callers' frames must not be kept along
            )
            self._finish(flight, end, timing, ev.FAILED)
        else:
            self._finish(flight, end, timing, 0)

    def add(self, flight: Flight, work: Any, args: Sequence[Any]) -> None:
        """Add an operation that was just launched."""
        flight.work = work
        self._by_work[id(work)] = flight
        if flight.queue is None:
            self._expect_wait_tensor(flight, args[0])
        self._pause = _POLL_FIRST_S
        self._wake()

    def pause(self, at_most_s: float = HEARTBEAT_S) -> float:
        """Return the seconds until the next poll: a heartbeat's time at most, less while operations are pending."""
        pause = self._pause if self._by_work else _POLL_SLOWEST_S if self._blocking else HEARTBEAT_S
        self._blocking = False
        self._pause = min(self._pause * 2, _POLL_SLOWEST_S)
        return min(pause, at_most_s)

    def poll(self) -> None:
        """Finish operations that have completed, and drop a Work that no other code holds."""
        now = time.monotonic_ns()
        for key, flight in list(self._by_work.items()):
            work = flight.work
            if flight.done or work is None:
                self._by_work.pop(key, None)
                continue
            future = flight.future
            if future is not None:
                # Its caller does not wait yet, or waits in C++.
                if now - flight.launch > _SURELY_WAITING_NS and future.done() and self._by_work.pop(key, None):
                    self.ended(flight, ev.BY_POLL, future)
                continue
            try:
                completed = work.is_completed()
            except RuntimeError:  # the operation failed; its owner learns that from its own wait
                self._end(key, flight, ev.BY_POLL, ev.FAILED)
                continue
            del work
            if completed:
                self._end(key, flight, ev.BY_POLL)
            else:
                # Right after the launch the caller may not have its reference yet.
                alone = sys.getrefcount(flight.work) <= _ONLY_OURS and not flight.blocked_since
                if alone and now - flight.launch > _SURELY_HANDED_OVER_NS:
                    self._let_go(key, flight)

    def _end(self, key: int, flight: Flight, timing: int, flag: int = 0) -> None:
        self._finish(flight, time.monotonic_ns(), timing, flag)
        self._by_work.pop(key, None)
        for memory in flight.outputs if flight.queue is None else ():
            if self._by_memory.get(memory) is flight:
                self._by_memory.pop(memory, None)

    def _let_go(self, key: int, flight: Flight) -> None:
        self._by_work.pop(key, None)
        flight.work = None
        if flight.queue is not None or not flight.outputs:
            self._finish(flight, time.monotonic_ns(), ev.BY_NONE, ev.UNTIMED)

    def before_exit(self) -> None:
        """At the end of the process, wait for the callbacks that are still to come, as the destructor of a process group does.

        A thread of the backend that calls one after the interpreter has ended would abort the process.
        """
        self._leaving = True
        until = time.monotonic() + _MOST_EXIT_S
        while any(not each.done() for each in list(self._called_later.values())) and time.monotonic() < until:
            time.sleep(_DROP_S / 2)
        if self._ever_called:
            time.sleep(_DROP_S)

    def give_up(self) -> None:
        """Finish all pending operations, because the probe is removed."""
        for flight in [*self._by_work.values(), *self._by_memory.values()]:
            if flight.future is not None and not self._leaving:
                self.call_back(flight, flight.future)
                flight.work = flight.future = None
            else:
                self._finish(flight, time.monotonic_ns(), ev.BY_NONE, ev.UNTIMED)
        self._by_work.clear()
        self._by_memory.clear()

    # -- waits --------------------------------------------------------------------------------

    def watch_waits(self) -> None:
        """Wrap waits to see those for pending Works; all others cost two look-ups."""
        original = self._original = Work.wait
        by_work, handles = self._by_work, self.handles

        def wait(self_: Any, *args: Any, **kwargs: Any) -> Any:
            flight = by_work.get(id(self_))
            if flight is None or flight.work is not self_ or not flight.on_cpu:
                return (
                    handles.wait(original, self_, *args, **kwargs)
                    if handles.has(self_)
                    else original(self_, *args, **kwargs)
                )
            return self._waited(flight, id(self_), original, self_, *args, **kwargs)

        wait.__doc__ = original.__doc__
        wait._torchdynamo_disable = True  # type: ignore[attr-defined]
        self._replacement = wait
        Work.wait = wait  # type: ignore[method-assign, assignment]
        self.handles.watch()
        self._hook_wait_tensor()

    def _waited(self, flight: Flight, key: int, original: Any, *args: Any, **kwargs: Any) -> Any:
        if flight.future is not None:
            return self._blocked(flight, flight.future, key, original, *args, **kwargs)
        try:
            self._wait_begins(flight)
            result = self.handles.wait(original, *args, **kwargs)
            self._end(key, flight, ev.BY_WAIT)
        except BaseException as error:
            if raised_by_handler(error):
                self._end(key, flight, ev.BY_NONE, ev.UNTIMED)
            else:
                self._end(key, flight, ev.BY_WAIT, ev.FAILED)
            raise
        return result

    def _blocked(self, flight: Flight, future: Any, key: int, original: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            self._by_work.pop(key, None)
            result = original(*args, **kwargs)
            self._after_wait(flight, future)
        except BaseException:
            self._after_wait(flight, future)
            raise
        return result

    def _after_wait(self, flight: Flight, future: Any) -> None:
        """Finish an operation after its wait. May be called twice."""
        if future.done():
            self.ended(flight, ev.BY_FUTURE, future)
        else:  # the wait timed out
            flight.work = flight.future = None
            self.call_back(flight, future)

    def call_back(self, flight: Flight, future: Any) -> None:
        """Call ``ended`` once the future is ready: mostly in the backend's thread, at once if it is ready by now."""
        try:
            self._ever_called = True
            self._called_later[id(flight)] = future
            future.add_done_callback(partial(self._called_back, flight))
        except BaseException:  # of a signal handler
            self._called_later.pop(id(flight), None)
            raise
        if self._raised:
            raise self._raised.pop()

    def _called_back(self, flight: Flight, future: Any) -> None:
        try:
            self.ended(flight, ev.BY_FUTURE, future)
            self._called_later.pop(id(flight), None)
        except BaseException as error:  # of a signal handler; torch would swallow it
            self._raised.append(error)
            self._called_later.pop(id(flight), None)

    def unwatch_waits(self) -> None:
        """Undo ``watch_waits``."""
        self.handles.unwatch()
        # Another library may have wrapped ours since: then ours stays, and finds nothing pending.
        if self._original is not None and vars(Work)["wait"] is self._replacement:
            Work.wait = self._original  # type: ignore[method-assign]
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def _expect_wait_tensor(self, flight: Flight, outputs: Any) -> None:
        """Expect a ``wait_tensor`` for these outputs: functional collectives wait in C++, without a Work."""
        flight.outputs = _memory_of(outputs)
        self._give_up(flight.outputs)
        for memory in flight.outputs:
            self._by_memory[memory] = flight
        if len(self._by_memory) > _MOST_UNCLAIMED:
            self._give_up(list(self._by_memory)[:-_MOST_UNCLAIMED])

    def overtaken(self, outputs: Any) -> None:
        """Give up earlier operations on these outputs: a later one, only counted, writes there and is waited for."""
        if self._by_memory:
            self._give_up(_memory_of(outputs))

    def give_up_unclaimed(self, now_ns: int) -> None:
        """Give up old operations that no code holds or waits for: they have no observable end."""
        old = [
            flight
            for flight in list(self._by_memory.values())
            if flight.work is None and not flight.blocked_since and now_ns - flight.launch > _LONGEST_UNCLAIMED_NS
        ]
        for flight in old:
            self._give_up(flight.outputs)

    def _give_up(self, memories: Iterable[int]) -> None:
        for earlier in [self._by_memory.pop(memory) for memory in memories if memory in self._by_memory]:
            self._finish(earlier, time.monotonic_ns(), ev.BY_NONE, ev.UNTIMED)

    def _hook_wait_tensor(self) -> None:
        after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        redispatch = torch.ops._c10d_functional.wait_tensor.default._handle.redispatch_boxed

        def kernel(keyset: Any, tensor: Any) -> Any:
            flight = self._by_memory.get(_address(tensor)) if self._by_memory else None
            if flight is None or flight.done:
                return redispatch(keyset & after, tensor)
            return self._waited(flight, id(flight.work), redispatch, keyset & after, tensor)

        self._library = torch.library.Library("_c10d_functional", "IMPL")
        self._library.impl("wait_tensor", kernel, "BackendSelect", with_keyset=True)
