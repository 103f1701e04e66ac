"""How operations on GPUs are timed, and the reason. Chosen once, when the probe is installed.

``events``: the GPU's own clock, by timing events around each operation, read once it has ended. ``poll``: the end is found
by polling events without a clock. ``off``: counted only. The probe never waits for the device, and does not time operations
that are captured into a CUDA graph.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import ProcessGroup

from commwatch.wire.variables import TIMINGS

AUTO, OFF, POLL, EVENTS = TIMINGS
MODES = (OFF, POLL, EVENTS)
#: Number of queues to the device; with one, a timing event delays what follows it (pytorch #143890).
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_RELAXED = 2


class Timing(NamedTuple):
    """The chosen way to time operations."""

    #: One of ``MODES``.
    mode: str
    #: The reason, for people.
    reason: str

    @property
    def code(self) -> int:
        """The mode's number in ``native/device.h``."""
        return MODES.index(self.mode)


def choose(env: Mapping[str, str], *, runtime: bool, rocm: bool = False) -> Timing:
    """Choose how to time operations.

    Args:
        runtime: ``has_runtime``: CUDA can be called without disturbing graph captures.
        rocm: torch was built for ROCm.
    """
    setting = env.get("COMMWATCH_TIMING") or AUTO
    source = f"COMMWATCH_TIMING={setting}"
    if setting not in TIMINGS:
        return Timing(OFF, f"{source}: needs one of {', '.join(TIMINGS)}")
    if setting == OFF:
        return Timing(OFF, source)
    if not runtime:
        return Timing(OFF, "this torch has no CUDA runtime")
    if setting == AUTO and rocm:
        return Timing(OFF, "timing has not been tested on ROCm; COMMWATCH_TIMING=events or poll enables it")
    if setting in (AUTO, EVENTS) and env.get(_QUEUES) == "1":
        return Timing(POLL, f"{source}, but with {_QUEUES}=1 timing events would serialise compute and communication")
    return Timing(EVENTS if setting == AUTO else setting, source)


def nccl_version() -> tuple[int, ...] | None:
    """Return the version of this process's NCCL; ``None`` if this torch has none, or has RCCL."""
    if torch.version.hip is not None or not torch.distributed.is_nccl_available():
        return None
    version = torch.cuda.nccl.version()
    return loaded_nccl() or (tuple(version) if isinstance(version, tuple) else None)


def loaded_nccl() -> tuple[int, ...] | None:
    """Return the version of the ``libnccl.so.2`` in this process; ``None``: there is none, as in a torch that contains NCCL.

    ``torch.cuda.nccl.version()`` is that of the headers with which torch was built. NCCL may have been updated since, or preloaded.
    """
    number = ctypes.c_int()
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        failed: int = library.ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    if failed:
        return None
    # Before 2.9, the major version had a thousand.
    major, rest = divmod(number.value, 10_000 if number.value >= 10_000 else 1000)
    return major, *divmod(rest, 100)


# -- CUDA without names in torch --------------------------------------------------------------


@cache
def _exchange() -> Callable[..., int] | None:
    """``cudaThreadExchangeStreamCaptureMode``, if this process has it."""
    for kind in ("cuda", "hip"):
        for library in (None, f"libtorch_{kind}.so"):
            with suppress(OSError, AttributeError):
                loaded = ctypes.CDLL(library, mode=os.RTLD_LAZY | (os.RTLD_NOLOAD if library else 0))
                function: Callable[..., int] = getattr(loaded, f"{kind}ThreadExchangeStreamCaptureMode")
                return function
    return None


def has_runtime() -> bool:
    """Return whether this process can query a device without disturbing graph captures."""
    return _exchange() is not None


def step_aside(device: torch.device) -> None:
    """Set this thread's device, and let its calls not disturb graph captures in other threads.

    Raises:
        RuntimeError: the runtime refuses.
    """
    torch.get_device_module(device).set_device(device)
    exchange, mode = _exchange(), ctypes.c_int(_RELAXED)
    if exchange is None or exchange(ctypes.byref(mode)) != 0:
        raise RuntimeError("the CUDA runtime cannot exempt this thread from graph captures")


# -- batches ----------------------------------------------------------------------------------


class Batches:
    """Watches for coalesced operations (``batch_isend_irecv``, ``_coalescing_manager``).

    Operations inside have no end of their own; the Work that the end of the batch returns has.

    Args:
        begins: called with the process group.
        ends: called with the process group and the Work, which is ``None`` if the batch blocks the current stream.
    """

    def __init__(self, begins: Callable[[Any], None], ends: Callable[[Any, Any], None]) -> None:
        self._begins, self._ends = begins, ends
        #: Methods that ``watch`` replaced: name, original and replacement.
        self._replaced: list[tuple[str, Any, Any]] = []

    def watch(self) -> None:
        """Install the patch."""
        start, end = ProcessGroup._start_coalescing, ProcessGroup._end_coalescing
        begins, ends = self._begins, self._ends

        def _start_coalescing(self_: Any, *args: Any, **kwargs: Any) -> Any:
            result = start(self_, *args, **kwargs)
            begins(self_)
            return result

        def _end_coalescing(self_: Any, *args: Any, **kwargs: Any) -> Any:
            work = end(self_, *args, **kwargs)
            ends(self_, work)
            return work

        for replacement in (_start_coalescing, _end_coalescing):
            name = replacement.__name__
            # Not the function that the class returns, which binds nothing.
            self._replaced.append((name, vars(ProcessGroup)[name], replacement))
            setattr(ProcessGroup, name, replacement)

    def unwatch(self) -> None:
        """Remove the patch, except from methods that other code has replaced since."""
        for name, original, replacement in self._replaced:
            if getattr(ProcessGroup, name) is replacement:
                setattr(ProcessGroup, name, original)
        self._replaced.clear()
