"""Stragglers: ranks that make the others of a group wait, step after step (docs/verdicts.md, Stragglers). Pure.

Each rank has a series: its own lateness (``collective_join.OwnLateness``) in the collectives of each period. A period is a
training step where steps are marked. The series of a straggler is above those of all ranks that are not stragglers: on
average by 5% of the time, in nearly all parts of the window, and by more than chance allows. Ranks that are late in turn, or
whose work is uneven, have series that cross. Events in fewer than one of five periods do not count, unless they are regular and in
more than one of twelve steps: a checkpoint comes less often.

A test against three standard deviations over the ranks finds no straggler in a small group: among n ranks, none can be more
than (n-1)/sqrt(n) standard deviations from the mean. For three ranks this is 1.2, and it reaches 3 only with eleven ranks.

For groups over several nodes, rules of Prometheus judge instead: ``job_rank:commwatch_period_comm_share:straggler`` in
``alerts/commwatch_alerts/rules.yaml``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import repeat
from statistics import median_low
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from commwatch_agent.analysis.waits.turns import take_turns
from commwatch_agent.analysis.waits.without_steps import Span, among_those_with_steps
from commwatch_agent.ingest.columns import Flags, Ints
from commwatch_agent.ingest.stragglers import (
    BIN_NS,
    COSTS,
    LEAST_NS,
    LEAST_PERIODS,
    MOST_BINS,
    RARE_STEPS,
    WINDOWS_NS,
    Late,
    LateBins,
    LateWindow,
)

#: Most bins of a period where steps are not marked; fewer if there would be fewer than ``_PERIODS`` periods.
_BINS_OF_PERIOD, _PERIODS = 5, 20
#: Among ranks that send messages: how many times as long as the straggler each other rank waits at least.
_WAITS = 1.5
#: How many times as long a straggler makes each other rank wait, at least, as that rank makes it wait.
_TIMES = 3
#: Least mean lead in standard errors; plus the second number divided by the number of periods.
_ERRORS, _ERRORS_OF_FEW = 4, 60
#: A straggler this long ago remains one while it still costs as much.
_HELD_NS = tuple(range(500_000_000, 5_000_000_001, 500_000_000))
_MOST_LOOKED_AT_NS = WINDOWS_NS[-1] + _HELD_NS[-1]
#: The largest leads are cut off: of one in five periods.
_CUT = 0.2
#: A rank that is late in fewer steps: one in 12 is cut off, and at least 4 periods. It must be late regularly: most distances between its
#: late steps differ by at most a quarter from the median. Then its mean lead must be this many standard errors at least.
_RARE_LEAST, _RARE_ERRORS = 4, 3.5
_REGULAR, _MOST_OFF = 0.75, 0.25
#: A rank that is late at irregular distances: in so many steps at least, and another one in at most one for so many of them, unless it is at so many
#: regular distances.
_ALONE_LEAST, _ALONE_OF, _ALONE_REGULAR = 12, 8, 4
#: A rank that is late in one of two to five steps, by far more than a step takes: so many leads are cut off, and so many distances are known.
_SOME_CUT, _SOME_LEAST = 2, 5
#: Ranks meet in few steps if fewer than one in so many has a collective.
_MEETS = 4
#: Number of parts of a window; in how many of them the lead must be at least half of the least lead.
_PARTS, _PARTS_WITH = 5, 4
#: Part of the lateness in a few steps, if it is late only in these.
_NEARLY_ALL = 0.8
#: Most other ranks that a suspect is compared with: those with the most lateness.
_MOST_COMPARED = 8
#: There is no verdict this long after the latest period, or this many mean periods after it if that is longer.
_STILL_NS, _STILL_PERIODS = 30_000_000_000, 3
#: Longer lateness in a bin (52 days) is cut off, so that sums fit.
_MOST_NS = 1 << 52
#: Most leads that are in memory at a time.
_MOST_TOGETHER = 1 << 16
#: By how much ranks were later than others, in ns: [..., periods].
_Leads = Ints | npt.NDArray[np.float64]


class _Periods(NamedTuple):
    """Periods of time, in order; arrays of shape [periods], ``late`` of shape [ranks, periods]."""

    start: Ints
    end: Ints
    #: Number of steps; 0: they are not marked.
    steps: Ints
    late: Ints

    def part(self, since: int, until: int) -> _Periods:
        """Return the periods from number ``since`` to before ``until``."""
        start, end, steps = (each[since:until] for each in self[:3])
        return _Periods(start, end, steps, self.late[:, since:until])

    def latest(self, window_ns: int) -> _Periods:
        """Return those of the latest ``window_ns``, or more until there are enough."""
        number = len(self.start)
        since = int(np.searchsorted(self.start, self.end[-1] - window_ns)) if number else 0
        return self.part(max(0, min(since, number - LEAST_PERIODS)), number)

    @property
    def span_ns(self) -> int:
        """Time from the begin of the first to the end of the last."""
        return int(self.end[-1] - self.start[0])


class _Rules(NamedTuple):
    """What a straggler must be."""

    #: Least length of a window.
    least_ns: int
    #: Factor of its lateness in a comparison with that of another rank.
    own_counts: float
    #: Steps are marked. Otherwise a rank may wait for requests, and only operations in quick succession show who is late.
    stepping: bool
    #: Only a rank is looked for that is late in few periods, but regularly.
    rare: bool = False


def stragglers_in(
    window: LateWindow,
    now_ns: int,
    steps: Sequence[int] = (),
    least_ns: int = LEAST_NS,
    *,
    ranks: Collection[int] | None = None,
    stepping: bool = True,
    turns: Sequence[int] = (),
    met: Sequence[int] = (),
    without: Collection[Span] = (),
) -> list[Late]:
    """Return the stragglers of a group up to now, by rank.

    Args:
        steps: ends of the latest steps, in order, in ns of the clock of ``now_ns``; empty: they are not known.
        least_ns: least length of a window.
        ranks: those of the group that are compared with each other; ``None``: all.
        stepping: as in ``_Rules``.
        turns: ends of the latest iterations of a job without steps, as for ``steps``. They only show who is late in few of them: not the first
            rank, which may wait for requests.
        met: numbers of the bins in which ranks of the job met in collectives of any group, in order; empty: they met in most, or that is not known.
            Where few steps have one, such as with local SGD, a period reaches from one to the next.
        without: when ranks have no steps while others do.
    """
    late = window.until(now_ns)
    if late is None:
        return []
    some = late if ranks is None else late.of(ranks)
    some = among_those_with_steps(some, without) if without else some
    rules = _Rules(least_ns, own_counts=1, stepping=stepping)
    found = _found(some, steps, now_ns, rules, met)
    if found or not turns:
        return found
    rare = _found(some, turns, now_ns, rules._replace(rare=True))
    return [each._replace(steps=None) for each in rare if each.rank != min(some.ranks)]


def waiting_least(
    waited_ns: Mapping[int, Mapping[int, int]], now_ns: int, steps: Sequence[int], *, stepping: bool = True
) -> list[Late]:
    """Return the stragglers among ranks that send messages to each other, such as the stages of a pipeline.

    Messages do not show which rank was late for which. But a step takes equally long on all ranks, so the rank that works longest
    waits least. It must wait less than two thirds as long as the others, as stages are never quite even. Even the slowest stage waits while
    a step's first and last messages pass through the others. Where no step is marked, the first rank may wait for requests that it hands on:
    it is no straggler.

    Args:
        waited_ns: how long each rank waited in operations, in ns, by rank and bin of time.
        steps, stepping: as for ``stragglers_in``.
    """
    numbers = sorted(at for at in set().union(*waited_ns.values()) if at <= now_ns // BIN_NS)
    waits = [list(map(of_rank.get, numbers, repeat(0))) for of_rank in waited_ns.values()]
    early_ns = -np.minimum(np.array(waits, np.float64), _MOST_NS).astype(np.int64)
    bins = LateBins(list(waited_ns), np.array(numbers, np.int64), early_ns)
    found = _found(bins, steps, now_ns, _Rules(LEAST_NS, _WAITS, stepping))
    return [late for late in found if stepping or late.rank != min(waited_ns)]


def _found(late: LateBins, steps: Sequence[int], now_ns: int, rules: _Rules, met: Sequence[int] = ()) -> list[Late]:
    """Return the stragglers in the latest bins, by rank.

    Those of some seconds ago remain while they still cost as much, so that a verdict does not flicker with the scatter of the steps.
    """
    if len(late.ranks) < 2 or not late.late_ns.size:
        return []
    periods = _periods(late, steps, met)
    culprits, window = _judged(periods, now_ns, rules)
    if len(periods.start) and not culprits:
        window = periods.latest(WINDOWS_NS[0])
        culprits = _held(periods, _ahead(window, rules.own_counts), now_ns, rules)
    if not culprits or take_turns(_periods(late, steps, met, MOST_BINS * BIN_NS).late, culprits):
        return []
    costs = _costs(window.late, culprits, window.span_ns)
    # One that leads in most periods may cost nothing beside a rare pause of another one, for which it waits itself.
    least = COSTS * window.span_ns / 2
    parts = {at: _late_part(window, _lead(window, at, culprits)) for at, cost in costs.items() if cost >= least}
    return sorted(
        _late(late.ranks[at], at, part, _in_few_steps(part, _lead(part, at, culprits)), now_ns)
        for at, part in parts.items()
    )


def _lead(window: _Periods, at: int, culprits: Sequence[int]) -> npt.NDArray[np.float64]:
    """Return by how much a straggler is later than the median of the ranks that are none, in each period."""
    lead: npt.NDArray[np.float64] = window.late[at] - np.median(np.delete(window.late, culprits, axis=0), axis=0)
    return lead


def _in_few_steps(part: _Periods, lead: npt.NDArray[np.float64]) -> int | None:
    """Return in how many steps a straggler is late if nearly all of its lateness is in at most a quarter of the periods; else ``None``.

    A period may have several steps, of which one is late then.
    """
    is_late = lead > lead.max() / 2
    number = int(is_late.sum())
    return number if 4 * number <= len(lead) and lead[is_late].sum() >= _NEARLY_ALL * lead.sum() else None


def _late_part(window: _Periods, lead: npt.NDArray[np.float64]) -> _Periods:
    """Return the part of a window in which a straggler was late: it begins and ends with lateness above half of the window's mean rate.

    A window reaches back to before it became late, and holds it for a while after it has recovered.
    """
    above = np.cumsum(lead - lead.sum() / 2 / window.span_ns * (window.end - window.start))
    before = np.minimum.accumulate(np.append(0, above[:-1]))
    until = int(np.argmax(above - before))
    since = int(np.argmin(np.append(0, above[:until])))
    return window.part(since, until + 1)


def _late(rank: int, at: int, part: _Periods, late_steps: int | None, now_ns: int) -> Late:
    cost_ns = _costs(part.late, [at], part.span_ns)[at]
    steps, ago_ns = int(part.steps.sum()) or None, max(0, now_ns - int(part.end[-1]))
    return Late(rank, cost_ns, part.span_ns, steps, ago_ns, late_steps if steps else None)


def _costs(late: Ints, culprits: Iterable[int], span_ns: int) -> dict[int, int]:
    """Return how long the other ranks waited for each culprit, in ns: at most all of the time."""
    total: list[int] = late.sum(axis=1).tolist()
    usual = median_low(total)
    return {at: min(max(0, total[at] - usual), span_ns) for at in culprits}


def late_in_steps(
    waited_s: Mapping[int, Sequence[float]], took_s: Sequence[float], *, messages: bool
) -> dict[int, float]:
    """Return the stragglers of recorded steps by rank, with the share of the time (0 to 1) that the others waited for each.

    As in ``waiting_least``, the rank that waits least is the late one. It is late in all steps together, or in parts of them, as long as a
    window, in which it costs enough for all of the time.

    Args:
        waited_s: how long each rank waited in each step, by rank; of equal lengths.
        took_s: how long each step took.
        messages: ranks wait for messages, too, as in ``waiting_least``.
    """
    ranks, number, own_counts = sorted(waited_s), len(took_s), _WAITS if messages else 1
    if number < LEAST_PERIODS or len(ranks) < 2:
        return {}
    early_ns = -(np.array([waited_s[rank] for rank in ranks]) * 1e9).astype(np.int64)
    took_ns = (np.array(took_s) * 1e9).astype(np.int64)
    every_ns = int(took_ns.sum())

    def found(late: Ints, span_ns: int) -> dict[int, int]:
        return _costs(late, _culprits(late, COSTS * span_ns, own_counts), span_ns)

    windows = max(1, min(number // LEAST_PERIODS, every_ns // WINDOWS_NS[-1]))
    in_parts = Counter[int]()
    for part in np.array_split(np.arange(number), windows):
        in_parts.update(found(early_ns[:, part], int(took_ns[part].sum())))
    costs = in_parts | Counter(found(early_ns, every_ns))
    return {ranks[at]: cost / every_ns for at, cost in sorted(costs.items()) if cost >= COSTS * every_ns}


def _periods(bins: LateBins, steps: Sequence[int], met: Sequence[int], most_ns: int = _MOST_LOOKED_AT_NS) -> _Periods:
    """Return the bins of the latest time merged to periods: by steps, or without steps by bursts of collectives; ``met`` as for ``stragglers_in``."""
    numbers = bins.numbers
    ends, counts = _ends_of_steps(numbers, steps, met, most_ns) if steps else _ends_of_bursts(numbers.tolist())
    total = np.zeros((len(bins.ranks), len(numbers) + 1), np.int64)
    np.cumsum(np.minimum(bins.late_ns, _MOST_NS), axis=1, out=total[:, 1:])
    at = np.searchsorted(numbers, ends, side="right")
    since, until = at[:-1], np.maximum(at[1:], at[:-1])
    return _Periods((ends[:-1] + 1) * BIN_NS, (ends[1:] + 1) * BIN_NS, counts[1:], total[:, until] - total[:, since])


def _ends_of_steps(numbers: Ints, steps: Sequence[int], met: Sequence[int], most_ns: int) -> tuple[Ints, Ints]:
    """Return the bins, within the range of ``numbers``, in which steps ended, and how many did."""
    since = 0 if met else bisect_left(steps, steps[-1] - most_ns)
    ends = np.array(steps[max(0, min(len(steps) - LEAST_PERIODS - 1, since)) :], np.int64) // BIN_NS
    first = np.flatnonzero(np.append(True, ends[1:] != ends[:-1]))
    counts, ends = np.diff(np.append(first, len(ends))), ends[first]
    if met:
        counts, ends = _up_to_meetings(counts, ends, np.array(met, np.int64))
    within = (ends >= numbers[0]) & (ends <= numbers[-1])
    return ends[within], counts[within]


def _up_to_meetings(counts: Ints, ends: Ints, met: Ints) -> tuple[Ints, Ints]:
    """Return numbers and ends of steps, those without a meeting with the next that has one; as they are if a quarter of them has one."""
    with_one = np.flatnonzero(np.diff(np.searchsorted(met, ends, side="right"), prepend=0))
    if _MEETS * len(with_one) >= len(ends):
        return counts, ends
    return np.diff(np.cumsum(counts)[with_one], prepend=0), ends[with_one]


def _ends_of_bursts(numbers: Sequence[int]) -> tuple[Ints, Ints]:
    """Return the last bin of each run without a gap, with 0 steps; long runs are split."""
    most = max(1, min(_BINS_OF_PERIOD, (numbers[-1] - numbers[0]) // _PERIODS))
    ends: list[int] = []
    length = 0
    for number in numbers:
        if ends and number == ends[-1] + 1 and length < most:
            ends[-1], length = number, length + 1
        else:
            ends.append(number)
            length = 1
    return np.array(ends, np.int64), np.zeros(len(ends), np.int64)


def _judged(periods: _Periods, now_ns: int, rules: _Rules) -> tuple[list[int], _Periods]:
    """Return the stragglers, as indices, and their window; no stragglers where too little is known."""
    window = periods
    for window_ns in WINDOWS_NS:
        window = periods.latest(window_ns)
        number = len(window.start)
        if number < LEAST_PERIODS:
            return [], window
        span_ns = window.span_ns
        still_ns = now_ns - int(window.end[-1])
        if not rules.stepping and span_ns > WINDOWS_NS[-1]:
            return [], window
        if span_ns < rules.least_ns or still_ns > max(_STILL_NS, _STILL_PERIODS * span_ns // number):
            return [], window
        often = [] if rules.rare else _culprits(window.late, COSTS * span_ns, rules.own_counts)
        culprits = often or _regularly_late(window, rules)
        if culprits:
            return culprits, window
    return [], window


def _regularly_late(window: _Periods, rules: _Rules) -> list[int]:
    """Return the rank that is late in some steps only, but regularly or as the only one, as an index; none where steps are not marked."""
    steps = int(window.steps.sum())
    if not steps:
        return []
    order = np.argsort(-window.late.sum(axis=1))[: _MOST_COMPARED + 1]
    first, others = window.late[order[0]] * rules.own_counts, window.late[order[1:]]
    rare = max(_RARE_LEAST, steps // RARE_STEPS)
    limits = [] if rules.rare else [_Regular(_SOME_CUT, _SOME_LEAST, 2, 1 / _CUT)]
    limits += [_Regular(rare, rare, 1 / _CUT, RARE_STEPS)] if rare < _CUT * len(window.steps) else []
    is_late = any(_is_regularly_ahead(first, others, window, each) for each in limits) or (
        not rules.rare and rules.own_counts == 1 and _is_alone_ahead(first, others, window, rare)
    )
    return [int(order[0])] if is_late else []


class _Regular(NamedTuple):
    """How one rank is late regularly: so many leads are cut off, there are so many distances at least, of so many steps."""

    cut: int
    number: int
    least: float
    most: float


def _is_regularly_ahead(late: _Leads, others: Ints, window: _Periods, limits: _Regular) -> bool:
    if limits.cut >= len(window.start):
        return False
    leads = _leads(late, others, limits.cut)
    # Its late steps are those in which it leads all others by half of its largest leads.
    leads_all = leads.min(axis=0)
    is_late = leads_all > leads_all.max() / 2
    between = np.diff(np.cumsum(window.steps)[is_late])
    if len(between) < limits.number or not limits.least <= np.median(between) <= limits.most:
        return False
    return _are_regular(between) and _is_ahead(leads, COSTS * window.span_ns, _RARE_ERRORS, is_late)


def _is_alone_ahead(late: _Leads, others: Ints, window: _Periods, cut: int) -> bool:
    """Return whether one rank is late in some steps, at any distances, and hardly ever another one by as much; ``cut``: so many leads are cut off.

    If all ranks were late by chance, as often each, so many times in a row would rarely be those of one. What another one does regularly, such as a
    checkpoint, is not by chance.
    """
    if cut >= len(window.start):
        return False
    leads = _leads(late, others, cut)
    leads_all = leads.min(axis=0)
    is_late = leads_all > leads_all.max() / 2
    every = np.vstack([late[None], others])
    second, latest = np.sort(every, axis=0)[-2:]
    steps, who = np.cumsum(window.steps), np.where(latest - second > leads_all.max() / 2, every.argmax(axis=0), 0)
    times, by_chance = int(is_late.sum()), 0
    for other in range(1, len(every)):
        between = np.diff(steps[who == other])
        if len(between) >= _ALONE_REGULAR and np.median(between) >= RARE_STEPS and _are_regular(between):
            leads[:, who == other] = 0
        else:
            by_chance += int((who == other).sum())
    if times < _ALONE_LEAST or _ALONE_OF * by_chance > times:
        return False
    return _is_ahead(leads, COSTS * window.span_ns, _RARE_ERRORS, is_late)


def _are_regular(between: Ints) -> bool:
    """Return whether steps are at regular distances."""
    usual = np.median(between)
    off = np.abs(between - usual)
    # Where a late step does not show, one distance is that of two.
    known = np.minimum(off, np.abs(between - 2 * usual)) <= _MOST_OFF * usual
    return bool(np.mean(off <= _MOST_OFF * usual) >= _REGULAR and known.all())


def _held(periods: _Periods, ahead: Flags, now_ns: int, rules: _Rules) -> list[int]:
    """Return the stragglers of some seconds ago, as indices, if each is still ``ahead`` of all ranks that are not."""
    number = len(ahead)
    # Nearly always this check is enough: stragglers are at most half of the ranks, and each of them leads all others.
    if ahead.sum(axis=1).max() < number - number // 2:
        return []
    for ago_ns in _HELD_NS:
        until = int(np.searchsorted(periods.end, now_ns - ago_ns, side="right"))
        before, _ = _judged(periods.part(0, until), now_ns, rules)
        others = np.delete(np.arange(number), before)
        if before and ahead[before][:, others].all():
            return before
    return []


def _ahead(window: _Periods, own_counts: float) -> Flags:
    """Return whether each rank costs each other one as much as a straggler does, in this window and in its last part."""
    late, least = window.late, COSTS * window.span_ns
    most = max(1, _MOST_TOGETHER // late.size)
    ahead: list[Flags] = []
    for mine in np.array_split(late * own_counts, -(-len(late) // most)):
        leads = _leads(mine[:, None], late)
        ahead.append((leads.sum(axis=-1) >= least) & (_part(leads, _PARTS - 1) >= least / _PARTS / 2))
    return np.concatenate(ahead)


def _culprits(late: Ints, least: float, own_counts: float) -> list[int]:
    """Return the ranks above all others, as indices: those before the largest gap, at most half of the ranks."""
    total: list[int] = late.sum(axis=1).tolist()
    order = sorted(range(len(total)), key=lambda at: -total[at])
    if len(order) < 2:
        return []
    number = max(range(1, len(order) // 2 + 1), key=lambda n: total[order[n - 1]] - total[order[n]])
    culprits, others = order[:number], late[order[number : number + _MOST_COMPARED]]
    errors = _least_errors(late.shape[1])
    return culprits if all(_is_ahead(_leads(late[at] * own_counts, others), least, errors) for at in culprits) else []


def _least_errors(number: int) -> float:
    """Return the least mean lead of a straggler over a number of periods, in standard errors."""
    return _ERRORS + _ERRORS_OF_FEW / number


def _leads(late: _Leads, others: Ints, cut: int | None = None) -> _Leads:
    """Return by how much one rank was later than each of the others in each period; the ``cut`` largest are cut off."""
    leads = late - others
    number = leads.shape[-1]
    at = number - 1 - (int(_CUT * number) if cut is None else cut)
    limit = np.partition(np.abs(leads), at)[..., at, None]
    least: _Leads = np.maximum(-limit, np.minimum(limit, leads))
    return least


def _part(leads: _Leads, n: int) -> _Leads:
    """Return the sums over part ``n`` of a window."""
    number = leads.shape[-1]
    total: _Leads = leads[..., number * n // _PARTS : number * (n + 1) // _PARTS].sum(axis=-1)
    return total


def _around(leads: _Leads, is_late: Flags) -> npt.NDArray[np.float64]:
    """Return what each lead is off the mean of its kind: late or not."""
    late, not_late = (leads[:, which].mean(axis=-1)[:, None] for which in (is_late, ~is_late))
    off: npt.NDArray[np.float64] = leads - np.where(is_late, late, not_late)
    return off


def _error(off: _Leads) -> npt.NDArray[np.float64]:
    """Return the standard errors of means, by what each value is off the mean; a lead that grows steadily is no error."""
    number = off.shape[-1]
    time = np.arange(number) - (number - 1) / 2
    slope = (off * time).sum(axis=-1) / (time**2).sum()
    around = off - slope[:, None] * time
    squares = np.minimum((off**2).sum(axis=-1) / (number - 1), (around**2).sum(axis=-1) / (number - 2))
    error: npt.NDArray[np.float64] = np.sqrt(squares / number)
    return error


def _is_ahead(leads: _Leads, least: float, errors: float, is_late: Flags | None = None) -> bool:
    """Return whether one rank led each of the others by at least ``least`` in the window, and by so many standard errors.

    Args:
        is_late: the periods in which it is late, if that is regular: their difference from the others is no error.
    """
    number, total = leads.shape[-1], leads.sum(axis=-1)
    behind = -np.minimum(leads, 0).sum(axis=-1)
    if ((total < least) | (total + behind < _TIMES * behind)).any():
        return False
    mean = total / number
    off = leads - mean[:, None] if is_late is None else _around(leads, is_late)
    error = _error(off)
    lasting = sum(_part(leads, n) >= least / _PARTS / 2 for n in range(_PARTS))
    return bool(((mean >= errors * error) & (lasting >= _PARTS_WITH)).all())
