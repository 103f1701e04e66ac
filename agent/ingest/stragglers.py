"""Lateness of the ranks of a group in time, in which ``analysis.straggler_search`` finds the stragglers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

#: Length in ns of the bins in which lateness is summed; most bins kept.
BIN_NS, MOST_BINS = 100_000_000, 600
#: Windows in ns, tried in order until one has a straggler; each is extended until it has enough periods.
WINDOWS_NS = (10_000_000_000, 15_000_000_000, 30_000_000_000)
#: Least share of the time that a straggler costs the others.
COSTS = 0.05


class Late(NamedTuple):
    """A straggler, and what it cost."""

    rank: int
    #: Its lateness in the window minus the lower median of all ranks: the time that the others waited for it.
    cost_ns: int
    window_ns: int
    #: Training steps in the window; ``None``: they are not marked.
    steps: int | None


class LateBins(NamedTuple):
    """Lateness in ns of ranks by bins of time."""

    ranks: list[int]
    #: Of the bins, in order; and of each rank in each bin.
    numbers: list[int]
    late_ns: list[list[int]]


class LateWindow:
    """The own lateness of a group's ranks in its latest collectives."""

    def __init__(self) -> None:
        self._bins: dict[int, dict[int, int]] = {}
        #: Their sums.
        self._total: dict[int, int] = {}
        #: The ranks of the group; empty before its first collective.
        self.ranks: frozenset[int] = frozenset()

    def add(self, end_ns: int, late_ns: Mapping[int, int]) -> None:
        """Add a collective that ended at ``end_ns``, with the own lateness of each rank."""
        if len(late_ns) > len(self.ranks):
            self.ranks = frozenset(late_ns)
        of_bin = self._bins.setdefault(end_ns // BIN_NS, {})
        if len(self._bins) > MOST_BINS:
            for rank, late in self._bins.pop(next(iter(self._bins))).items():
                self._total[rank] -= late
        for rank, late in late_ns.items():
            if late:
                of_bin[rank] = of_bin.get(rank, 0) + late
                self._total[rank] = self._total.get(rank, 0) + late

    def until(self, now_ns: int) -> LateBins:
        """Return the bins up to now; none if no rank costs as much as a straggler.

        Later bins come from wrong end times that a trainer wrote.
        """
        # Nearly always this check is enough, as no sum over all bins reaches the least cost of a window.
        span_ns = len(self._bins) * BIN_NS
        if max(self._total.values(), default=0) < COSTS * min(WINDOWS_NS[0], span_ns):
            return LateBins([], [], [])
        numbers, ranks = sorted(at for at in self._bins if at <= now_ns // BIN_NS), list(self.ranks)
        return LateBins(ranks, numbers, [[self._bins[at].get(rank, 0) for at in numbers] for rank in ranks])
