"""Stragglers: ranks that make the others of a group wait, step after step (docs/definitions.md, Stragglers). Pure.

Each rank has a series: its own lateness (``collective_join.OwnLateness``) in the collectives of each period. A period is a
training step where steps are marked. The series of a straggler is above those of all ranks that are not stragglers: on
average by 5 % of the time, in nearly all parts of the window, and by more than chance allows. Ranks that are late in turn, or
whose work is uneven, have series that cross. Events in fewer than one of five periods, such as checkpoints, do not count.

A test against three standard deviations over the ranks finds no straggler in a small group: among n ranks, none can be more
than (n-1)/sqrt(n) standard deviations from the mean. For three ranks this is 1.2, and it reaches 3 only with eleven ranks.

For groups over several nodes, rules of Prometheus judge instead: ``job_rank:commwatch_period_comm_share:straggler`` in
``alerts/rules.yaml``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from math import ceil, sqrt
from statistics import median_low
from typing import NamedTuple

#: Length in ns of the bins in which lateness is summed; most bins kept.
BIN_NS, MOST_BINS = 100_000_000, 600
#: Windows in ns, tried in order until one has a straggler; each is extended until it has enough periods.
WINDOWS_NS = (10_000_000_000, 15_000_000_000, 30_000_000_000)
#: Least length and number of periods of a window; anything less is the start of a job, or chance.
LEAST_NS, LEAST_PERIODS = 5_000_000_000, 5
#: Most bins of a period where steps are not marked; fewer if there would be fewer than ``_PERIODS`` periods.
_BINS_OF_PERIOD, _PERIODS = 5, 20
#: Least share of the time that a straggler costs the others.
COSTS = 0.05
#: Among ranks that send messages: how many times as long as the straggler each other rank waits at least.
_WAITS = 1.5
#: How many times as long a straggler makes each other rank wait, at least, as that rank makes it wait.
_TIMES = 3
#: Least mean lead in standard errors; plus the second number divided by the number of periods.
_ERRORS, _ERRORS_OF_FEW = 4, 60
#: A straggler this long ago remains one while it still costs as much.
_HELD_NS = tuple(range(1_000_000_000, 5_000_000_001, 1_000_000_000))
#: Quantile of the leads at which larger ones are cut off.
_USUAL = 0.8
#: Number of parts of a window; in how many of them the lead must be at least half of the least lead.
_PARTS, _PARTS_WITH = 5, 4
#: Most other ranks that a suspect is compared with: those with the most lateness.
_MOST_COMPARED = 8
#: There is no verdict this long after the latest period, or this many mean periods after it if that is longer.
_STILL_NS, _STILL_PERIODS = 30_000_000_000, 3


class Late(NamedTuple):
    """A straggler, and what it cost."""

    rank: int
    #: Its lateness in the window minus the lower median of all ranks: the time that the others waited for it.
    cost_ns: int
    window_ns: int
    #: Training steps in the window; ``None``: they are not marked.
    steps: int | None


class Period(NamedTuple):
    """A period of time: start, end, number of steps, and lateness by rank (0 for absent ranks)."""

    start_ns: int
    end_ns: int
    steps: int | None
    late_ns: Mapping[int, int]


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

    def late(self, now_ns: int, steps: Sequence[int] = (), least_ns: int = LEAST_NS) -> list[Late]:
        """Return the stragglers up to now, by rank.

        Args:
            steps: ends of the latest steps, in order, in ns of the clock of ``now_ns``; empty: they are not marked.
            least_ns: least length of a window.
        """
        # Nearly always this check is enough, as no sum over all bins reaches the least cost of a window.
        span_ns = len(self._bins) * BIN_NS
        if max(self._total.values(), default=0) < COSTS * min(WINDOWS_NS[0], span_ns):
            return []
        return _stragglers(_periods(_until(self._bins, now_ns), steps), self.ranks, now_ns, least_ns)


def waiting_least(
    bins: Mapping[int, Mapping[int, int]], ranks: Collection[int], now_ns: int, steps: Sequence[int]
) -> list[Late]:
    """Return the stragglers among ranks that send messages to each other, such as the stages of a pipeline.

    Messages do not show which rank was late for which. But a step takes equally long on all ranks, so the rank that works longest
    waits least. It must wait less than two thirds as long as the others, as stages are never quite even. Even the slowest stage waits while
    a step's first and last messages pass through the others.

    Args:
        bins: how long each rank waited in operations, in ns, by bin of time.
        steps: as for ``LateWindow.late``.
    """
    periods = [
        period._replace(late_ns={rank: -waited for rank, waited in period.late_ns.items()})
        for period in _periods(_until(bins, now_ns), steps)
    ]
    return _stragglers(periods, ranks, now_ns, LEAST_NS, _WAITS)


def _until(bins: Mapping[int, Mapping[int, int]], now_ns: int) -> dict[int, Mapping[int, int]]:
    """Return the bins up to now. Later ones come from wrong end times that a trainer wrote."""
    return {at: each for at, each in bins.items() if at <= now_ns // BIN_NS}


def _periods(bins: Mapping[int, Mapping[int, int]], steps: Sequence[int]) -> list[Period]:
    """Return the bins merged to periods, in order: by steps, or without steps by bursts of collectives."""
    numbers = sorted(bins)
    if steps:
        steps = steps[max(0, min(len(steps) - LEAST_PERIODS - 1, bisect_left(steps, steps[-1] - WINDOWS_NS[-1]))) :]
    ends = _ends_of_steps(numbers, steps) if steps else _ends_of_bursts(numbers)
    return [
        Period(
            (before + 1) * BIN_NS,
            (at + 1) * BIN_NS,
            count or None,
            _sum([bins[number] for number in numbers[bisect_right(numbers, before) : bisect_right(numbers, at)]]),
        )
        for (before, _), (at, count) in pairwise(ends)
    ]


def _ends_of_steps(numbers: Sequence[int], steps: Sequence[int]) -> list[tuple[int, int]]:
    """Return the bins, within the range of ``numbers``, in which steps ended, and how many did."""
    ends = groupby(end // BIN_NS for end in steps)
    return [(at, len(list(each))) for at, each in ends if numbers and numbers[0] <= at <= numbers[-1]]


def _ends_of_bursts(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the last bin of each run without a gap, with 0 steps; long runs are split."""
    most = max(1, min(_BINS_OF_PERIOD, (numbers[-1] - numbers[0]) // _PERIODS)) if numbers else 1
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1 and len(runs[-1]) < most:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [(run[-1], 0) for run in runs]


def _sum(late_ns: Sequence[Mapping[int, int]]) -> Mapping[int, int]:
    if len(late_ns) == 1:
        return late_ns[0]
    total: dict[int, int] = {}
    for each in late_ns:
        for rank, late in each.items():
            total[rank] = total.get(rank, 0) + late
    return total


def _stragglers(
    periods: Sequence[Period], ranks: Iterable[int], now_ns: int, least_ns: int, own_counts: float = 1
) -> list[Late]:
    """Return the stragglers in the latest of these sorted periods, by rank.

    Those of some seconds ago remain while they still cost as much, so that a verdict does not flicker with the scatter of the steps.
    """
    ranks = list(ranks)
    culprits, window = _judged(periods, ranks, now_ns, least_ns, own_counts)
    if periods and not culprits:
        window = _latest(periods, WINDOWS_NS[0])
        held = _held(window, ranks, own_counts)
        # Nearly always this check is enough: stragglers are at most half of the ranks, and each of them leads all others.
        ahead = max(map(len, held.values()), default=0) >= len(ranks) - len(ranks) // 2
        for ago_ns in _HELD_NS if ahead else ():
            until = bisect_right(periods, periods[-1].end_ns - ago_ns, key=lambda period: period.end_ns)
            before, _ = _judged(periods[:until], ranks, now_ns - ago_ns, least_ns, own_counts)
            if before and all(held[rank].issuperset(set(ranks).difference(before)) for rank in before):
                culprits = before
                break
    if not culprits:
        return []
    late = {rank: sum(period.late_ns.get(rank, 0) for period in window) for rank in ranks}
    usual, span = median_low(late.values()), window[-1].end_ns - window[0].start_ns
    steps = sum(period.steps or 0 for period in window) or None
    return [Late(rank, max(0, late[rank] - usual), span, steps) for rank in culprits]


def _latest(periods: Sequence[Period], window_ns: int) -> Sequence[Period]:
    """Return the periods of the latest ``window_ns``, or more until there are enough."""
    since = bisect_left(periods, periods[-1].end_ns - window_ns, key=lambda period: period.start_ns) if periods else 0
    return periods[max(0, min(since, len(periods) - LEAST_PERIODS)) :]


def _judged(
    periods: Sequence[Period], ranks: Sequence[int], now_ns: int, least_ns: int, own_counts: float
) -> tuple[list[int], Sequence[Period]]:
    """Return the stragglers and their window; no stragglers where too little is known."""
    window: Sequence[Period] = []
    for window_ns in WINDOWS_NS:
        window = _latest(periods, window_ns)
        if len(window) < LEAST_PERIODS:
            return [], window
        end_ns = window[-1].end_ns
        span = end_ns - window[0].start_ns
        if span < least_ns or now_ns - end_ns > max(_STILL_NS, _STILL_PERIODS * span // len(window)):
            return [], window
        culprits = _culprits(_series(window, ranks), COSTS * span, own_counts)
        if culprits:
            return culprits, window
    return [], window


def _series(window: Sequence[Period], ranks: Sequence[int]) -> dict[int, list[int]]:
    return {rank: [period.late_ns.get(rank, 0) for period in window] for rank in ranks}


def _held(window: Sequence[Period], ranks: Sequence[int], own_counts: float) -> dict[int, set[int]]:
    """Return for each rank the others that it costs as much as a straggler does, in this window and in its last part."""
    late, least = _series(window, ranks), COSTS * (window[-1].end_ns - window[0].start_ns)
    held: dict[int, set[int]] = {rank: set() for rank in ranks}
    for rank in ranks:
        mine = [own_counts * each for each in late[rank]]
        for other in ranks:
            leads = _leads(mine, late[other])
            if sum(leads) >= least and sum(_parts(leads)[-1]) >= least / _PARTS / 2:
                held[rank].add(other)
    return held


def _culprits(late: Mapping[int, Sequence[int]], least: float, own_counts: float) -> list[int]:
    """Return the ranks above all others: those before the largest gap, at most half of the ranks."""
    total = {rank: sum(series) for rank, series in late.items()}
    order = sorted(late, key=lambda rank: -total[rank])
    if len(order) < 2:
        return []
    number = max(range(1, len(order) // 2 + 1), key=lambda n: total[order[n - 1]] - total[order[n]])
    culprits, others = order[:number], order[number : number + _MOST_COMPARED]
    ahead = all(
        _is_ahead(_leads([own_counts * each for each in late[rank]], late[other]), least)
        for rank in culprits
        for other in others
    )
    return sorted(culprits) if ahead else []


def _leads(late: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return by how much one rank was later than another in each period; outliers are cut off."""
    leads = [mine - theirs for mine, theirs in zip(late, other, strict=True)]
    limit = sorted(map(abs, leads))[ceil(_USUAL * len(leads)) - 1]
    return [max(-limit, min(limit, lead)) for lead in leads]


def _parts(leads: Sequence[float]) -> list[Sequence[float]]:
    number = len(leads)
    return [leads[number * n // _PARTS : number * (n + 1) // _PARTS] for n in range(_PARTS)]


def _is_ahead(leads: Sequence[float], least: float) -> bool:
    """Return whether one rank led another by at least ``least`` in the window, and not by chance."""
    number, total, behind = len(leads), sum(leads), -sum(lead for lead in leads if lead < 0)
    if total < least or total + behind < _TIMES * behind:
        return False
    mean = total / number
    error = sqrt(sum((lead - mean) ** 2 for lead in leads) / (number - 1) / number)
    lasting = sum(sum(part) >= least / _PARTS / 2 for part in _parts(leads))
    return mean >= (_ERRORS + _ERRORS_OF_FEW / number) * error and lasting >= _PARTS_WITH
