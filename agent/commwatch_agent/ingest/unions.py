"""Unions of the intervals of many operations at a time. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from commwatch_agent.ingest.columns import Ints, by_index


class _Axis:
    """Puts each pair of key and time at one place of a line: first by key, then by time.

    Args:
        most: above all keys.
        times: all times that will be asked for.
    """

    def __init__(self, most: int, *times: Ints) -> None:
        self._base = min(int(each.min()) for each in times)
        self._span = max(int(each.max()) for each in times) - self._base + 1
        #: Where times are too far apart: all of them, in order.
        self._table: Ints | None = None
        if most * self._span >= 1 << 62:
            self._table = np.unique(np.concatenate(times))
            self._span = len(self._table)

    def places(self, keys: Ints, times: Ints) -> Ints:
        """Return the places of some times."""
        offset = times - self._base if self._table is None else np.searchsorted(self._table, times)
        return keys * self._span + offset

    def times(self, keys: Ints, places: Ints) -> Ints:
        """Return the times at some places."""
        offset = places - keys * self._span
        return offset + self._base if self._table is None else self._table[offset]


class Unions(NamedTuple):
    """The disjoint pieces that intervals cover, in order of keys and times; arrays of shape [pieces]."""

    keys: Ints
    starts: Ints
    ends: Ints

    def some(self, wanted: Ints) -> Unions:
        """Return some of the pieces."""
        return Unions(self.keys[wanted], self.starts[wanted], self.ends[wanted])

    def measure(self, keys: Ints, since: Ints, until: Ints) -> Ints:
        """Return how many ns of each ``[since, until)`` the pieces of each key cover."""
        if not (len(self.keys) and len(keys)):
            return np.zeros(len(keys), np.int64)
        axis = _Axis(int(max(self.keys[-1], keys.max())) + 1, self.starts, self.ends, since, until)
        starts = axis.places(self.keys, self.starts)
        total = np.append(0, np.cumsum(self.ends - self.starts))

        def before(times: Ints) -> Ints:
            number = np.searchsorted(starts, axis.places(keys, times))
            last = np.maximum(number, 1) - 1
            cut = (number > 0) & (self.keys[last] == keys) & (self.ends[last] > times)
            return total[number] - np.where(cut, self.ends[last] - times, 0)

        return before(until) - before(since)


def unions(keys: Ints, starts: Ints, ends: Ints) -> Unions:
    """Return for each key the disjoint pieces that its intervals ``[start, end)`` cover.

    Intervals that touch are one piece; empty ones cover nothing.

    Args:
        keys, starts, ends: [intervals]; keys are not negative.
    """
    if not (ends > starts).all():
        some = ends > starts
        keys, starts, ends = keys[some], starts[some], ends[some]
    if not len(keys):
        return Unions(keys, starts, ends)
    order = by_index(keys)
    keys, starts, ends = keys[order], starts[order], ends[order]
    axis = _Axis(int(keys[-1]) + 1, starts, ends)
    begins = axis.places(keys, starts)
    order = np.argsort(begins, kind="stable")  # nearly sorted
    # Keys come one after the other, so one running maximum serves them all.
    begins, until = begins[order], np.maximum.accumulate(axis.places(keys, ends)[order])
    fresh = np.empty(len(order), np.bool_)
    fresh[0], fresh[1:] = True, begins[1:] > until[:-1]
    first = np.flatnonzero(fresh)
    keys = keys[first]
    last = until[np.append(first[1:], len(order)) - 1]
    return Unions(keys, starts[order[first]], axis.times(keys, last))
