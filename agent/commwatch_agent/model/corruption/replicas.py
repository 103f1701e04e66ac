"""Compares the checksums of replicated parameters over the ranks of this node: which rank has other bits, and since when. Pure.

A rank is judged on a parameter only once it has agreed on it with most of the others: what was never equal is not a corruption. Import it only
where there are checksums, because it brings in numpy.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from commwatch.wire.numbers import ahead

#: Checksums by parameter: shape [parameters, 2].
Sums = npt.NDArray[np.uint64]
#: Most checksums of incomplete checks of a set, for each rank; and least checks.
_MOST_PENDING, _LEAST_CHECKS = 1 << 17, 8
#: Latest checks of a rank that are kept, to be compared with those of ranks on other nodes.
KEPT = 8
#: The rings of this node's ranks are found within this time after the first check.
_SETTLED_NS = 10_000_000_000
#: Most sets of a job, and most groups of ranks that differ in one set.
MOST_SETS, _MOST_EPISODES = 1024, 16
#: ``rank``: these ranks differ from the others. ``one_of``: two values are equally frequent. ``all``: no two ranks of three or more agree.
Which = Literal["rank", "one_of", "all"]


class Odd(NamedTuple):
    """Ranks that differ, and in which parameters."""

    ranks: tuple[int, ...]
    which: Which
    places: tuple[int, ...]


@dataclass
class Episode:
    """Ranks that have other bits than the rest, from one check to another."""

    odd: Odd
    #: Step of the first check that found it, and of the complete check before that; ``None``: there was none.
    first: int
    right: int | None
    #: Monotonic times of the first and of the latest check that found it, in ns.
    since_ns: int
    latest_ns: int


class Rank(Protocol):
    """What is asked of a rank."""

    rank: int
    alive: bool


class Check(NamedTuple):
    """The checksums of one rank after one step."""

    #: Number of the step since the set was announced, and of the group's collectives by then.
    at: tuple[int, int]
    sums: Sums
    #: By the rank's clock.
    taken_ns: int


def odd_ones(sums: Mapping[int, Sums], agreed: Mapping[int, npt.NDArray[np.bool_]]) -> list[Odd]:
    """Return which ranks differ in parameters on which they have agreed before, by checksums of one check by rank.

    ``agreed`` is by rank, with the shape [parameters]; it is brought up to date.
    """
    ranks = sorted(sums)
    values = np.stack([sums[rank] for rank in ranks])
    equal = (values == values[0]).all(axis=(0, 2))
    found: dict[tuple[tuple[int, ...], Which], list[int]] = {}
    for place in np.flatnonzero(~equal).tolist():
        of_rank = {rank: tuple(values[at, place].tolist()) for at, rank in enumerate(ranks)}
        most, *rest = Counter(of_rank.values()).most_common()
        if most[1] == 1 and len(ranks) > 2:
            odd, which = ranks, "all"
        elif most[1] == rest[0][1]:
            odd, which = ranks, "one_of"
        else:
            odd, which = [rank for rank in ranks if of_rank[rank] != most[0]], "rank"
        if all(agreed[rank][place] for rank in odd):
            found.setdefault((tuple(odd), which), []).append(place)  # type: ignore[arg-type]
        if which == "rank":
            for rank in set(ranks) - set(odd):
                agreed[rank][place] = True
    for rank in ranks:
        agreed[rank] |= equal
    return [Odd(odd, which, tuple(places)) for (odd, which), places in found.items()]


class SetJoin:
    """The checks of one set of parameters.

    Args:
        group_id: of the ranks that must agree.
        size: number of these ranks, on all nodes.
        names: of the parameters.
    """

    def __init__(self, group_id: str, size: int, names: tuple[str, ...]) -> None:
        self.group_id, self.size, self.names = group_id, size, names
        #: The ranks of this node that have checked it.
        self.ranks: dict[int, Rank] = {}
        self.episodes: list[Episode] = []
        #: Checks that all ranks of this node have made, and the time of the latest, in ns.
        self.checks = self.judged_ns = 0
        #: By rank its first check, and its latest ones.
        self.first: dict[int, Check] = {}
        self.latest: dict[int, deque[Check]] = {}
        #: By rank on which parameters it has agreed with most of the others.
        self._agreed: dict[int, npt.NDArray[np.bool_]] = {}
        #: By number of the step and of the group's collective: checks that a rank has not made yet, and the latest complete one.
        self._pending: dict[tuple[int, int], dict[int, Check]] = {}
        #: Checks of which some records are still in the ring, by rank, step and collective: the sums, and which of them are there.
        self._filling: dict[tuple[int, int, int], tuple[Sums, set[int]]] = {}
        #: The step of the latest complete check.
        self._judged: int | None = None

    def add(self, totals: Rank, records: npt.NDArray[np.void]) -> None:
        """Add checksums of one rank; of the dtype ``RECORD``, all of one check."""
        self.ranks[totals.rank] = totals
        first = records[0]
        at = totals.rank, int(first["seq"]), int(first["waited"])
        sums, there = self._filling.setdefault(at, (np.zeros((len(self.names), 2), np.uint64), set()))
        place = records["peer"]
        records = records[(place >= 0) & (place < len(self.names))]
        sums[records["peer"], 0], sums[records["peer"], 1] = records["size"], records["launch"]
        there.update(records["peer"].tolist())
        if len(there) == len(self.names):
            del self._filling[at]
            check = Check(at[1:], sums, int(first["start"]))
            self.first.setdefault(totals.rank, check)
            self.latest.setdefault(totals.rank, deque(maxlen=KEPT)).append(check)
            self._complete(totals.rank, check)
        for old in [other for other in self._filling if other[0] == totals.rank and other != at]:
            del self._filling[old]  # the ring was overwritten before all of it was read

    @property
    def bytes(self) -> int:
        """About how many bytes the tables take."""
        checks = 2 + KEPT + len(self._pending)
        return len(self.ranks) * (checks * (400 + 16 * len(self.names)) + 300) + 64 * len(self.names)

    def halve(self) -> None:
        """Drop the older half of the checks that a rank has not made yet."""
        for _ in range(-(-len(self._pending) // 2)):
            del self._pending[next(iter(self._pending))]

    def _complete(self, rank: int, check: Check) -> None:
        count = check.at[0]
        if self._judged is not None and ahead(count, self._judged) < 0:
            return
        parts = self._pending.setdefault(check.at, {})
        parts[rank] = check
        here = {rank for rank, totals in self.ranks.items() if totals.alive}
        began_ns = min(first.taken_ns for first in self.first.values())
        all_known = len(here) == self.size or check.taken_ns - began_ns > _SETTLED_NS
        if len(here) > 1 and all_known and parts.keys() >= here:
            # Those before it may have waited for the same ring to be found.
            ready = [at for at, of in self._pending.items() if ahead(at[0], count) <= 0 and of.keys() >= here]
            for at in sorted(ready, key=lambda at: (ahead(at[0], count), at[1])):
                made = self._pending[at]
                sums, times = {rank: made[rank].sums for rank in made}, [each.taken_ns for each in made.values()]
                self.judge(at[0], sums, max(times))
            self._pending = {at: of for at, of in self._pending.items() if at == check.at or ahead(at[0], count) > 0}
        while len(self._pending) > max(_LEAST_CHECKS, _MOST_PENDING // len(self.names)):
            del self._pending[next(iter(self._pending))]

    @property
    def runs(self) -> bool:
        """Whether one of the ranks runs."""
        return any(totals.alive for totals in self.ranks.values())

    def judge(self, count: int, parts: Mapping[int, Sums], now_ns: int) -> None:
        """Compare the ranks at the check of this step, which is not before the one judged last.

        Args:
            now_ns: time of the check, on any clock.
        """
        for rank in parts:
            self._agreed.setdefault(rank, np.zeros(len(self.names), np.bool_))
        for odd in odd_ones(parts, self._agreed):
            known = next((each for each in self.episodes if each.odd[:2] == odd[:2]), None)
            if known is not None:
                places = (*known.odd.places, *(place for place in odd.places if place not in known.odd.places))
                known.odd, known.latest_ns = odd._replace(places=places), max(known.latest_ns, now_ns)
            elif len(self.episodes) < _MOST_EPISODES:
                self.episodes.append(Episode(odd, count, self._judged, now_ns, now_ns))
        self.checks += count != self._judged
        self._judged, self.judged_ns = count, now_ns
