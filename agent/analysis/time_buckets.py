"""Buckets of ten seconds of a job: the points of plots over time. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from commwatch.core.cells import SLOT_NS


@dataclass(frozen=True)
class Slot:
    """Ten seconds of a job, over all its ranks on this node."""

    #: End of the bucket, in Unix seconds.
    at: float
    #: Shares (0 to 1) of the steps that ended in it, without long ones; ``None``: not known, or none ended.
    comm: float | None
    exposed: float | None
    #: By op, in bytes per second.
    busbw: dict[str, float]


def slot_of(at_ns: int, shares: tuple[float, float | None] | None, by_op: Mapping[str, tuple[float, float]]) -> Slot:
    """Return the bucket that begins at ``at_ns`` (Unix time in ns).

    Args:
        shares: comm share and exposed share.
        by_op: bus bytes, and the ns that they took.
    """
    rates = {op: bus_bytes * 1e9 / busy_ns for op, (bus_bytes, busy_ns) in by_op.items() if bus_bytes and busy_ns}
    comm, exposed = shares or (None, None)
    return Slot((at_ns + SLOT_NS) / 1e9, comm, exposed, rates)
