"""Waits and own lateness in complete collectives, many at a time. Pure.

All tables have the shape [collectives, ranks], with one column for each rank of the group in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from commwatch.wire import events as ev
from commwatch_agent.ingest.collective_join import NOT_KNOWN_NS, GroupJoin, Waits
from commwatch_agent.ingest.columns import Flags, Ints, by_index, combined, distinct, first_of, sums
from commwatch_agent.ingest.own_time import NO_RUN
from commwatch_agent.ingest.stragglers import BIN_NS

#: State of a rank without a run: run, lateness in it, and how much of that was counted.
NOTHING = NO_RUN, 0, 0
#: Longer waits (3 days) are cut off, so that the sums of a batch fit.
_MOST_NS = 1 << 48
_MOST_CARRIED_NS = ev.MAX_PLAUSIBLE >> 1


class Collectives(NamedTuple):
    """Complete collectives of groups of one size, of one group in the order in which they became complete."""

    #: [collectives]: index of the group's join, and when the last rank to start ended.
    join: Ints
    end: Ints
    #: Tables of ranks, their waits, their own time before and the run that they were in.
    rank: Ints
    wait: Ints
    own: Ints
    run: Ints
    #: [collectives]: how long the rank was blocked that was blocked longest, before the last one began.
    lost: Ints


def split(duration: Ints) -> tuple[Ints, Ints, Ints]:
    """Return how long each rank waited for the last one, which column that is, and the median of the waits of the others.

    Args:
        duration: table of the durations in ns.
    """
    late = duration.argmin(axis=1)
    wait = duration - duration[np.arange(len(duration)), late][:, None]
    others = np.sort(wait, axis=1)[:, 1:]
    number = others.shape[1]
    if not number:
        return wait, late, np.zeros(len(wait), np.int64)
    middle = (others[:, (number - 1) // 2] + others[:, number // 2]) / 2
    return wait, late, middle.astype(np.int64)


def lost(duration: Ints, blocked: Ints) -> Ints:
    """Return how long the rank was blocked that was blocked longest, before the last one began.

    Args:
        duration, blocked: tables in ns; the latter as ``Part.blocked_ns``.
    """
    lost_ns: Ints = np.maximum(0, np.minimum(blocked, duration).max(axis=1) - duration.min(axis=1))
    return lost_ns


def table(rows: Sequence[Sequence[int]]) -> Ints:
    """Return rows of equal length as a table."""
    return np.array(rows, np.int64)


def of_waits(found: Sequence[Waits], joins: Sequence[int]) -> Collectives:
    """Return collectives that were joined part by part as tables; ``joins`` has the index of the join of each."""
    rows = [
        [(part.rank, wait, part.own_ns, NO_RUN if part.run is None else part.run) for part, wait in waits.waits]
        for waits in found
    ]
    rank, wait, own, run = np.moveaxis(np.array(rows, np.int64), 2, 0)
    end, lost = np.array([(waits.late.end_ns, waits.lost_ns) for waits in found], np.int64).T
    return Collectives(np.array(joins, np.int64), end, rank, wait, own, run, lost)


def own_lateness(tables: Sequence[Collectives], joins: Sequence[GroupJoin]) -> Ints:
    """Return the own lateness (``OwnLateness``) in ns; store what the next collectives need in the joins.

    Returns:
        [parts]: of the ranks of the first collective, then of the second, table by table.
    """
    join, rank, run = (flat(tables, name) for name in ("join", "rank", "run"))
    lateness, most, known = (np.concatenate(each) for each in zip(*map(_limits, tables), strict=True))
    late: Ints = np.where(known, np.maximum(0, np.minimum(lateness, most)), lateness)
    at = np.flatnonzero(run != NO_RUN)
    if len(at):
        late[at] = _in_runs(join[at], rank[at], run[at], lateness[at], most[at], known=known[at], joins=joins)
    return late


def flat(tables: Sequence[Collectives], name: str) -> Ints:
    """Return a field of all parts, table by table; of a collective's field, the value of the collective."""
    values = [(getattr(each, name), each.rank.shape[1]) for each in tables]
    return np.concatenate([np.repeat(each, ranks) if each.ndim == 1 else each.ravel() for each, ranks in values])


def _limits(collectives: Collectives) -> tuple[Ints, Ints, Flags]:
    """Return the lateness of each rank, how much of it can be its own, and whether any rank's own time is known."""
    own, ranks = collectives.own, collectives.own.shape[1]
    lateness = np.maximum(0, collectives.lost[:, None] - collectives.wait)
    number = (own != NOT_KNOWN_NS).sum(axis=1)
    usual = np.sort(own, axis=1)[np.arange(len(own)), np.maximum(0, (number - 1) // 2)]
    most = np.where(own == NOT_KNOWN_NS, 0, own - usual[:, None])
    return lateness.ravel(), most.ravel(), np.repeat(number > 0, ranks)


def _in_runs(
    join: Ints, rank: Ints, run: Ints, lateness: Ints, most: Ints, *, known: Flags, joins: Sequence[GroupJoin]
) -> Ints:
    """Return the own lateness of ranks in operations beside the computation: of one run, each delay counts once.

    Args:
        join, rank, run, lateness, most, known: [parts].
    """
    _, which = distinct(combined(join, rank))
    order = by_index(which)
    which, run, lateness, most, known = which[order], run[order], lateness[order], most[order], known[order]
    begins = np.ones(len(order), np.bool_)
    begins[1:] = (which[1:] != which[:-1]) | (run[1:] != run[:-1])
    first, of_run = np.flatnonzero(begins), np.cumsum(begins) - 1
    # Of each rank in each group: place of its first part, and of its last one.
    heads = np.flatnonzero(np.append(True, which[1:] != which[:-1]))
    ends = np.append(heads[1:], len(order)) - 1
    runs = [joins[at].own_lateness.runs for at in join[order[heads]].tolist()]
    ranks = rank[order[heads]].tolist()
    carried = table([of_join.get(each, NOTHING) for of_join, each in zip(runs, ranks, strict=True)])
    goes_on = carried[:, 0] == run[heads]
    before, counted = np.zeros(len(first), np.int64), np.zeros(len(first), np.int64)
    before[of_run[heads]], counted[of_run[heads]] = np.where(goes_on, carried[:, 1:].T, 0)
    limited = np.minimum(lateness, _MOST_NS)
    total = np.cumsum(limited)
    total += (before + limited[first] - total[first])[of_run]
    own = np.where(known, np.maximum(0, np.minimum(total, most)), lateness)
    highest = _highest(own, counted, first, of_run)
    earlier = np.empty(len(own), np.int64)
    earlier[1:] = highest[:-1]
    earlier[first] = counted
    rows = zip(
        run[ends].tolist(), np.minimum(total[ends], _MOST_CARRIED_NS).tolist(), highest[ends].tolist(), strict=True
    )
    for of_join, each, state in zip(runs, ranks, rows, strict=True):
        of_join[each] = state
    late = np.empty(len(own), np.int64)
    late[order] = np.maximum(0, own - earlier)
    return late


def _highest(values: Ints, least: Ints, first: Ints, of_run: Ints) -> Ints:
    """Return the running maximum of the values of each run, from ``least`` on: [runs]; the runs begin at ``first``."""
    values = values.copy()
    values[first] = np.maximum(values[first], least)
    span = int(values.max()) + 1
    if span * len(first) < 1 << 62:
        offsets = of_run * span
        return np.maximum.accumulate(values + offsets) - offsets
    for since, until in zip(first.tolist(), [*first[1:].tolist(), len(values)], strict=True):
        values[since:until] = np.maximum.accumulate(values[since:until])
    return values


def add_late(tables: Sequence[Collectives], late: Ints, joins: Sequence[GroupJoin]) -> None:
    """Add the own lateness of the ranks, as ``own_lateness`` returns it, to the windows of their groups."""
    join, end = np.concatenate([each.join for each in tables]), np.concatenate([each.end for each in tables])
    bins = end // BIN_NS
    found, which = distinct(combined(join, bins - bins.min()))
    first = first_of(which, len(found))
    ranks = flat(tables, "rank")
    of_part = np.repeat(which, np.concatenate([np.full(len(each.rank), each.rank.shape[1]) for each in tables]))
    places, at = distinct(combined(of_part, ranks))
    head = first_of(at, len(places))
    by_bin: dict[int, dict[int, int]] = {}
    total = sums(at, len(places), late).tolist()
    for of_which, rank, late_ns in zip(of_part[head].tolist(), ranks[head].tolist(), total, strict=True):
        by_bin.setdefault(of_which, {})[rank] = late_ns
    for of_which in np.argsort(first).tolist():
        place = first[of_which]
        joins[join[place]].window.add(int(end[place]), by_bin[of_which])
