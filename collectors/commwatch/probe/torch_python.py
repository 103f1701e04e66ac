"""The Python hook: a Python kernel for every operator of the ``c10d`` namespace. It needs no compiler.

It records what the native hook does, at a higher cost: every operation and every completion takes the GIL.

The end of an operation is seen in one of these ways, the first that is possible (``timing`` in the record):

- ``future``: the future of its Work became ready (CPU backends). A blocking call sees that when its own ``Work.wait``
  returns, any other one by a callback in the backend's own thread;
- ``wait``: ``Work.wait`` (or ``wait_tensor``) returned. Gloo's send, recv and reduce_scatter report nothing else;
- ``poll``: ``Work.is_completed`` became true, polled every few milliseconds by one thread;
- ``call``: the call itself blocked until the end (``monitored_barrier``).

On CUDA the future is ready when the kernel is queued. ``torch_device.py`` finds the end there: ``events``, or ``poll``.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

from commwatch.probe.cost_meter import CostMeter, cpu_now
from commwatch.probe.exposure import Exposure
from commwatch.probe.governor import LOOK_NS, Counts, is_recorded
from commwatch.probe.torch_device import POLL_S, Devices
from commwatch.probe.torch_groups import Group, numbers_from
from commwatch.probe.torch_ops import Arguments, C10dOp, c10d_ops, has_no_data, splits_of
from commwatch.probe.torch_pending import HEARTBEAT_S, FlightTable, Pending
from commwatch.probe.torch_probe import Probe
from commwatch.probe.torch_replay import COUNTED_FLAGS, Captured, Operation, is_captured
from commwatch.probe.waits.torch_flight import Flight
from commwatch.probe.waits.torch_training import TrainingThread
from commwatch.probe.watcher import Watcher
from commwatch.wire import events as ev
from commwatch.wire import ring
from commwatch.wire.handlers import raised_by_handler
from commwatch.wire.ring import RingWriter

_AFTER = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
_now = time.monotonic_ns
_clock = time.clock_gettime_ns
#: ``CLOCK_MONOTONIC_COARSE`` of Linux, for which Python has no name: a tick of some ms, at no cost.
_COARSE = 6


def _place_in(pg: Any) -> tuple[int, int]:
    """Return this process's rank in a group, and the group's size."""
    return pg.rank(), pg.size()


def _take_back(group: Group | None, numbered: tuple[str, int, int] | None, seq: int, flight: Flight | None) -> None:
    """Undo a launch that failed before the call: it gets no record, and the next operation gets its number."""
    if group is not None and seq >= 0:
        group.seqs[numbered] = numbers_from(seq)
    if flight is not None:
        flight.done = True


class PythonProbe(Probe):
    """The probe with the hook in Python."""

    hook = "python"
    makes = RingWriter
    ring: RingWriter | None

    def __init__(self, env: Mapping[str, str]) -> None:
        super().__init__(env)
        self.exposure = Exposure()
        self._watcher = Watcher(self._watch)
        self.pending = Pending(self.finish, self._wait_begins, self._wake)
        self.devices = Devices(
            self.timing,
            finish=self.finish,
            in_flight=self._in_flight,
            blocked=self._reached,
            wake=self._wake,
            complain=partial(self.say, about="devices"),
        )
        self._library: torch.library.Library | None = None
        self._meter, self._counts, self._captured = CostMeter(self.budget), Counts(), Captured()
        self._spent = self._meter.spent
        #: Time of the latest check of the thread, in ns.
        self._looked = 0
        #: An operation since the latest step mark was only counted.
        self._skipped = False
        self._arguments = Arguments(self)
        self._table, self._training = FlightTable(), TrainingThread()
        self._flights = self._table.flights

    # -- life ---------------------------------------------------------------------------------

    def successor(self, env: Mapping[str, str]) -> PythonProbe:
        """Return a new Python probe."""
        return PythonProbe(env)

    def abandon(self) -> None:
        """In a forked child: replace the probe's thread, which does not run there and may have held its locks."""
        super().abandon()
        self._watcher = Watcher(self._watch)

    def _put_in(self) -> None:
        self._library = torch.library.Library("c10d", "IMPL")
        for op in c10d_ops():
            self._library.impl(op.name, self._kernel(op), "BackendSelect", with_keyset=True)
        self.pending.watch_waits()
        self.groups.on_shutdown = self.devices.let_go_of_works

    def _before_exit(self) -> None:
        super()._before_exit()
        self.pending.before_exit()

    def _take_out(self) -> None:
        self.pending.unwatch_waits()
        if self._library is not None:
            self._library._destroy()
        self._watcher.end(1.0)
        if self.ring is not None and not self.off:
            self.pending.give_up()
            self.devices.give_up()
            self._write_counts()
            self.ring.close(_now())

    def _make_ring(self, made: RingWriter) -> None:
        self._meter.begin(_now())
        try:
            self._watcher.start()
        except RuntimeError as error:  # the process may have no more threads
            if raised_by_handler(error):
                raise
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(made.path)) from None
        self.ring = made
        self._wake()
        self.tell_gpu()

    def _wake(self) -> None:
        self._watcher.wake()

    def _watch(self) -> None:
        """Run the probe's thread: heartbeat, governor, and operations whose end is not reported."""
        while self._watcher.goes_on() and (self.ring is not None or not self.off):
            if self.ring is not None:
                self._poll(self.ring)
            self._watcher.sleep(self.pending.pause(POLL_S if self.devices else HEARTBEAT_S))

    def _poll(self, writer: RingWriter) -> None:
        now = writer.counters[ring.HEARTBEAT] = _now()
        try:
            if now - self._looked >= LOOK_NS:
                self._looked = now
                self._write_counts()
                self._meter.govern(now, writer)
                self._table.sweep(writer, self.finish)
                self.pending.give_up_unclaimed(now)
            self.pending.poll()
            self.devices.poll()
        except Exception as error:
            self.fault(error, "looking for ended operations")

    def _write_counts(self) -> None:
        """Write the records of operations that were only counted."""
        for each in self._counts.take():
            head = (each.op, ev.NO_DTYPE, each.group, -1, 0, each.bytes, each.launch_ns, each.seq)
            assert self.ring is not None
            self.ring.write(*head, each.number, each.launch_ns, _now(), each.flags | ev.UNTIMED, ev.COUNTED, 0)

    # -- one operation ------------------------------------------------------------------------

    def _kernel(self, op: C10dOp) -> Callable[..., Any]:
        """Return the kernel of one operator: it records the launch, forwards the call, and arranges for the end."""
        redispatch, launch, follow, finish = op.redispatch, self._launcher(op), self._follow, self.finish
        is_blocking_known = op.async_at is not None or op.is_p2p

        def kernel(keyset: Any, *args: Any) -> Any:
            flight = launch(args)
            try:
                out = redispatch(keyset & _AFTER, *args)
            except BaseException as error:
                if flight is not None:
                    # A signal handler may raise as the call returns: the operation is in flight.
                    ended = (ev.BY_NONE, ev.UNTIMED) if raised_by_handler(error) else (ev.BY_CALL, ev.FAILED)
                    finish(flight, _now(), *ended)
                raise
            if flight is not None:
                follow(flight, out, args, is_blocking_known)
            return out

        return kernel

    def _launcher(self, op: C10dOp) -> Callable[[Sequence[Any]], Flight | None]:
        """Return a function that records a launch and returns its flight, or ``None`` if there is none to follow."""
        group_at, peer_at, tag_at, is_p2p, name = op.group_at, op.peer_at, op.tag_at, op.is_p2p, op.op
        known, codes, unbox, about = self.groups.known, self._ops, ProcessGroup.unbox, self._arguments.about
        governor, counts, flights, turn = self._meter.governor, self._counts, self._flights, self._meter.turn
        captured, is_elsewhere = self._captured, self._training.is_elsewhere

        def launch(args: Sequence[Any]) -> Flight | None:
            if self.off:
                return None
            group, flight, queue, numbered, seq = None, None, None, None, -1
            try:
                if has_no_data(args) or (self.ring is None and not self.open_ring(*_place_in(unbox(args[group_at])))):
                    return None
                writer = self.ring
                assert writer is not None
                cost_of = turn(_clock(_COARSE))
                entered = cpu_now() if cost_of else 0
                now = _now()
                pg = unbox(args[group_at])
                group = known.get(id(pg))
                if group is None or group.ref() is not pg:
                    group = self.group_of(pg)
                flags, size, dtype, device = about(op, args, group)
                peer = group.global_rank(args[peer_at]) if peer_at is not None else -1
                tag = args[tag_at] if tag_at is not None else 0
                code = codes.get(name) or self.op_code(name)
                what = (group, name, code, dtype, peer, tag, size, flags)
                if captured and device is not None and is_captured(device) and captured.add(Operation(*what)):
                    return None  # it runs at each replay
                if is_p2p:
                    peer = group.peer_of(name, peer)
                    queue, numbered = (name, peer), group.key_of_tag(name, peer, tag)
                for seq in group.seqs[numbered]:  # noqa: B007 - Group.seqs says why
                    break
                first = device is not None and group.begins_on_device(
                    (queue, is_p2p and self.devices.in_batch(pg)), device
                )
                mode = governor.mode
                if mode and not is_recorded(mode, seq):  # no call in the usual mode
                    counts.add((code, group.small_id, flags & COUNTED_FLAGS, size, 0 if is_p2p else seq, now))
                    self._only_counted(group, queue, args[0])
                    self._spent(entered, cost_of, self.ring)
                    return None
                if name == "all_to_all" and (splits := splits_of(args, group_at, group.size)):
                    writer.note_splits(group.small_id, seq, splits)
                head = (code, dtype, group.small_id, peer, tag, size, now, seq)
                # On a device a thousand may be queued: `_in_flight` enters only the next one of each queue.
                slot = writer.begin(*head, 0, 0, 0, flags, 0, 0) if device is None else -1
                flight = flights[slot] = Flight(head, now, flags, group, queue, slot, device is None)
                flight.after_skipped = group.take_skipped(queue)
                flight.beside = is_elsewhere(device is not None) and not is_p2p and not flags & ev.ASYNC
                if device is not None:
                    self.exposure.known = False
                    flight.watch = self.devices.launch(device, pg, is_p2p or bool(flags & ev.ASYNC), first)
                flight.cost_of = cost_of
                self._spent(entered, cost_of, self.ring)
                return flight
            except BaseException as error:
                _take_back(group, numbered, seq, flight)
                self.fault(error, f"at the launch of {name}")
                return None

        return launch

    def _only_counted(self, group: Group, queue: tuple[str, int] | None, outputs: Any) -> None:
        group.skipped.add(queue)
        self.pending.overtaken(outputs)
        self._skipped = True

    def _follow(self, flight: Flight, out: Any, args: Sequence[Any], is_blocking_known: bool) -> None:
        """After the launch, arrange that the end is seen, without keeping objects of the user past it.

        Args:
            is_blocking_known: the arguments state whether the call blocks. If not, its caller may as well wait in C++ or never, where we see nothing.
        """
        try:
            cost_of, flight.cost_of = flight.cost_of, 0  # an end inside this function is part of its cost
            entered = cpu_now() if cost_of else 0
            work = out[-1] if isinstance(out, tuple) else out
            if work is None:
                self.finish(flight, _now(), ev.BY_CALL)
                return
            if not isinstance(work, torch.ScriptObject):  # an unknown operator, without an observable end
                self.finish(flight, _now(), ev.BY_NONE, ev.UNTIMED)
                return
            work = Work.unbox(work)
            if flight.watch is not None:
                watch, flight.watch = flight.watch, None
                self.devices.follow(watch, flight, work)
            elif flight.on_cpu:
                try:
                    future = work.get_future()
                except RuntimeError as error:  # this Work has none
                    if raised_by_handler(error):
                        raise
                    if flight.queue is None:
                        self._watch_flight(flight, _now())
                    self.pending.add(flight, work, args)
                else:
                    self._follow_future(flight, work, future, is_blocking_known)
            else:
                self.finish(flight, _now(), ev.BY_NONE, ev.UNTIMED)
            flight.cost_of = cost_of
            self._spent(entered, cost_of, self.ring)
        except Exception as error:
            self.fault(error, "following an operation")

    def _follow_future(self, flight: Flight, work: Any, future: Any, is_blocking_known: bool) -> None:
        if future.done():
            self.pending.ended(flight, ev.BY_FUTURE, future)
            return
        self._watch_flight(flight, _now())
        if flight.flags & ev.ASYNC or not is_blocking_known:
            if flight.flags & ev.ASYNC:
                self.pending.handles.add(flight, work)
            self.pending.call_back(flight, future)
        else:
            self.pending.add_blocking(flight, work, future)

    def _watch_flight(self, flight: Flight, now: int) -> None:
        if not (flight.watched or flight.beside):
            flight.watched = True
            self.exposure.begin(flight, now)

    def _wait_begins(self, flight: Flight) -> None:
        """Note that a thread begins to wait for an operation whose end only the wait shows."""
        try:
            if flight.done:
                return
            flight.blocked_since = _now()
            if self.ring is not None:
                self.ring.blocked(flight.slot, flight.blocked_since)
            self._watch_flight(flight, flight.blocked_since)
        except Exception as error:
            self.fault(error, "at the begin of a wait")

    def _in_flight(self, flight: Flight) -> None:
        if self.ring is not None and not flight.done:
            flight.slot = self.ring.begin(*flight.head, 0, 0, 0, flight.flags, 0, 0)
            self._flights[flight.slot] = flight

    def _reached(self, flight: Flight, now: int) -> None:
        if self.ring is not None and not flight.done:
            self.ring.blocked(flight.slot, now)

    def finish(
        self, flight: Flight, end: int, timing: int, flag: int = 0, began: int = 0, measured: bool = False
    ) -> None:
        """Write the record of an operation, once.

        Args:
            began: when it began on its device, in ns; 0 if that was not seen.
            measured: ``began`` comes from the device's own duration.
        """
        try:
            writer = self.ring
            if flight.done or writer is None:
                return
            flight.done = True
            cost_of = flight.cost_of  # `_follow` may set it meanwhile, in another thread
            entered = cpu_now() if cost_of else 0
            waited_ns = self.pending.handles.ended(flight, end)
            flight.work = flight.future = None
            self._flights[flight.slot] = None
            writer.end(flight.slot)
            queue, blocked = flight.queue, flight.blocked_since
            if flight.watched:
                self.exposure.end(flight, end)
            elif queue is None and not flag & ev.UNTIMED and not flight.beside:
                self.exposure.in_call(flight.launch, end)
            if waited_ns is not None and not flag & ev.UNTIMED:
                flag |= ev.WAIT_SEEN
            else:
                waited_ns = end - blocked if blocked and queue is not None else 0
            waited = min(waited_ns // 1000, ring.STAMP_MASK)
            last_end = flight.group.last_end
            previous = last_end.get(queue, 0)
            start = max(flight.launch, began, 0 if measured else min(previous, end))
            if end > previous and not flag & ev.UNTIMED:
                last_end[queue] = end
            if flight.beside:
                flag |= ev.BESIDE
            if flight.after_skipped and not measured:
                flag |= ev.UNTIMED
            writer.write(*flight.head, waited, start, end, flight.flags | flag, timing, 0)
            self._spent(entered, cost_of, self.ring)
        except Exception as error:
            self.fault(error, "writing a record")

    # -- batches ------------------------------------------------------------------------------

    def _begin_batch(self, pg: Any) -> None:
        self.devices.begin_batch(pg)

    def _end_batch(self, pg: Any, work: Any) -> None:
        self.devices.end_batch(pg, work)

    # -- graphs -------------------------------------------------------------------------------

    def capture_begins(self, graph: int) -> None:
        self._captured.begin(graph)

    def capture_ends(self, graph: int) -> None:
        self._captured.end(graph)

    def replay(self, graph: int) -> None:
        if self.ring is None:
            return
        cost_of, now = self._meter.turn(_clock(_COARSE)), _now()
        entered = cpu_now() if cost_of else 0
        mode = self._meter.governor.mode
        for operation in self._captured.of(graph):
            if not operation.write(self.ring, self._counts, mode, now):
                self._skipped = True
        self._spent(entered, cost_of, self.ring)

    def replayed(self) -> None:
        """Nothing is left to do: only NCCL's plugin, which needs the native hook, has times of replays."""

    def forget_graph(self, graph: int) -> None:
        self._captured.forget(graph)

    # -- steps --------------------------------------------------------------------------------

    def _write_mark(self, optimizer: int, number: int, began: int, ended: int, flags: int) -> None:
        if self.ring is None:
            return
        self.exposure.watch(threading.get_ident())
        self._training.here()
        exposed = self.exposure.take(ended)
        if self._skipped:
            self._skipped, exposed = False, None
            flags |= ev.UNTIMED
        elif exposed is not None:
            flags |= ev.EXPOSED
        in_flight = min(self.ring.in_flight_now + self.devices.pending, 0xFFFF)
        self.ring.write(
            ev.STEP_MARK, 0, 0, optimizer, 0, exposed or 0, began, number, 0, began, ended, flags, 0, in_flight
        )

    # -- checks -------------------------------------------------------------------------------

    def write_checksum(self, checksum: ev.Checksum) -> None:
        if self.ring is not None:
            self.ring.write(*checksum.fields())

    def check_collectives(self, every: int, budget: float) -> bool:
        """Return False: a callback in Python is called after other threads may have seen the end of an operation."""
        return False
