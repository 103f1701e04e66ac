"""Clocks of several nodes, compared by the ends of collectives that they share. Pure.

All ranks of a symmetric collective (all_reduce, all_gather, ...) finish together, up to the jitter of the network. So the same collective's
ends on two nodes show the difference of their clocks, whatever each clock counts from. The difference drifts: by up to 100 µs per second.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

_Key = TypeVar("_Key", bound=Hashable)
#: Fewest shared collectives for a comparison, and fewest and least time (ns) for a drift.
LEAST, _LEAST_FOR_DRIFT, _LEAST_SPAN_NS = 3, 9, 1_000_000_000
#: Share of the collectives whose deviation is at most the uncertainty.
_WITHIN = 0.9


@dataclass(frozen=True)
class Clock:
    """The clock of a node, compared with that of the first node."""

    #: Its time minus that of the first node, in ns, when it showed ``at_ns``; and by how many ns that grows each ns.
    offset_ns: float
    drift: float
    at_ns: int
    #: 90% of the shared collectives ended within this many ns of each other, by the corrected clocks.
    uncertainty_ns: float

    def of_first(self, time_ns: int) -> int:
        """Return a time of this node by the clock of the first node."""
        return time_ns - round(self.offset_ns + self.drift * (time_ns - self.at_ns))


FIRST = Clock(0.0, 0.0, 0, 0.0)


def compare(ends: Sequence[Mapping[_Key, int]]) -> list[Clock | None]:
    """Return the clock of each node; ``None``: it shares too few collectives with the others.

    Nodes without collectives in common with the first are compared through others.

    Args:
        ends: for each node, the ends of symmetric collectives by its own clock, in ns.
    """
    clocks: list[Clock | None] = [FIRST, *(None for _ in ends[1:])] if ends else []
    known = dict(ends[0]) if ends else {}
    left = set(range(1, len(ends)))
    while left:
        nearest = max(left, key=lambda node: (len(ends[node].keys() & known.keys()), -node))
        clock = _pair(known, ends[nearest])
        if clock is None:
            break
        left.remove(nearest)
        clocks[nearest] = clock
        for key, end_ns in ends[nearest].items():
            known.setdefault(key, clock.of_first(end_ns))
    return clocks


def _pair(first: Mapping[_Key, int], other: Mapping[_Key, int]) -> Clock | None:
    shared = sorted((other[key], other[key] - first[key]) for key in first.keys() & other.keys())
    if len(shared) < LEAST:
        return None
    at_ns, drift = shared[len(shared) // 2][0], _drift(shared)
    level = median(offset - drift * (time_ns - at_ns) for time_ns, offset in shared)
    deviations = sorted(abs(offset - drift * (time_ns - at_ns) - level) for time_ns, offset in shared)
    return Clock(level, drift, at_ns, deviations[min(len(shared) - 1, int(_WITHIN * len(shared)))])


def _drift(shared: list[tuple[int, int]]) -> float:
    """Return the slope between the medians of the first and the last third; 0 if there are too few, over too short a time."""
    if len(shared) < _LEAST_FOR_DRIFT or shared[-1][0] - shared[0][0] < _LEAST_SPAN_NS:
        return 0.0
    third = len(shared) // 3
    (begin_ns, before), (end_ns, after) = (
        (median(time_ns for time_ns, _ in part), median(offset for _, offset in part))
        for part in (shared[:third], shared[-third:])
    )
    return (after - before) / (end_ns - begin_ns)
