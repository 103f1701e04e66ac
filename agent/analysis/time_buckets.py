"""Buckets of ten seconds of a job: the points of plots over time. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from commwatch.core.cells import SLOT_NS, StepSums, added


@dataclass(frozen=True)
class Slot:
    """Ten seconds of a job, over all its ranks."""

    #: End of the bucket, in Unix seconds.
    at: float
    #: Shares (0 to 1) of the steps that ended in it, without long ones; ``None``: not known, or none ended.
    comm: float | None
    exposed: float | None
    #: By op, in bytes per second.
    busbw: dict[str, float]


@dataclass(frozen=True)
class SlotSums:
    """What a ``Slot`` is computed from; those of several nodes can be added."""

    #: Begin of the bucket, in ns of Unix time.
    at_ns: int
    #: Over the steps that ended in it, without long ones; times in ns.
    steps: StepSums
    #: By op: bus bytes, and the ns that they took.
    by_op: dict[str, tuple[float, float]]


def slots_of(sums: Iterable[SlotSums]) -> list[Slot]:
    """Return the buckets with operations or known shares, oldest first; sums with the same begin are added."""
    by_begin: dict[int, list[SlotSums]] = {}
    for each in sums:
        by_begin.setdefault(each.at_ns, []).append(each)
    slots = ((_slot(at, by_begin[at]), any(each.by_op for each in by_begin[at])) for at in sorted(by_begin))
    return [slot for slot, has_operations in slots if has_operations or slot.comm is not None]


def _slot(at_ns: int, sums: list[SlotSums]) -> Slot:
    comm, exposed = added(each.steps for each in sums).shares() or (None, None)
    return Slot((at_ns + SLOT_NS) / 1e9, comm, exposed, _rates(sums))


def _rates(sums: Iterable[SlotSums]) -> dict[str, float]:
    totals: dict[str, tuple[float, float]] = {}
    for each in sums:
        for op, (bus_bytes, busy_ns) in each.by_op.items():
            before = totals.get(op, (0.0, 0.0))
            totals[op] = before[0] + bus_bytes, before[1] + busy_ns
    return {op: bus_bytes * 1e9 / busy_ns for op, (bus_bytes, busy_ns) in totals.items() if bus_bytes and busy_ns}
