"""Test a plugin that was just built, in a process of its own, so that a faulty one does not crash a training.

``python -m commwatch.nccl_plugin.trial PLUGIN``: plays one collective of NCCL's on two channels, in each version of the interface.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import time

#: Types of events, and the state at the end of a kernel, as in ``interface.h``.
GROUP, COLL, KERNEL, COLL_API, KERNEL_STOP = 1 << 0, 1 << 1, 1 << 6, 1 << 9, 22
CALL, OVER, TOOK_NS, CHANNELS = 7, 2, 5000, 2
#: Ring and Simple on two channels, as in ``commwatch_nccl.h``.
CHOICE = 2 | 3 << 4 | CHANNELS << 6
_EVENT_BYTES = 256
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


class Times(ctypes.Structure):
    """``struct commwatch_nccl_times``."""

    _fields_ = (("begin_ns", ctypes.c_uint64), ("end_ns", ctypes.c_uint64), ("choice", ctypes.c_uint16))


class Session:
    """One communicator of a plugin, in one version of the interface."""

    def __init__(self, plugin: ctypes.CDLL, version: int) -> None:
        table = (_POINTER * 6).in_dll(plugin, f"ncclProfiler_v{version}")
        self._texts = [ctypes.create_string_buffer(text) for text in (b"AllReduce", b"ncclFloat32", b"RING", b"SIMPLE")]
        int_of, self._version = ctypes.CFUNCTYPE, version
        oldest = version == 4
        about = (_POINTER, _POINTER, ctypes.c_uint64) if oldest else (ctypes.c_uint64, _POINTER, _POINTER)
        init = int_of(_INT, _POINTER, *about, _INT, _INT, _INT, _POINTER)(table[1] or 0)
        self._start = int_of(_INT, _POINTER, _POINTER, _POINTER)(table[2] or 0)
        self._stop = int_of(_INT, _POINTER)(table[3] or 0)
        self._state = int_of(_INT, _POINTER, _INT, _POINTER)(table[4] or 0)
        self._finalize = int_of(_INT, _POINTER)(table[5] or 0)
        self._context, self._mask = _POINTER(), _INT()
        mask = ctypes.byref(self._mask)
        failed = init(ctypes.byref(self._context), *((mask, None, 42) if oldest else (42, mask, None)), 1, 2, 0, None)
        assert (failed, bool(self._context)) == (0, True), "init failed"

    def begin(self, kind: int, parent: int, *members: tuple[str, int, object]) -> int:
        """Begin an event with these members of its union: format, offset from its begin, value. Returns its handle."""
        event = ctypes.create_string_buffer(_EVENT_BYTES)
        struct.pack_into("<QQi", event, 0, kind, parent, 0)
        for form, at, value in members:
            struct.pack_into(form, event, 24 + at, value)
        handle = _POINTER()
        assert self._start(self._context, ctypes.byref(handle), event) == 0
        assert handle.value is not None, f"no handle for event {kind}"
        return handle.value

    def collective(self) -> None:
        """An all_reduce on two channels that takes ``TOOK_NS``."""
        func, datatype, algorithm, protocol = map(ctypes.addressof, self._texts)
        called = (("<Q", 0, func), ("<Q", 8, 1024), ("<Q", 16, datatype))
        # Version 4 has no API calls.
        parent = self.begin(GROUP, 0) if self._version == 4 else self.begin(COLL_API, 0, *called)
        members = (("<Q", 8, func), ("<Q", 32, 1024), ("<Q", 48, datatype), ("<B", 56, CHANNELS), ("<Q", 64, algorithm))
        coll = self.begin(COLL, parent, *members, ("<Q", 72, protocol))
        now = time.monotonic_ns()
        kernels = [self.begin(KERNEL, coll, ("<B", 0, channel), ("<Q", 8, now)) for channel in range(CHANNELS)]
        for kernel in reversed(kernels):
            assert self._state(kernel, KERNEL_STOP, ctypes.byref(ctypes.c_uint64(now + TOOK_NS))) == 0
            assert self._stop(kernel) == 0
        assert self._stop(coll) == 0
        assert self._stop(parent) == 0

    def end(self) -> None:
        """Destroy the communicator."""
        assert self._finalize(self._context) == 0


def main(path: str) -> None:
    """Play the collective within a call of c10d, and ask for its times."""
    plugin = ctypes.CDLL(path)
    sink = struct.pack("<QQ", 0, 0)  # without functions: all operations belong to a call
    plugin.commwatch_nccl_sink_to(sink)
    plugin.commwatch_nccl_here.restype = ctypes.POINTER(ctypes.c_uint64)  # its first member is the call
    plugin.commwatch_nccl_times_of.argtypes = [ctypes.c_uint64, _POINTER]
    for number, version in enumerate((4, 5, 6), start=CALL):
        session, times = Session(plugin, version), Times()
        plugin.commwatch_nccl_here()[0] = number
        plugin.commwatch_nccl_here()[1] = 1  # when it began
        session.collective()
        state = plugin.commwatch_nccl_times_of(number, ctypes.byref(times))
        found = state, times.end_ns - times.begin_ns, times.choice
        assert found == (OVER, TOOK_NS, CHOICE), f"version {version}: {found}"
        session.end()


if __name__ == "__main__":
    main(sys.argv[1])
