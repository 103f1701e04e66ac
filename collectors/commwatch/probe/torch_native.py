"""The probe with the native hook: C++ writes records, Python makes the ring and assigns numbers to names."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from commwatch.probe import torch_nccl_plugin
from commwatch.probe.native.library import ADD_GROUP, ADD_NAME, OPEN, Library
from commwatch.probe.torch_ops import c10d_ops
from commwatch.probe.torch_probe import Probe
from commwatch.wire import descriptor, ring
from commwatch.wire import events as ev

_T = TypeVar("_T")
#: Libraries whose kernels are in the dispatcher, by path: they stay there, and forward all calls while nothing records.
_hooked: dict[str, Library] = {}
#: Sessions and probes that C++ may still call, and whose rings it may still write: kept until the session is over.
_in_use: list[tuple[int, NativeProbe]] = []


class NativeProbe(Probe):
    """The probe with the hook in C++."""

    hook = "native"

    def __init__(self, env: Mapping[str, str], library: Library) -> None:
        self._library = library
        super().__init__(env)
        self._session = 0
        #: Kept, because C++ calls them.
        self._callbacks = (
            OPEN(self._guarded(self._open)),
            ADD_GROUP(self._guarded(self._add_group)),
            ADD_NAME(self._guarded(lambda name: self.dtype_code(name.decode()))),
            ADD_NAME(self._guarded(lambda name: self.op_code(name.decode()))),
        )

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that C++ calls in a thread made for the call, while the trainer's own thread waits.

        So no signal handler runs in it. It must not wait for anything that the trainer's thread may hold: it imports nothing,
        and the garbage collector is off, so that no finalizer of the user runs in it.
        """

        def call(*args: Any) -> Any:
            collects = gc.isenabled()
            gc.disable()
            try:
                return function(*args)
            except Exception as error:
                self._library.switch_off()
                self.fault(error, "at the first operation of its kind")
                return 0
            finally:
                if collects:
                    gc.enable()

        return call

    # -- life ---------------------------------------------------------------------------------

    def successor(self, env: Mapping[str, str]) -> NativeProbe:
        """Return a new probe with this library."""
        return NativeProbe(env, self._library)

    def _put_in(self) -> None:
        if not _hooked:
            try:
                self._hook_operators()
            except BaseException:
                self._library.unhook()
                raise
        clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        self._library.standard_error(*(descriptor.AT_START or (0,) * 5))
        session = self._library.install(*self._callbacks, clock, self.budget)
        self._library.time_devices(self.timing.code)
        self._use_plugin()
        _in_use[:] = [(other, probe) for other, probe in _in_use if not probe._library.over(other)]
        _in_use.append((session, self))
        self.groups.on_made = lambda name: self._library.forget_group(name.encode())

    def _use_plugin(self) -> None:
        """Let NCCL load the profiler plugin, if it is to be used."""
        path = self._plugin_path()
        if self.plugin.used and path is not None and self._library.use_nccl_plugin(os.fsencode(path)):
            torch_nccl_plugin.set_variables(os.environ, path)

    def _plugin_path(self) -> Path | None:
        return self._library.nccl_plugin

    def _hook_operators(self) -> None:
        for op in c10d_ops():
            places = (-1 if at is None else at for at in (op.group_at, op.async_at, op.peer_at, op.tag_at))
            code = ev.OP_CODE.get(op.op, 0)
            about = (op.name.encode(), op.op.encode(), code, op.is_p2p, op.measure, op.arguments, *places)
            if not self._library.hook(*about):
                raise RuntimeError(f"cannot hook c10d::{op.name}")
        _hooked[str(self._library.path)] = self._library

    def _take_out(self) -> None:
        self.groups.on_made = None
        self._library.uninstall()

    def _make_ring(self, made: ring.RingFile) -> None:
        wrong = self._library.attach(self._session, made.address, made.slots)
        if wrong:
            raise OSError(wrong, os.strerror(wrong), str(made.path))
        self.ring = made

    # -- called from C++ ----------------------------------------------------------------------

    def _open(self, session: int, rank: int, size: int, gpu: int) -> int:
        self._session = session
        opened = self.open_ring(rank, size)
        if gpu >= 0:
            self.tell_gpu(gpu)
        return int(opened)

    def _add_group(self, handle: int, address: int, name: bytes, description: bytes, size: int) -> None:
        pg = self.groups.named(name.decode(), size)
        group = self.foreign_group(name.decode(), description.decode(), size) if pg is None else self.group_of(pg)
        ranks = group.ranks or ()
        array = (ctypes.c_int32 * len(ranks))(*ranks)
        self._library.describe_group(handle, group.small_id, group.size, group.aligned, array, len(ranks))

    def with_probe_locks(self, do: Callable[[], _T]) -> _T:
        """Call it in another thread, without the garbage collector as in ``_guarded``, and wait; it may raise an ``Exception``.

        Operations ask Python in a thread of their own. One in a signal handler would wait forever for a lock that the interrupted thread holds.
        """
        results, errors, over = list[_T](), list[Exception](), threading.Lock()

        def run() -> None:
            collects = gc.isenabled()
            gc.disable()
            try:
                results.append(do())
            except Exception as error:
                errors.append(error)
            finally:
                if collects:
                    gc.enable()
                over.release()

        over.acquire()
        start_new_thread(run, ())
        over.acquire()
        if errors:
            raise errors.pop()
        return results[0]

    # -- batches ------------------------------------------------------------------------------

    def _begin_batch(self, pg: Any) -> None:
        torch.ops.commwatch.batch_begins(pg.boxed())

    def _end_batch(self, pg: Any, work: Any) -> None:
        torch.ops.commwatch.batch_ends(None if work is None else work.boxed(), pg.boxed())

    # -- graphs -------------------------------------------------------------------------------

    def capture_begins(self, graph: int) -> None:
        self._library.capture_begins(graph)

    def capture_ends(self, graph: int) -> None:
        self._library.capture_ends(graph)

    def replay(self, graph: int) -> None:
        self._library.replay(graph)

    def replayed(self) -> None:
        self._library.replayed()

    def forget_graph(self, graph: int) -> None:
        self._library.forget_graph(graph)

    # -- steps --------------------------------------------------------------------------------

    def _write_mark(self, optimizer: int, number: int, began: int, ended: int, flags: int) -> None:
        self._library.mark(optimizer, number, began, ended, flags)

    # -- checks -------------------------------------------------------------------------------

    def write_checksum(self, checksum: ev.Checksum) -> None:
        self._library.checksum(*checksum)

    def check_collectives(self, every: int, budget: float) -> bool:
        self._library.check_collectives(every, budget)
        return True


def unhook() -> None:
    """Remove the kernels from the dispatcher. Only while nothing records and no other thread communicates."""
    for library in _hooked.values():
        library.unhook()
    _hooked.clear()
