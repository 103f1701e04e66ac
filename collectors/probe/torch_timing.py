"""How operations on GPUs are timed, and why so. Decided once, when the probe goes in.

``events``: the GPU's own clock, by timing events around each operation, read once it is over. ``poll``: its end is found by
asking events without a clock. ``off``: counted only. Never is the device waited for, and what is captured into a CUDA graph is
left alone.
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

from commwatch.collectors.wire.variables import TIMINGS

AUTO, OFF, POLL, EVENTS = TIMINGS
MODES = (OFF, POLL, EVENTS)
#: Its queues to the device are as many as this says; with one, a timing event keeps what follows waiting (pytorch #143890).
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_RELAXED = 2


class Timing(NamedTuple):
    """What was decided."""

    #: One of ``MODES``.
    mode: str
    #: Why, for people.
    reason: str

    @property
    def code(self) -> int:
        """As ``native/device.h`` numbers it."""
        return MODES.index(self.mode)


def choose(env: Mapping[str, str], *, runtime: bool) -> Timing:
    """Decide.

    Args:
        runtime: the functions that keep us out of the way of graph captures are there.
    """
    asked = env.get("COMMWATCH_TIMING") or AUTO
    said = f"COMMWATCH_TIMING={asked}"
    if asked not in TIMINGS:
        return Timing(OFF, f"{said} is none of {', '.join(TIMINGS)}")
    if asked == OFF:
        return Timing(OFF, said)
    if not runtime:
        return Timing(OFF, "this torch has no CUDA runtime")
    if asked == AUTO:
        return Timing(OFF, "timing has not been proven on a real GPU yet; COMMWATCH_TIMING=events or poll asks for it")
    if asked == EVENTS and env.get(_QUEUES) == "1":
        return Timing(POLL, f"{said}, but with {_QUEUES}=1 timing events would serialise compute and communication")
    return Timing(asked, said)


# -- what torch has no name for ---------------------------------------------------------------


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
    """Whether this process can ask a device without disturbing captures."""
    return _exchange() is not None


def step_aside(device: torch.device) -> None:
    """Put this thread on ``device``, and out of the way of graph captures in others.

    Raises:
        RuntimeError: the runtime does not let us.
    """
    torch.get_device_module(device).set_device(device)
    exchange, mode = _exchange(), ctypes.c_int(_RELAXED)
    if exchange is None or exchange(ctypes.byref(mode)) != 0:
        raise RuntimeError("the CUDA runtime does not let us out of the way of graph captures")


# -- batches ----------------------------------------------------------------------------------


class Batches:
    """Sees where operations are coalesced (``batch_isend_irecv``, ``_coalescing_manager``).

    Inside, no operation has an end of its own; the Work that the end of the batch returns has.

    Args:
        begins: called with the process group.
        ends: called with the process group and the Work, which is ``None`` where the batch blocks the current stream.
    """

    def __init__(self, begins: Callable[[Any], None], ends: Callable[[Any, Any], None]) -> None:
        self._begins, self._ends = begins, ends
        self._originals: tuple[Any, Any] | None = None

    def watch(self) -> None:
        """Put the patch in."""
        start, end = self._originals = ProcessGroup._start_coalescing, ProcessGroup._end_coalescing
        begins, ends = self._begins, self._ends

        def _start_coalescing(self_: Any, *args: Any, **kwargs: Any) -> Any:
            result = start(self_, *args, **kwargs)
            begins(self_)
            return result

        def _end_coalescing(self_: Any, *args: Any, **kwargs: Any) -> Any:
            work = end(self_, *args, **kwargs)
            ends(self_, work)
            return work

        ProcessGroup._start_coalescing = _start_coalescing  # type: ignore[method-assign, assignment]
        ProcessGroup._end_coalescing = _end_coalescing  # type: ignore[method-assign, assignment]

    def unwatch(self) -> None:
        """Take it out again."""
        if self._originals is not None:
            ProcessGroup._start_coalescing, ProcessGroup._end_coalescing = self._originals  # type: ignore[method-assign]
            self._originals = None
