"""Unions of the intervals of many operations at a time. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from commwatch.ingest.columns import Ints, by_index


def unions(keys: Ints, starts: Ints, ends: Ints) -> Iterator[tuple[int, array[int], array[int]]]:
    """Yield for each key the disjoint pieces that its intervals ``[start, end)`` cover, in order of keys and times.

    Intervals that touch are one piece; empty ones cover nothing.

    Args:
        keys, starts, ends: [intervals]; keys are not negative.
    """
    if not (ends > starts).all():
        some = ends > starts
        keys, starts, ends = keys[some], starts[some], ends[some]
    if not len(keys):
        return
    base, most = int(starts.min()), int(keys.max()) + 1
    span = int(ends.max()) - base + 1
    if most * span >= 1 << 62:
        yield from _one_by_one(keys, starts, ends)
        return
    # With an offset for each key, one running maximum serves all keys.
    offsets = keys * span - base
    order = by_index(keys)
    shifted = (starts + offsets)[order]
    order = order[np.argsort(shifted, kind="stable")]  # nearly sorted
    begins, until = (starts + offsets)[order], np.maximum.accumulate((ends + offsets)[order])
    fresh = np.empty(len(order), np.bool_)
    fresh[0], fresh[1:] = True, begins[1:] > until[:-1]
    first = np.flatnonzero(fresh)
    piece_keys = keys[order][first]
    all_starts = begins[first] - piece_keys * span + base
    all_ends = until[np.append(first[1:], len(order)) - 1] - piece_keys * span + base
    bounds = [0, *(np.flatnonzero(piece_keys[1:] != piece_keys[:-1]) + 1).tolist(), len(first)]
    piece_starts, piece_ends = array("q", all_starts.tobytes()), array("q", all_ends.tobytes())
    for key, since, to in zip(piece_keys[bounds[:-1]].tolist(), bounds[:-1], bounds[1:], strict=True):
        yield key, piece_starts[since:to], piece_ends[since:to]


def _one_by_one(keys: Ints, starts: Ints, ends: Ints) -> Iterator[tuple[int, array[int], array[int]]]:
    """Yield each interval by itself, because of times that are too far apart."""
    order = by_index(keys)
    for key, start, end in zip(keys[order].tolist(), starts[order].tolist(), ends[order].tolist(), strict=True):
        yield key, array("q", [start]), array("q", [end])
