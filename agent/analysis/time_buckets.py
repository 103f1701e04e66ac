"""A job by ten seconds: one point of a plot over time. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from commwatch.core.cells import SLOT_NS


@dataclass(frozen=True)
class Slot:
    """Ten seconds of a job, all its ranks here together."""

    #: Their end, in Unix seconds.
    at: float
    #: Shares of the steps that ended in them, but for the long ones; ``None``: not known, or none ended.
    comm: float | None
    exposed: float | None
    #: By op, in bytes per second.
    busbw: dict[str, float]


def slot_of(at_ns: int, shares: tuple[float, float | None] | None, by_op: Mapping[str, tuple[float, float]]) -> Slot:
    """Put together.

    Args:
        at_ns: its begin in wall time.
        shares: comm share and exposed share.
        by_op: bus bytes, and the time in ns that they took.
    """
    rates = {op: bus_bytes * 1e9 / busy_ns for op, (bus_bytes, busy_ns) in by_op.items() if bus_bytes and busy_ns}
    comm, exposed = shares or (None, None)
    return Slot((at_ns + SLOT_NS) / 1e9, comm, exposed, rates)
