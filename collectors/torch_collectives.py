"""The probe: sees every collective of this process where PyTorch dispatches it, and writes it to the ring.

Each operator of the ``c10d`` namespace gets a kernel at ``BackendSelect``, the one door all callers pass
once: plain calls, DDP's reducer, FSDP, DTensor, compiled graphs. Our bookkeeping stands around the user's call
and is guarded; the call itself runs once, outside any guard, and raises what it raises.

The end of an operation is seen, in this order of preference (the record says which):

- ``future``: a callback on the future of its Work, in the backend's own thread (CPU backends);
- ``wait``: ``Work.wait`` (or ``wait_tensor``) returned. Gloo's send, recv and reduce_scatter report nothing else;
- ``poll``: ``Work.is_completed`` became true, looked at every few milliseconds by one thread;
- ``call``: the call itself blocked until the end (``monitored_barrier``).

On CUDA the future is ready when the kernel is queued, and a query from any thread breaks a CUDA graph capture
in another. So there operations are counted and have no duration, unless ``COMMWATCH_TIMING=poll`` asks for it.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work

from commwatch.collectors import events as ev
from commwatch.collectors import identity, ring
from commwatch.collectors.exposure import Exposure
from commwatch.collectors.torch_groups import Group, Groups
from commwatch.collectors.torch_ops import C10dOp, c10d_ops
from commwatch.collectors.torch_pending import Flight, Pending
from commwatch.collectors.torch_steps import StepHooks

_AFTER = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
_now = time.monotonic_ns
#: One call in so many times its own bookkeeping, for ``probe_seconds_total``.
_COST_SAMPLE = 64


def _on_cpu(what: Any) -> bool:
    while isinstance(what, (list, tuple)) and what:
        what = what[0]
    return bool(what.is_cpu) if isinstance(what, torch.Tensor) else True


class Probe:
    """Everything the probe keeps in one trainer process. Nothing in it raises into training."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env
        self.off = False
        self.ring: ring.RingWriter | None = None
        self.timing = env.get("COMMWATCH_TIMING", "auto")
        self.groups = Groups(identity.job_id(env), identity.restart_count(env))
        self.exposure = Exposure()
        self.steps = StepHooks(self._mark)
        self.pending = Pending(self.finish, self._wait_begins)
        self._making = threading.RLock()  # a signal handler may communicate in the middle of it
        self._dtypes: dict[torch.dtype, int] = {}
        self._ops: dict[str, int] = dict(ev.OP_CODE)
        self._libraries: list[torch.library.Library] = []
        self._marks = 0
        self._cost = 0
        self._said = False
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    # -- life ---------------------------------------------------------------------------------

    def install(self) -> None:
        """Put the hooks in."""
        library = torch.library.Library("c10d", "IMPL")
        self._libraries.append(library)
        for op in c10d_ops():
            library.impl(op.name, self._kernel(op), "BackendSelect", with_keyset=True)
        self.groups.watch()
        self.pending.watch_waits()
        self.steps.install()
        atexit.register(self.uninstall)

    def uninstall(self) -> None:
        """Take the hooks out again; operations in flight still find their record."""
        if not self._libraries:
            return
        self.steps.uninstall()
        self.pending.unwatch_waits()
        self.groups.unwatch()
        for library in self._libraries:
            library._destroy()
        self._libraries.clear()
        self._stop.set()
        self.pending.wake()
        if self._thread is not None:
            self._thread.join(1.0)
        atexit.unregister(self.uninstall)
        if self.ring is not None and not self.off:
            self.pending.give_up()
            self.ring.close(_now())

    def abandon(self) -> None:
        """In a forked child (DataLoader worker): the mapping is inherited, and is the parent's to write."""
        self.off = True
        self.ring = None

    def fault(self, error: BaseException, doing: str) -> None:
        """Our own failure: switch off, count it, say it once. Training goes on."""
        self.off = True
        if self.ring is not None:
            self.ring.counters[ring.DROPPED] += 1
        self.say(f"probe switched off in rank {self.env.get('RANK', '?')}: {doing}: {type(error).__name__}: {error}")

    def say(self, text: str) -> None:
        """One line to standard error, once in the life of the process."""
        if not self._said:
            self._said = True
            print(f"commwatch: {text}", file=sys.stderr, flush=True)

    def _open_ring(self) -> ring.RingWriter | None:
        """Make the ring at the first operation; no room or no rights switch the probe off."""
        with self._making:
            if self.ring is None and not self.off:
                try:
                    self.ring = self._make_ring()
                    self._thread = threading.Thread(target=self._watch, name="commwatch", daemon=True)
                    self._thread.start()
                except OSError as error:
                    self.off = True
                    self.say(
                        f"not recording this run: {error.strerror or error} ({error.filename or identity.run_dir(self.env)})"
                    )
            return self.ring

    def _make_ring(self) -> ring.RingWriter:
        directory = identity.run_dir(self.env)
        identity.make_private_dir(directory, self.env)
        mode = identity.make_private_dir(directory / "rings", self.env)
        rank, size = dist.get_rank(), dist.get_world_size()
        who = identity.describe(self.env, rank, size, torch=str(torch.__version__), hook="python", timing=self.timing)
        path = identity.ring_path(directory / "rings", who["job"], who["restart"], rank)
        slots = self.env.get("COMMWATCH_SLOTS", "")
        return ring.RingWriter(
            path, who, int(slots) if slots.isdecimal() and int(slots) >= 2 * ring.MARGIN else ring.DEFAULT_SLOTS, mode
        )

    def _watch(self) -> None:
        """The probe's one thread: the heartbeat, and the operations nobody reports the end of."""
        while not self._stop.is_set() and self.ring is not None:
            self.ring.counters[ring.HEARTBEAT] = _now()
            try:
                self.pending.poll()
            except Exception as error:
                self.fault(error, "looking for ended operations")
            self.pending.sleep()

    # -- one operation ------------------------------------------------------------------------

    def _kernel(self, op: C10dOp) -> Callable[..., Any]:
        """The kernel of one operator: note the launch, let the call through, see to its end."""
        redispatch, launch, follow, finish = op.redispatch, self._launcher(op), self._follow, self.finish

        def kernel(keyset: Any, *args: Any) -> Any:
            flight = launch(args)
            try:
                out = redispatch(keyset & _AFTER, *args)
            except BaseException:
                if flight is not None:
                    finish(flight, _now(), ev.BY_CALL, ev.FAILED)
                raise
            if flight is not None:
                follow(flight, out, args)
            return out

        return kernel

    def _launcher(self, op: C10dOp) -> Callable[[Sequence[Any]], Flight | None]:
        """Build what notes the launch of an operation; it returns ``None`` where the probe is off."""
        group_at, async_at, peer_at, tag_at, is_p2p = op.group_at, op.async_at, op.peer_at, op.tag_at, op.is_p2p
        name, known, unbox = op.op, self.groups.known, ProcessGroup.unbox

        def launch(args: Sequence[Any]) -> Flight | None:
            if self.off:
                return None
            try:
                writer = self.ring or self._open_ring()
                if writer is None:
                    return None
                now = _now()
                pg = unbox(args[group_at])
                group = known.get(id(pg))
                if group is None or group.ref() is not pg:
                    group = self._add_group(writer, pg)
                flags, size, dtype, on_cpu = self._measure(op, args, group, writer)
                # Trailing arguments that have their default (async_op=True) do not arrive; p2p has no such argument.
                if async_at is not None and (len(args) <= async_at or args[async_at]):
                    flags |= ev.ASYNC
                peer = group.global_rank(args[peer_at]) if peer_at is not None else -1
                if is_p2p:
                    tag = args[tag_at] if tag_at is not None else 0
                    queue, seq = (name, peer), group.p2p[name, peer, tag]()
                else:
                    queue, seq, tag = None, group.next_seq(), 0
                code = self._ops.get(name) or self._add_op(writer, name)
                head = (code, dtype, group.small_id, peer, tag, size, now, seq & ring.STAMP_MASK)
                return Flight(head, now, flags, group, queue, writer.begin(*head, 0, 0, 0, flags, 0, 0), on_cpu)
            except Exception as error:
                self.fault(error, f"at the launch of {name}")
                return None

        return launch

    def _measure(
        self, op: C10dOp, args: Sequence[Any], group: Group, writer: ring.RingWriter
    ) -> tuple[int, int, int, bool]:
        """Flags, size in bytes, dtype id of an operation, and whether its tensors are on the CPU."""
        flags = 0 if group.aligned else ev.UNALIGNED
        if op.measure is None:
            return flags | ev.NO_SIZE, 0, ev.NO_DTYPE, _on_cpu(args[0])
        tensors, factor = op.measure(args, group.size)
        if not tensors:
            return flags, 0, ev.NO_DTYPE, True
        first = tensors[0]
        dtype = self._dtypes.get(first.dtype) or self._add_dtype(writer, first.dtype)
        on_cpu = first.is_cpu
        if not on_cpu:
            self.exposure.known = False
        try:
            size = first.nbytes if len(tensors) == 1 else sum([tensor.nbytes for tensor in tensors])
        except (RuntimeError, NotImplementedError):  # sparse: its bytes are not in one place
            return flags | ev.NO_SIZE, 0, dtype, on_cpu
        return flags, size * factor, dtype, on_cpu

    def _follow(self, flight: Flight, out: Any, args: Sequence[Any]) -> None:
        """After the launch: arrange that the end is seen, without keeping anything of the user's past it."""
        try:
            sampled = _now() if flight.head[-1] % _COST_SAMPLE == 0 else 0
            work = out[-1] if isinstance(out, tuple) else out
            if work is None:
                self.finish(flight, _now(), ev.BY_CALL)
                return
            work = Work.unbox(work)
            if flight.on_cpu:
                try:
                    future = work.get_future()
                except RuntimeError:  # this Work has none
                    if flight.queue is None:
                        flight.watched = True
                        self.exposure.begin(flight, _now())
                    self.pending.add(flight, work, args)
                else:
                    if not future.done():
                        flight.watched = True
                        self.exposure.begin(flight, _now())
                    future.add_done_callback(partial(self._done, flight))
            elif self.timing == "poll" and not torch.cuda.is_current_stream_capturing():
                self.pending.add(flight, work, args)
            else:
                self.finish(flight, _now(), ev.BY_NONE, ev.UNTIMED)
            if sampled and self.ring is not None:
                self._cost += 2 * (_now() - sampled) * _COST_SAMPLE  # the launch costs about as much again
                self.ring.counters[ring.PROBE_NS] = self._cost
        except Exception as error:
            self.fault(error, "following an operation")

    def _done(self, flight: Flight, future: Any) -> None:
        end = _now()
        try:
            future.value()
        except Exception:  # the operation failed; its owner learns that from its own wait
            self.finish(flight, end, ev.BY_FUTURE, ev.FAILED)
        else:
            self.finish(flight, end, ev.BY_FUTURE)

    def _wait_begins(self, flight: Flight) -> None:
        """A thread begins to wait for an operation whose end shows only there."""
        try:
            flight.blocked_since = _now()
            if self.ring is not None:
                self.ring.blocked(flight.slot, flight.blocked_since)
            if not flight.watched:
                flight.watched = True
                self.exposure.begin(flight, flight.blocked_since)
        except Exception as error:
            self.fault(error, "at the begin of a wait")

    def finish(self, flight: Flight, end: int, timing: int, flag: int = 0) -> None:
        """Write the record of an operation, once; never raises."""
        try:
            writer = self.ring
            if flight.done or writer is None:
                return
            flight.done = True
            flight.work = None
            writer.end(flight.slot)
            queue, blocked = flight.queue, flight.blocked_since
            if flight.watched:
                self.exposure.end(flight, end)
            elif queue is None and not flag & ev.UNTIMED:
                self.exposure.in_call(flight.launch, end)
            waited = min((end - blocked) // 1000, ring.STAMP_MASK) if blocked and queue is not None else 0
            last_end = flight.group.last_end
            previous = last_end.get(queue, 0)
            start = max(flight.launch, min(previous, end))
            if end > previous and not flag & ev.UNTIMED:
                last_end[queue] = end
            writer.write(*flight.head, waited, start, end, flight.flags | flag, timing, 0)
        except Exception as error:
            self.fault(error, "writing a record")

    # -- names --------------------------------------------------------------------------------

    def _add_group(self, writer: ring.RingWriter, pg: Any) -> Group:
        with self._making:
            group, entry = self.groups.add(pg)
            group.small_id = self._intern(writer, "group", group.small_id, entry, ev.NO_GROUP)
            return group

    def _add_dtype(self, writer: ring.RingWriter, dtype: torch.dtype) -> int:
        with self._making:
            code = len(self._dtypes) + 1
            self._dtypes[dtype] = self._intern(
                writer, "dtype", code, {"name": str(dtype).removeprefix("torch.")}, ev.NO_DTYPE
            )
            return self._dtypes[dtype]

    def _add_op(self, writer: ring.RingWriter, name: str) -> int:
        with self._making:
            code = min(ev.FIRST_UNKNOWN_OP + len(self._ops) - len(ev.OPS), ev.LAST_UNKNOWN_OP)
            self._ops[name] = self._intern(writer, "op", code, {"name": name}, ev.LAST_UNKNOWN_OP)
            return self._ops[name]

    @staticmethod
    def _intern(writer: ring.RingWriter, kind: str, code: int, entry: dict[str, Any], otherwise: int) -> int:
        """Give ``entry`` the number ``code`` in the names file; ``otherwise`` where the disk is full."""
        if code >= otherwise > 0:
            return otherwise
        try:
            writer.name({kind: code, **entry})
        except OSError:
            return otherwise
        return code

    # -- steps --------------------------------------------------------------------------------

    def _mark(self, optimizer: int, began: int, ended: int) -> None:
        """A step mark: one optimizer call has ended, or the user said so (``optimizer`` -1)."""
        if self.off or self.ring is None:
            return
        try:
            self.exposure.watch(threading.get_ident())
            exposed = self.exposure.take(ended)
            flags = 0 if exposed is None else ev.EXPOSED
            in_flight = min(self.ring.in_flight_now, 0xFFFF)
            self.ring.write(
                ev.STEP_MARK,
                0,
                0,
                optimizer,
                0,
                exposed or 0,
                began,
                self._marks & ring.STAMP_MASK,
                0,
                began,
                ended,
                flags,
                0,
                in_flight,
            )
            self._marks += 1
        except Exception as error:
            self.fault(error, "at a step mark")


_probe: Probe | None = None


def _forked() -> None:
    if _probe is not None:
        _probe.abandon()


os.register_at_fork(after_in_child=_forked)


def install(env: Mapping[str, str] | None = None) -> bool:
    """Switch the probe on in this process; True if it is on afterwards. A second call changes nothing."""
    global _probe
    env = dict(os.environ if env is None else env)
    if env.get("COMMWATCH_DISABLE") == "1":
        return False
    if _probe is None:
        probe = Probe(env)
        try:
            probe.install()
        except Exception as error:  # a torch we do not know
            probe.uninstall()
            probe.say(f"cannot hook this torch ({torch.__version__}): {type(error).__name__}: {error}")
            return False
        _probe = probe
    return True


def uninstall() -> None:
    """Take the probe out of this process; what it recorded stays."""
    global _probe
    if _probe is not None:
        _probe.uninstall()
        _probe = None


def step() -> None:
    """Say that a training step ends here. Once called, optimizers no longer mark steps."""
    if _probe is not None:
        _probe.steps.explicit(_now())


def ring_file() -> Path | None:
    """Where this process records, or ``None`` while it does not."""
    return _probe.ring.path if _probe is not None and _probe.ring is not None else None
