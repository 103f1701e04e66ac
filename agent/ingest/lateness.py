"""Waits and own lateness in complete collectives, many at a time. Pure.

All tables have the shape [collectives, ranks], with one column for each rank of the group in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from commwatch.collectors.wire import events as ev
from commwatch.ingest.collective_join import NOT_KNOWN_NS, GroupJoin, Waits
from commwatch.ingest.columns import Flags, Ints, by_index, combined, distinct, first_of, sums
from commwatch.ingest.own_time import NO_RUN
from commwatch.ingest.stragglers import BIN_NS

#: State of a rank without a run: run, lateness in it, and how much of that was counted.
NOTHING = NO_RUN, 0, 0
#: Longer waits (3 days) are cut off, so that the sums of a batch fit.
_MOST_NS = 1 << 48


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
    return Collectives(
        np.array(joins, np.int64), np.array([waits.late.end_ns for waits in found], np.int64), rank, wait, own, run
    )


def own_lateness(collectives: Collectives, joins: Sequence[GroupJoin]) -> Ints:
    """Return the own lateness of each rank (``OwnLateness``) in ns; store what the next collectives need in the joins."""
    own, run = collectives.own, collectives.run
    lateness = collectives.wait.max(axis=1)[:, None] - collectives.wait
    number = (own != NOT_KNOWN_NS).sum(axis=1)
    usual = np.sort(own, axis=1)[np.arange(len(own)), np.maximum(0, (number - 1) // 2)]
    #: At most this is a rank's own fault: all of it where no own time is known, nothing where only this rank's is not.
    most = np.where(own == NOT_KNOWN_NS, 0, own - usual[:, None])
    most[number == 0] = NOT_KNOWN_NS
    late: Ints = np.maximum(0, np.minimum(lateness, most))
    in_run = np.flatnonzero((run != NO_RUN).ravel())
    if len(in_run):
        joined = np.repeat(collectives.join, own.shape[1])[in_run]
        flat = [table.ravel()[in_run] for table in (collectives.rank, run, lateness, most)]
        late.ravel()[in_run] = _in_runs(joined, *flat, known=np.repeat(number > 0, own.shape[1])[in_run], joins=joins)
    return late


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
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(order)) - 1
    of_run = np.cumsum(begins) - 1
    runs = [joins[at].own_lateness.runs for at in join[order[first]].tolist()]
    ranks, numbers = rank[order[first]].tolist(), run[first].tolist()
    fresh = which[first] != np.append(-1, which[first][:-1])
    carried = [of_join.get(each, NOTHING) for of_join, each in zip(runs, ranks, strict=True)]
    goes_on = fresh & np.array([each[0] == number for each, number in zip(carried, numbers, strict=True)])
    before = np.where(goes_on, np.array([each[1] for each in carried], np.int64), 0)
    counted = np.where(goes_on, np.array([each[2] for each in carried], np.int64), 0)
    total = np.cumsum(np.minimum(lateness, _MOST_NS))
    total += (before + np.minimum(lateness, _MOST_NS)[first] - total[first])[of_run]
    own = np.where(known, np.maximum(0, np.minimum(total, most)), lateness)
    highest = _highest(own, counted, first, of_run)
    earlier = np.empty(len(own), np.int64)
    earlier[1:] = highest[:-1]
    earlier[first] = counted
    for of_join, each, number, total_ns, most_ns in zip(
        runs, ranks, numbers, total[last].tolist(), highest[last].tolist(), strict=True
    ):
        of_join[each] = number, min(total_ns, ev.MAX_PLAUSIBLE >> 1), most_ns
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


def add_late(collectives: Collectives, late: Ints, joins: Sequence[GroupJoin]) -> None:
    """Add the own lateness of the ranks to the windows of their groups."""
    bins = collectives.end // BIN_NS
    found, which = distinct(combined(collectives.join, bins - bins.min()))
    first = first_of(which, len(found))
    ranks = late.shape[1]
    places, at = distinct(combined(np.repeat(which, ranks), collectives.rank.ravel()))
    head = first_of(at, len(places))
    whose, of_bin = collectives.rank.ravel()[head].tolist(), which[head // ranks].tolist()
    by_bin: dict[int, dict[int, int]] = {}
    for of_which, rank, total in zip(of_bin, whose, sums(at, len(places), late.ravel()).tolist(), strict=True):
        by_bin.setdefault(of_which, {})[rank] = total
    for of_which in np.argsort(first).tolist():
        place = first[of_which]
        joins[collectives.join[place]].window.add(int(collectives.end[place]), by_bin[of_which])
