"""The played driver in this process, through ctypes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import threading
from collections.abc import Iterator
from ctypes import byref, c_float, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

DISABLE_TIMING, NON_BLOCKING = 2, 1  # of events, of streams
GLOBAL, RELAXED = 0, 2  # modes of capture
#: With these settings, ``launch`` puts a kernel of 20 ms on a stream.
SLOW_KERNEL_MS, SETTINGS = 20.0, {"PLAYED_KERNELS": "slow:20000", "PLAYED_DEVICES": "2"}


class Driver:
    """The driver in this process, with a context of the first device."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.call("cuInit", 0)
        self.context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(self.context), 0)
        self.call("cuCtxSetCurrent", self.context)
        module = c_void_p()
        self.call("cuModuleLoadData", byref(module), None)
        self.kernel = c_void_p()
        self.call("cuModuleGetFunction", byref(self.kernel), module, b"slow")

    def result(self, function: str, *args: Any) -> int:
        """The driver's answer."""
        return int(getattr(self.library, function)(*args))

    def call(self, function: str, *args: Any) -> None:
        """Call a function that must succeed."""
        assert self.result(function, *args) == 0, function

    def stream(self) -> c_void_p:
        made = c_void_p()
        self.call("cuStreamCreate", byref(made), NON_BLOCKING)
        return made

    def event(self, flags: int = 0) -> c_void_p:
        made = c_void_p()
        self.call("cuEventCreate", byref(made), flags)
        return made

    def recorded(self, stream: c_void_p, flags: int = 0) -> c_void_p:
        """A new event, recorded on a stream."""
        event = self.event(flags)
        self.call("cuEventRecord", event, stream)
        return event

    def launch(self, stream: c_void_p) -> None:
        """Put a kernel of 20 ms on a stream."""
        self.call("cuLaunchKernel", self.kernel, 1, 1, 1, 1, 1, 1, 0, stream, None, None)

    def elapsed_ms(self, first: c_void_p, last: c_void_p) -> float:
        self.call("cuEventSynchronize", last)
        ms = c_float()
        self.call("cuEventElapsedTime_v2", byref(ms), first, last)
        return ms.value

    def allocate(self, size: int) -> c_uint64:
        at = c_uint64()
        self.call("cuMemAlloc_v2", byref(at), c_size_t(size))
        return at

    @contextlib.contextmanager
    def held(self, stream: c_void_p) -> Iterator[None]:
        """Nothing that is put on a stream in this block begins before the block ends, however slow this process is."""
        gate = self.allocate(4)
        self.call("cuMemcpyHtoD_v2", gate, bytes(4), c_size_t(4))
        self.call("cuStreamWaitValue32_v2", stream, gate, 1, 1)  # until it is equal
        yield
        self.call("cuMemcpyHtoD_v2", gate, b"\1\0\0\0", c_size_t(4))

    def report(self, path: Path) -> dict[str, Any]:
        assert self.result("played_report", os.fsencode(path)) == 0
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return report

    def elsewhere(self, function: str, *args: Any, relaxed: bool = False) -> int:
        """The answer in another thread, whose capture mode is the default one, or relaxed."""
        answers = []

        def ask() -> None:
            self.call("cuCtxSetCurrent", self.context)
            if relaxed:
                self.call("cuThreadExchangeStreamCaptureMode", byref(c_int(RELAXED)))
            answers.append(self.result(function, *args))

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return answers[0]
