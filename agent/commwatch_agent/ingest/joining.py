"""Joins the collectives whose parts all came together; those that wait for a rank, or look odd, go to ``GroupJoin`` part by part. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from commwatch_agent.ingest.collective_join import GroupJoin
from commwatch_agent.ingest.columns import Flags, Ints, by_index, combined, counts, distinct, first_of


@dataclass
class Parts:
    """Parts of symmetric collectives, in the order in which they were read; arrays of shape [parts]."""

    #: Index of the group's join, and of the rank's totals.
    join: Ints
    ring: Ints
    rank: Ints
    row: Ints
    op: Ints
    size: Ints
    #: Number of the dtype's name, the same for all ranks.
    dtype: Ints
    seq: Ints
    launch: Ints
    end: Ints
    duration: Ints
    own: Ints
    run: Ints
    #: As ``Part.blocked_ns``.
    blocked: Ints

    def __len__(self) -> int:
        return len(self.join)


def complete(parts: Parts, joins: Sequence[GroupJoin], repeated: bool = False) -> tuple[list[Ints], Flags]:
    """Return the collectives whose parts are all here, and which parts are left.

    The ranks of such a collective agree, none of its parts has come before, and no two are of different runs of the job.

    Args:
        repeated: two rings may be of one rank.

    Returns:
        For each size of group, the places of the parts of its complete collectives: [collectives, ranks]; and which parts are in none.
    """
    left = np.ones(len(parts), np.bool_)
    lowest = np.full(len(joins), np.iinfo(np.int64).max)
    np.minimum.at(lowest, parts.join, parts.seq)
    found, which = distinct(combined(parts.join, parts.seq - lowest[parts.join]))
    order, number = by_index(which), counts(which, len(found))
    first = np.cumsum(number) - number
    heads = order[first]
    size = np.array([join.size for join in joins], np.int64)[parts.join[heads]]
    good = number == size
    for values in (parts.op, parts.size, parts.dtype):
        mine = values[order]
        good &= np.maximum.reduceat(mine, first) == np.minimum.reduceat(mine, first)
    good &= np.minimum.reduceat(parts.end[order], first) >= np.maximum.reduceat(parts.launch[order], first)
    if repeated:
        each, of_each = distinct(combined(which, parts.rank))
        good &= counts(which[first_of(of_each, len(each))], len(found)) == number
    else:  # what a ring has of a collective is in one place
        collective, ring = which[order], parts.ring[order]
        good[collective[1:][(ring[1:] == ring[:-1]) & (collective[1:] == collective[:-1])]] = False
    good &= ~_begun_before(parts, joins, heads, good)
    tables = []
    for ranks in sorted(set(size[good].tolist())):
        begins = first[good & (size == ranks)]
        table = order[begins[:, None] + np.arange(ranks)]
        left[table] = False
        tables.append(table[np.argsort(table[:, -1], kind="stable")])
    return tables, left


def _begun_before(parts: Parts, joins: Sequence[GroupJoin], heads: Ints, good: Flags) -> Flags:
    """Return which collectives, given by one part each, have parts from an earlier read; only for good ones."""
    begun = np.zeros(len(heads), np.bool_)
    for index, join in enumerate(joins):
        mine = np.flatnonzero(good & (parts.join[heads] == index)) if join.has_begun else ()
        if len(mine) and (waiting := join.numbers()):
            # numpy.isin would load numpy.ma, for the life of the agent.
            begun[mine] = [seq in waiting for seq in parts.seq[heads[mine]].tolist()]
    return begun
