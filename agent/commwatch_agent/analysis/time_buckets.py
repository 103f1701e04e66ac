"""Buckets of a job, of ten seconds or longer: the points of plots over time. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from commwatch_agent.model.cells import NO_STEPS, NO_WAITS, SLOT_NS, StepSums, WaitSums, added

#: Lengths of buckets in s, and most buckets in one plot.
_LENGTHS_S, _MOST = (10, 30, 60, 300, 600, 1800, 3600, 10_800, 21_600, 86_400), 360


class Lengths(NamedTuple):
    """Lengths of the buckets in ns: of those with shares of steps, and of those with bus bandwidth."""

    steps_ns: int = SLOT_NS
    busbw_ns: int = SLOT_NS


#: Those of the live page.
FINE = Lengths()


def lengths(from_ns: int, until_ns: int, coarse_before_ns: int, coarse_ns: int) -> Lengths:
    """Return the shortest buckets with which a plot of a window has at most 360 points, or those of a day.

    Args:
        coarse_before_ns: the rollups before it are of ``coarse_ns``, so that there is no bus bandwidth in shorter buckets.
    """
    wanted = (until_ns - from_ns) / _MOST
    steps_ns = next((each * 10**9 for each in _LENGTHS_S if each * 10**9 >= wanted), _LENGTHS_S[-1] * 10**9)
    return Lengths(steps_ns, max(steps_ns, coarse_ns) if from_ns < coarse_before_ns else steps_ns)


@dataclass(frozen=True)
class Slot:
    """One bucket of a job, over all its ranks."""

    #: End of the bucket, in Unix seconds.
    at: float
    #: Shares (0 to 1) of the steps that ended in it, without long ones; ``None``: not known, or none ended.
    comm: float | None
    exposed: float | None
    #: By op, in bytes per second.
    busbw: dict[str, float]
    #: Part of ``comm`` spent waiting for late ranks or messages; the rest is transfer. ``None``: not known.
    waiting: float | None = None


@dataclass(frozen=True)
class SlotSums:
    """What a ``Slot`` is computed from; those of several nodes can be added."""

    #: Begin of the bucket, in ns of Unix time.
    at_ns: int
    #: Over the steps that ended in it, without long ones; times in ns.
    steps: StepSums
    #: By op: bus bytes, and the ns that they took.
    by_op: dict[str, tuple[float, float]]
    #: Times in ns.
    waits: WaitSums = NO_WAITS


def slots_of(sums: Iterable[SlotSums], of: Lengths = FINE) -> list[Slot]:
    """Return the buckets with operations or known shares, oldest first; sums with the same begin are added.

    Where the lengths differ, a bucket has either shares or bandwidths.
    """
    by_begin: dict[int, list[SlotSums]] = {}
    for each in sums:
        by_begin.setdefault(each.at_ns, []).append(each)
    slots = []
    for at, same in sorted(by_begin.items()):
        comm, exposed = added((each.steps for each in same), NO_STEPS).shares() or (None, None)
        operations, end_s = any(each.by_op for each in same), (at + of.steps_ns) / 1e9
        if of.steps_ns == of.busbw_ns:
            waiting = added((each.waits for each in same), NO_WAITS).share(comm)
            slots += [Slot(end_s, comm, exposed, _rates(same), waiting)] if operations or comm is not None else []
            continue
        slots += [Slot(end_s, comm, exposed, {})] if comm is not None else []
        slots += [Slot((at + of.busbw_ns) / 1e9, None, None, _rates(same))] if operations else []
    return sorted(slots, key=lambda slot: slot.at)


def _rates(sums: Iterable[SlotSums]) -> dict[str, float]:
    totals: dict[str, tuple[float, float]] = {}
    for each in sums:
        for op, (bus_bytes, busy_ns) in each.by_op.items():
            before = totals.get(op, (0.0, 0.0))
            totals[op] = before[0] + bus_bytes, before[1] + busy_ns
    return {op: bus_bytes * 1e9 / busy_ns for op, (bus_bytes, busy_ns) in totals.items() if bus_bytes and busy_ns}
