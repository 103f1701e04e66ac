"""Records of several rings as columns: one array per field. Pure.

All arrays of a ``Columns`` have the shape [records], in the order of the rings and within a ring in the order in which it was written.
Every field is an ``int64``: values that do not fit make a record implausible, and those are left out. An array is made when it is first used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from commwatch.wire import events as ev
from commwatch_agent.model.cells import MOST_APART, OTHER_ID
from commwatch_agent.model.records import RECORD

Ints = npt.NDArray[np.int64]
#: Small numbers that are kept for a while.
Codes = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]

#: Powers of two, after a zero: the place of a size in it is its class plus 1 (``events.size_log2``).
_CLASSES = np.array([0, *(1 << n for n in range(63))], np.int64)
#: Floats hold all integers up to this.
_MOST_EXACT = 1 << 53
#: Most codes of a table that is indexed by code.
_MOST_DENSE = 1 << 18


class Columns:
    """The plausible records of some batches; ``waited`` is in µs."""

    #: Index of each record's batch, and its index among those that were read.
    ring: Ints
    place: Ints
    op: Ints
    dtype: Ints
    group: Ints
    peer: Ints
    size: Ints
    launch: Ints
    seq: Ints
    waited: Ints
    start: Ints
    end: Ints
    flags: Ints
    timing: Ints
    aux: Ints
    tag: Ints

    def __init__(self, ring: Ints) -> None:
        self.ring = ring

    def __len__(self) -> int:
        return len(self.ring)

    def of(self, wanted: Ints) -> Columns:
        """Return the records at some places."""
        return _Some(self, wanted)

    @property
    def cell_group(self) -> Ints:
        """The group that each record's cell belongs to."""
        shared = (self.group >= MOST_APART) & (self.group < ev.NO_GROUP)
        return np.where(shared, OTHER_ID, self.group) if shared.any() else self.group


class _Read(Columns):
    """Records with the fields ``RECORD``."""

    def __init__(self, ring: Ints, place: Ints, raw: npt.NDArray[np.void]) -> None:
        super().__init__(ring)
        self.place, self._raw = place, raw

    def __getattr__(self, name: str) -> Ints:
        values: Ints = self._raw[name].astype(np.int64)
        self.__dict__[name] = values
        return values


class _Some(Columns):
    """Some records of others."""

    def __init__(self, source: Columns, wanted: Ints) -> None:
        super().__init__(source.ring.take(wanted))
        self._source, self._wanted = source, wanted

    def __getattr__(self, name: str) -> Ints:
        values: Ints = getattr(self._source, name).take(self._wanted)
        self.__dict__[name] = values
        return values


def read(batches: Sequence[bytes]) -> tuple[Columns, bytes, list[int]]:
    """Return the plausible records, the bytes of all records, and how many of each batch are not plausible."""
    data = b"".join(batches)
    raw = np.frombuffer(data, RECORD)
    lengths = [len(records) // ev.RECORD_SIZE for records in batches]
    ring = np.repeat(np.arange(len(batches)), lengths)
    start, end, limit = raw["start"], raw["end"], np.uint64(ev.MAX_PLAUSIBLE)
    sound = (raw["launch"] <= end) & (end < limit) & (start <= end) & (raw["size"] < limit)
    place = np.arange(len(raw))
    if sound.all():
        wrong = [0] * len(batches)
    else:
        wrong = counts(ring[~sound], len(batches)).tolist()
        raw, ring, place = raw[sound], ring[sound], place[sound]
    return _Read(ring, place, raw), data, wrong


def classes(sizes: Ints) -> Ints:
    """Return the size class of each operation plus 1: 0 without a size."""
    if int(sizes.max(initial=0)) > _MOST_EXACT:
        return np.searchsorted(_CLASSES, sizes).astype(np.int64)
    exponents = ((sizes - 1).astype(np.float64).view(np.int64) >> 52) - 1021  # the size minus 1 has one bit less
    return np.where(sizes > 1, exponents, sizes)


def counts(indices: Ints, number: int) -> Ints:
    """Return how often each index below ``number`` occurs; faster than ``numpy.bincount``."""
    found = np.zeros(number, np.int64)
    np.add.at(found, indices, 1)
    return found


def distinct(codes: Ints) -> tuple[Ints, Ints]:
    """Return the different codes in order, and the index of each code among them; codes are not negative."""
    most = int(codes.max(initial=0)) + 1
    if most > _MOST_DENSE:
        found, indices = np.unique(codes, return_inverse=True)
        return found, indices
    present = np.zeros(most, np.bool_)
    present[codes] = True
    found = np.flatnonzero(present)
    index = np.empty(most, np.int64)
    index[found] = np.arange(len(found))
    return found, index[codes]


def combined(*parts: Ints) -> Ints:
    """Return one code for each combination of values; values are not negative. As small as the values allow, for ``distinct``."""
    code, most = parts[0], int(parts[0].max(initial=0)) + 1
    for part in parts[1:]:
        width = int(part.max(initial=0)) + 1
        if most * width >= 1 << 62:
            _, code = distinct(code)
            most = int(code.max(initial=0)) + 1
        code, most = code * width + part, most * width
    return code


def first_of(indices: Ints, number: int) -> Ints:
    """Return the first place of each index below ``number``; all of them occur."""
    first = np.empty(number, np.int64)
    first[indices[::-1]] = np.arange(len(indices) - 1, -1, -1)
    return first


def last_of(indices: Ints, number: int) -> Ints:
    """Return the last place of each index below ``number``; -1 where it does not occur."""
    last = np.full(number, -1, np.int64)
    last[indices] = np.arange(len(indices))
    return last


def by_index(indices: Ints) -> Ints:
    """Return the places in the order of their indices, those of one index in their own order."""
    small = indices.astype(np.uint16) if indices.max(initial=0) < 1 << 16 else indices  # numpy sorts 16 bits by radix
    return np.argsort(small, kind="stable")


def sums(indices: Ints, number: int, values: Ints) -> Ints | npt.NDArray[np.object_]:
    """Return the sum of the values of each index below ``number``; as Python's integers where 64 bits may not do."""
    if not len(values) or int(values.max()) < (1 << 62) // len(values):
        total = np.zeros(number, np.int64)
        np.add.at(total, indices, values)
        return total
    exact = np.zeros(number, np.object_)
    np.add.at(exact, indices, values.astype(np.object_))
    return exact
