"""Algorithm and bus bandwidth from size, time and group size; the only table of bus factors. Pure.

Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md. algbw = S / t; busbw = algbw x factor makes the number comparable
with the rated speed of a link, whatever the number of ranks. Totals of a job sum size x factor (``Cell.bus_bytes``); their consumers divide by the time.
"""

from __future__ import annotations

from collections.abc import Callable


def _ring_twice(n: int) -> float:
    return 2 * (n - 1) / n


def _ring_once(n: int) -> float:
    return (n - 1) / n


def _direct(n: int) -> float:
    return 1.0


BUS_FACTOR: dict[str, Callable[[int], float]] = {
    "all_reduce": _ring_twice,
    "all_gather": _ring_once,
    "reduce_scatter": _ring_once,
    "all_to_all": _ring_once,
    "gather": _ring_once,
    "scatter": _ring_once,
    "broadcast": _direct,
    "reduce": _direct,
    "send": _direct,
    "recv": _direct,
}


def bus_factor(op: str, group_size: int) -> float | None:
    """Return bus bytes per byte of S; ``None`` without a bandwidth: a group of one rank, barrier, an unknown op.

    >>> bus_factor("all_reduce", 8)
    1.75
    """
    factor = BUS_FACTOR.get(op)
    return factor(group_size) if factor is not None and group_size > 1 else None


def algbw(size_bytes: float, duration_s: float) -> float | None:
    """Return S / t in bytes per second; ``None`` without a size or a time."""
    return size_bytes / duration_s if size_bytes > 0 and duration_s > 0 else None


def busbw_of_one(op: str, size_bytes: float, duration_s: float, group_size: int) -> float | None:
    """Return the bus bandwidth of one operation in bytes per second; ``None`` where it is not defined.

    Only ``commwatch bench`` uses it. CONTRIBUTING (How data flows) lists the other places that compute bus bandwidths.

    Args:
        op: canonical name.
        size_bytes: S of the op, as nccl-tests counts it.
        duration_s: start to end on one rank, waiting for late ranks included.
        group_size: ranks in this group (not the world).

    >>> busbw_of_one("all_reduce", size_bytes=8_000_000, duration_s=1e-3, group_size=8)
    14000000000.0
    """
    factor, bandwidth = bus_factor(op, group_size), algbw(size_bytes, duration_s)
    return None if factor is None or bandwidth is None else bandwidth * factor
