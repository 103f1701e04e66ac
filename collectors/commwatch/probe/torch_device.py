"""Times operations on GPUs for the Python hook; ``native/device.h`` does so for the native hook, with more reasons.

The probe's thread finds the ends, some milliseconds late. So a duration comes from the GPU's clock (``events``), or, with
polling, is only as exact as the interval of the polls.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple
from weakref import ref

import torch

from commwatch.probe.governor import MOST_KEPT
from commwatch.probe.torch_timing import EVENTS, OFF, Timing, step_aside
from commwatch.probe.waits.torch_flight import Flight
from commwatch.wire import events as ev
from commwatch.wire.handlers import raised_by_handler

#: ``finish(flight, end_ns, timing, flag, began_ns, measured)``.
Finish = Callable[[Flight, int, int, int, int, bool], None]
#: Seconds between two polls while something is pending.
POLL_S = 0.005
_SPARE = 64
#: Seconds for which the training thread waits for a call of the probe's thread that blocks.
_PATIENCE_S = 1.0
#: Place of the size in a flight's head.
_SIZE = 5
#: Backends whose blocking collectives run on the current stream, though they have a Work. Its duration includes the wait for the group's
#: earlier operations on other streams.
_BLOCKING_HERE = ("nccl2", "nccl-lazy")


def _check(took_ns: int | None, at_most_ns: int) -> None:
    """Compare a duration by a device's clock with the operation's time on the host, within which its events lie.

    Raises:
        RuntimeError: it is longer, so the events do not measure the operation.
    """
    if took_ns is not None and took_ns > 1.01 * at_most_ns + 100_000:
        raise RuntimeError(
            f"its clock measured {took_ns // 1000} µs for an operation of at most {at_most_ns // 1000} µs"
        )


class _Backing(NamedTuple):
    """What the backend of a process group does."""

    pg: ref[Any]
    #: Its blocking collectives run on the current stream; their Work is not needed.
    blocks_here: bool
    #: Its Works report durations.
    has_times: bool


class Watch:
    """An operation on a GPU, or all operations of a batch, which begin and end together."""

    __slots__ = (
        "before",
        "began_ns",
        "device",
        "first",
        "flights",
        "given_up",
        "group",
        "here",
        "line",
        "next",
        "over",
        "pg",
        "reached",
        "ready",
        "seen_running",
        "seen_waiting",
        "timed",
        "work",
    )

    def __init__(
        self, device: torch.device, pg: Any, ready: torch.Event | None, *, first: bool, timed: bool, here: bool
    ) -> None:
        self.device = device
        #: Its duration comes from the device's clock, not from polls.
        self.timed = timed
        #: It runs on the current stream; its Work is not needed.
        self.here = here
        #: Held until the call returns.
        self.pg = pg
        #: On the stream that was current at the launch: the operation's input is ready.
        self.ready = ready
        #: The first of its queue: it also makes the communicator, or its connections, so its time is not that of an operation.
        self.first = first
        self.flights: list[Flight] = []
        #: Id of the process group, and the device.
        self.group = (0, device)
        #: Operations of one line end in the order of their launch.
        self.line: Hashable = None
        self.work: Any = None
        #: Recorded after the call, if there is no Work: the operation runs on the current stream.
        self.over: torch.Event | None = None
        #: That of the operation before it in its group, which NCCL runs first, on whatever stream.
        self.before: torch.Event | None = None
        self.began_ns = 0
        #: Its Work must not be asked any more.
        self.given_up = False
        #: It is the first of its line; the device has reached it.
        self.next = self.reached = False
        #: What an earlier poll saw: inputs that were not ready; an operation that had begun.
        self.seen_waiting = self.seen_running = False


class Devices:
    """Tracks operations on GPUs until they end.

    Args:
        in_flight: enters an operation into the ring's table of operations in flight, because it is the next of its queue.
        blocked: called with an operation that the device has reached, and the time in ns.
        wake: wakes the probe's thread, which may sleep long while nothing is pending.
        complain: called with one line at the first error of a device; no operation is timed after it.
    """

    def __init__(
        self,
        timing: Timing,
        *,
        finish: Finish,
        in_flight: Callable[[Flight], None],
        blocked: Callable[[Flight, int], None],
        wake: Callable[[], None],
        complain: Callable[[str], None],
    ) -> None:
        self._mode, self._finish, self._wake, self._complain = timing.mode, finish, wake, complain
        self._in_flight, self._blocked = in_flight, blocked
        #: Bytes that are held of each operation, by the id of its watch; 0 without a Work.
        self._held: dict[int, int] = {}
        #: By line, for the probe's thread; it takes what has arrived there.
        self._lines: dict[Hashable, deque[Watch]] = {}
        self._arrived: deque[Watch] = deque()
        #: The event after the latest blocking operation of each group and device.
        self._latest_over: dict[tuple[int, torch.device], torch.Event] = {}
        #: Events to be used again, by device and whether they have a clock.
        self._spare: defaultdict[tuple[torch.device, bool], deque[torch.Event]] = defaultdict(
            lambda: deque(maxlen=_SPARE)
        )
        self._batches = threading.local()
        #: Of process groups whose timing was asked for, by id; not a WeakSet, for the reason in torch_steps.py.
        self._backings: dict[int, _Backing] = {}
        self._on: torch.device | None = None
        #: The probe's thread asks a Work whether it is over.
        self._asking = False

    def __bool__(self) -> bool:
        """Whether something is pending."""
        return bool(self._arrived or self._lines)

    @property
    def pending(self) -> int:
        """Number of operations, or batches, that have not ended."""
        return len(self._held)

    # -- in the trainer's threads -------------------------------------------------------------

    def launch(self, device: torch.device, pg: Any, own_times: bool, first: bool) -> Watch | None:
        """Prepare an operation before its call; return ``None`` if it is not timed.

        Args:
            own_times: the operation will have a Work, which has its duration.
            first: the queue has had no operation on a device before.
        """
        try:
            module = torch.get_device_module(device)
            # For another device than the current one, an event would be recorded on the wrong stream.
            if self._mode == OFF or module.current_device() != device.index or module.is_current_stream_capturing():
                return None
            timed, here = self._mode == EVENTS, False
            if timed:
                backing = self._backing(pg, device)
                timed = backing.has_times or not own_times
                here = backing.blocks_here and not own_times
            ready = self._record(device, timed=timed and not own_times)
            return Watch(device, pg, ready, first=first, timed=timed, here=here)
        except RuntimeError as error:
            self._leave_alone(error)
            return None

    def _backing(self, pg: Any, device: torch.device) -> _Backing:
        """Return what a group's backend does; enable the timing of its Works at the first call."""
        known = self._backings.get(id(pg))
        if known is not None and known.pg() is pg:
            return known
        self._backings = {key: known for key, known in self._backings.items() if known.pg() is not None}
        self._latest_over = {key: over for key, over in self._latest_over.items() if key[0] in self._backings}
        blocks_here, has_times = False, True
        try:
            blocks_here = pg._get_backend(device).name() in _BLOCKING_HERE
            pg._enable_collectives_timing()
        except RuntimeError as error:  # a backend without
            if raised_by_handler(error):
                raise
            has_times = False
        backing = self._backings[id(pg)] = _Backing(ref(pg), blocks_here, has_times)
        return backing

    def follow(self, watch: Watch, flight: Flight, work: Any) -> None:
        """Track an operation after its call."""
        batch = getattr(self._batches, "open", {}).get(id(watch.pg))
        # A group has a stream for each device, one for each peer, and one for batches.
        watch.group = id(watch.pg), watch.device
        watch.line = (*watch.group, flight.queue if batch is None else "batch")
        watch.pg = None
        if batch is None:
            watch.flights.append(flight)
            self._watch(watch, work)
        else:
            watch.first |= batch[0] is not None and batch[0].first
            batch[0] = watch
            batch[1].append(flight)

    def in_batch(self, pg: Any) -> bool:
        """Return whether a batch of this group has begun in this thread."""
        return id(pg) in getattr(self._batches, "open", ())

    def begin_batch(self, pg: Any) -> None:
        """Begin a batch: the next operations of this group in this thread end together."""
        if not hasattr(self._batches, "open"):
            self._batches.open = {}
        self.drop_batch(pg)  # an earlier batch without an end, because the user's code raised
        self._batches.open[id(pg)] = [None, []]

    def end_batch(self, pg: Any, work: Any) -> None:
        """End a batch: its operations end with ``work``; if that is ``None``, with the current stream."""
        watch, flights = getattr(self._batches, "open", {}).pop(id(pg), (None, []))
        if watch is not None:
            watch.flights = flights
            self._watch(watch, work)

    def drop_batch(self, pg: Any) -> None:
        """Drop a batch: its operations have no observable end."""
        _, flights = self._batches.open.pop(id(pg), (None, []))
        for flight in flights:
            self._finish(flight, time.monotonic_ns(), ev.BY_NONE, ev.UNTIMED, 0, False)

    def let_go_of_works(self, pg: Any) -> None:
        """Finish the operations of a group with a Work without times, because its communicators are about to be destroyed.

        A Work asks NCCL for errors of its communicator, and NCCL crashes if that is destroyed at the same moment.
        """
        for watches in (list(self._arrived), *map(list, list(self._lines.values()))):
            for watch in watches:
                watch.given_up |= watch.work is not None and watch.group[0] == id(pg)
        # Without a lock, which would stay locked if a signal handler raised here.
        patience = time.monotonic() + _PATIENCE_S
        while self._asking and time.monotonic() < patience:
            time.sleep(0.001)

    def _watch(self, watch: Watch, work: Any) -> None:
        watch.work = work = None if watch.here else work
        if work is None:
            watch.line = id(watch)  # on any stream
            try:
                watch.over = self._record(watch.device, timed=watch.timed)
                watch.before = self._latest_over.get(watch.group)
                self._latest_over[watch.group] = watch.over
            except RuntimeError as error:
                self._leave_alone(error)
                self._untimed(watch)
                return
        size = 0 if work is None else sum(flight.head[_SIZE] for flight in watch.flights)
        # The native hook counts only what the user has dropped (native/retention.h), which Python cannot see.
        if size and sum(list(self._held.values())) + size > MOST_KEPT:
            self._untimed(watch)
            return
        self._held[id(watch)] = size
        self._arrived.append(watch)
        if len(self._arrived) == 1 and not self._lines:
            self._wake()

    def _record(self, device: torch.device, *, timed: bool) -> torch.Event:
        try:
            event = self._spare[device, timed].popleft()
        except IndexError:
            event = torch.Event(device, enable_timing=timed)
        event.record()
        return event

    def _give_back(self, device: torch.device, event: torch.Event, *, timed: bool = False) -> None:
        self._spare[device, timed].append(event)

    # -- in the probe's thread ----------------------------------------------------------------

    def poll(self) -> None:
        """Finish the operations that have ended."""
        while self._arrived:
            watch = self._arrived[0]
            self._lines.setdefault(watch.line, deque()).append(watch)
            self._arrived.popleft()  # at last, so that `let_go_of_works` finds it at any moment
        for line, watches in list(self._lines.items()):
            while watches and self._is_over(watches[0]):
                self._held.pop(id(watches.popleft()), None)
            if not watches:
                del self._lines[line]

    def give_up(self) -> None:
        """Finish all pending operations without times, because the probe is removed."""
        for watches in (self._arrived, *self._lines.values()):
            while watches:
                self._untimed(watches.popleft())
        self._lines.clear()
        self._held.clear()

    def _is_over(self, watch: Watch) -> bool:
        """Finish an operation if it has ended, or can no longer be watched."""
        if self._mode == OFF or watch.given_up:
            self._untimed(watch)
            return True
        try:
            if watch.device != self._on:
                step_aside(watch.device)
                self._on = watch.device
            over = self._looked(watch)
        except RuntimeError as error:
            self._leave_alone(error)
            self._untimed(watch)
            return True
        if over and watch.over is not None:
            for event in (watch.ready, watch.before):  # the next operation of the group needs `over`
                if event is not None:
                    self._give_back(watch.device, event, timed=watch.timed)
        return over

    def _looked(self, watch: Watch) -> bool:
        if not watch.next:
            watch.next = True
            for flight in watch.flights:
                self._in_flight(flight)
        if not watch.reached and not self._has_reached(watch):
            return False
        if not (self._is_completed(watch) if watch.over is None else watch.over.query()):
            watch.seen_running = True
            return False
        now = time.monotonic_ns()  # not before the query, which may wait for a lock of the backend
        took_ns = self._duration_ns(watch) if watch.timed and not watch.first else None
        _check(took_ns, now - watch.flights[0].launch)
        watch.work = None
        if took_ns is not None:
            ended = (now, ev.BY_EVENTS, 0, now - took_ns, True)
        elif watch.timed or watch.first or not watch.seen_running:  # the last: shorter than the time between two polls
            ended = (now, ev.BY_NONE, ev.UNTIMED, 0, False)
        else:
            ended = (now, ev.BY_POLL, 0, watch.began_ns, False)
        for flight in watch.flights:
            self._finish(flight, *ended)
        return True

    def _is_completed(self, watch: Watch) -> bool:
        # First this, then the look at `given_up`: `let_go_of_works` does both in the other order.
        self._asking = True
        try:
            return not watch.given_up and bool(watch.work.is_completed())
        finally:
            self._asking = False

    def _has_reached(self, watch: Watch) -> bool:
        """Return whether the device has reached the operations. Until then, they cannot be over."""
        if watch.ready is not None and not watch.ready.query():
            watch.seen_waiting = True
            return False
        watch.reached = True
        now = time.monotonic_ns()
        watch.began_ns = now if watch.seen_waiting else 0
        for flight in watch.flights:
            self._blocked(flight, now)
        if watch.over is None and watch.ready is not None:  # with `over`, it is the begin of the duration
            self._give_back(watch.device, watch.ready)
            watch.ready = None
        return True

    def _duration_ns(self, watch: Watch) -> int | None:
        """Return the duration in ns by the device's clock; ``None`` if it is not known."""
        try:
            if watch.over is None:
                took_ms = watch.work._get_duration()
            elif watch.ready is None:
                return None
            else:
                took_ms = watch.ready.elapsed_time(watch.over)
                if watch.before is not None and watch.before.query():
                    took_ms = min(took_ms, watch.before.elapsed_time(watch.over))
        except RuntimeError:  # timing is not on for it
            return None
        return int(took_ms * 1e6) if math.isfinite(took_ms) and took_ms >= 0 else None

    def _leave_alone(self, why: RuntimeError) -> None:
        if raised_by_handler(why):
            try:
                raise why
            finally:
                del why  # as Probe.fault does
        self._mode = OFF
        first_line = str(why).partition("\n")[0]
        self._complain(f"operations on GPUs are no longer timed: {first_line}")

    def _untimed(self, watch: Watch) -> None:
        watch.work = None
        for flight in watch.flights:
            self._finish(flight, time.monotonic_ns(), ev.BY_NONE, ev.UNTIMED, 0, False)
