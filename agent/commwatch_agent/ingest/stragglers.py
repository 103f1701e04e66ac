"""Lateness of the ranks of a group in time, in which ``analysis.straggler_search`` finds the stragglers. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from commwatch_agent.ingest.columns import Ints

#: Length in ns of the bins in which lateness is summed; most bins kept.
BIN_NS, MOST_BINS = 100_000_000, 600
#: Most lateness of a rank in a bin; more is cut off.
_MOST_NS = (1 << 63) - 1
#: Windows in ns, tried in order until one has a straggler; each is extended until it has enough periods.
WINDOWS_NS = (10_000_000_000, 15_000_000_000, 30_000_000_000)
#: Least number of periods of a window, and its least length; anything less is chance, or the start of a job.
LEAST_PERIODS = 5
LEAST_NS = 5_000_000_000
#: Least share of the time that a straggler costs the others.
COSTS = 0.05
#: What is in fewer than one of so many steps, such as a checkpoint, is no part of the training itself: no rank is late by it, and no share has it.
RARE_STEPS = 12


class Late(NamedTuple):
    """A straggler, and what it cost."""

    rank: int
    #: Its lateness minus the lower median of all ranks, in the part of the window in which it was late: the time that the others waited for it.
    cost_ns: int
    #: Length of that part.
    window_ns: int
    #: Training steps in it; ``None``: they are not marked.
    steps: int | None
    #: How long ago it ended: the rank may be on time again.
    ago_ns: int = 0
    #: In how many of these steps it was late, if in few of them; ``None``: in most, or not known.
    late_steps: int | None = None
    #: The further groups of its job in which it is late, by ``group_id``, with the share of the time that the others there waited for it.
    also: tuple[tuple[str, float], ...] = ()

    @property
    def cost_share(self) -> float:
        """Share of the time (0 to 1) that the others waited for it."""
        return self.cost_ns / self.window_ns


class LateBins(NamedTuple):
    """Lateness in ns of ranks by bins of time."""

    ranks: list[int]
    #: [bins]: their numbers, in order.
    numbers: Ints
    #: [ranks, bins].
    late_ns: Ints

    def of(self, ranks: Collection[int]) -> LateBins:
        """Return the bins of some ranks."""
        at = [place for place, rank in enumerate(self.ranks) if rank in ranks]
        return LateBins([self.ranks[place] for place in at], self.numbers, self.late_ns[at])


class LateWindow:
    """The own lateness of a group's ranks in its latest collectives."""

    def __init__(self) -> None:
        #: Numbers of the bins, in the order in which they came; and the lateness of each rank in each of them, bin by bin.
        self._numbers, self._late_ns = array("q"), array("q")
        self._newest = -1
        #: Place of each rank in a bin.
        self._columns: dict[int, int] = {}
        #: Sum of each rank over all bins.
        self._total_ns: list[int] = []
        #: The ranks of the group; empty before its first collective.
        self.ranks: frozenset[int] = frozenset()

    def add(self, end_ns: int, late_ns: Mapping[int, int]) -> None:
        """Add a collective that ended at ``end_ns``, with the own lateness of each rank."""
        if len(late_ns) > len(self.ranks):
            self.ranks = frozenset(late_ns)
        if not late_ns.keys() <= self._columns.keys():
            self._widen(late_ns)
        first = self._bin(end_ns // BIN_NS) * len(self._columns)
        for rank, late in late_ns.items():
            if late:
                column = self._columns[rank]
                before = self._late_ns[first + column]
                self._late_ns[first + column] = after = min(before + late, _MOST_NS)
                self._total_ns[column] += after - before

    @property
    def begins_ns(self) -> int | None:
        """When the oldest bin begins; ``None``: there is none."""
        return min(self._numbers) * BIN_NS if self._numbers else None

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of the bins that have a collective, in the order in which they came."""
        return self._numbers

    @property
    def bytes(self) -> int:
        """About how many bytes the bins take."""
        return 8 * (len(self._late_ns) + len(self._numbers)) + 100 * len(self._columns)

    def halve(self) -> None:
        """Drop the older half of the bins."""
        for _ in range(-(-len(self._numbers) // 2)):
            self._drop_oldest()
        if not self._numbers:
            self._columns, self._total_ns, self._newest = {}, [], -1

    def _drop_oldest(self) -> None:
        width = len(self._columns)
        self._total_ns = [total - late for total, late in zip(self._total_ns, self._late_ns[:width], strict=True)]
        del self._late_ns[:width]
        if self._numbers.pop(0) == self._newest:
            self._newest = max(self._numbers, default=-1)

    def _bin(self, number: int) -> int:
        """Return the place of a bin; add it if it is new, and drop the oldest one of too many."""
        if self._numbers and self._numbers[-1] == number:
            return len(self._numbers) - 1
        if number <= self._newest and number in self._numbers:
            return self._numbers.index(number)
        width = len(self._columns)
        self._numbers.append(number)
        self._newest = max(self._newest, number)
        self._late_ns.frombytes(bytes(self._late_ns.itemsize * width))
        if len(self._numbers) > MOST_BINS:
            self._drop_oldest()
        return len(self._numbers) - 1

    def _widen(self, late_ns: Mapping[int, int]) -> None:
        """Add ranks to all bins."""
        width, narrow = len(self._columns), self._late_ns
        for rank in late_ns:
            self._columns.setdefault(rank, len(self._columns))
        more = array("q", bytes(narrow.itemsize * (len(self._columns) - width)))
        self._total_ns += more
        self._late_ns = array("q")
        for at in range(len(self._numbers)):
            self._late_ns += narrow[at * width : (at + 1) * width] + more

    def until(self, now_ns: int) -> LateBins | None:
        """Return the bins up to now; ``None`` if no rank costs as much as a straggler.

        Later bins come from wrong end times that a trainer wrote.
        """
        # Nearly always this check is enough, as no sum over all bins reaches the least cost of a window.
        span_ns = len(self._numbers) * BIN_NS
        if not span_ns or max(self._total_ns, default=0) < COSTS * min(WINDOWS_NS[0], span_ns):
            return None
        import numpy as np  # an agent without trainers does not need it

        ranks, numbers = sorted(self.ranks), np.array(self._numbers)
        late_ns = np.array(self._late_ns).reshape(len(numbers), -1).T[[self._columns[rank] for rank in ranks]]
        order = np.argsort(numbers, kind="stable")
        order = order[: np.searchsorted(numbers[order], now_ns // BIN_NS, side="right")]
        return LateBins(ranks, numbers[order], late_ns[:, order])
