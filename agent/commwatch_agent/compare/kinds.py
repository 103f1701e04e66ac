"""The operations of a run as arrays: their times by kind, and the waits in its collectives. Pure.

An operation here is a record of one rank. All arrays have the shape [operations].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from commwatch.wire import events as ev
from commwatch_agent.compare.bootstrap import BLOCKS, Floats, Ints, Samples, Sums
from commwatch_agent.history.operations import Names
from commwatch_agent.model.bandwidth import bus_factor
from commwatch_agent.model.records import RECORD

_POWERS = 1 << np.arange(62, dtype=np.int64)


class Kind(NamedTuple):
    """Operations that are compared with one another; ``size``: upper end of the size class in bytes, ``None``: they have no size."""

    group: str
    op: str
    size: int | None


@dataclass(frozen=True)
class KindSamples:
    """The operations of one kind."""

    count: int
    #: Ranks that had them.
    ranks: int
    #: Durations in seconds.
    durations: Samples
    #: Bus bytes, and the seconds in which they ran, overlaps counted once.
    bus: Sums
    #: How many have each exact size in bytes.
    sizes: Mapping[int, int]


class Operations:
    """Collects the records of several rings."""

    def __init__(self) -> None:
        self._parts: list[dict[str, npt.NDArray[np.int64]]] = []
        self.records = 0
        #: Unix time in ns of the first launch and the last end; 0: there are no operations.
        self.first_ns = self.last_ns = 0
        #: Whether operations were only counted, so that waits are not known.
        self.counted = False

    def add(self, ring: int, wall_offset_ns: int, records: bytes) -> None:
        """Add records of a ring."""
        found = np.frombuffer(records, RECORD)
        found = found[
            (found["op"] != ev.STEP_MARK) & (found["end"] < ev.MAX_PLAUSIBLE) & (found["start"] <= found["end"])
        ]
        self.counted |= bool((found["timing"] == ev.COUNTED).any())
        found = found[found["timing"] != ev.COUNTED]
        if not len(found):
            return
        names = ("op", "group", "size", "seq", "start", "end", "flags", "timing")
        part = {name: found[name].astype(np.int64) for name in names}
        part["ring"] = np.full(len(found), ring, np.int64)
        part["end_at"] = part["end"] + wall_offset_ns
        first = int(found["launch"].min()) + wall_offset_ns
        self.first_ns = min(self.first_ns or first, first)
        self.last_ns = max(self.last_ns, int(part["end_at"].max()))
        self.records += len(found)
        self._parts.append(part)

    def all(self) -> Within:
        """Return all operations, in one block."""
        return self.within(np.array([0, 1 << 62], np.int64), np.zeros((0, 2), np.int64))

    def within(self, edges: Ints, without: Ints) -> Within:
        """Return the operations that ended in the blocks.

        Args:
            edges: Unix times in ns of the begin of each block, and of the end of the last one.
            without: times in ns [intervals, begin and end], by begin; operations that ended in them are left out.
        """
        if not self._parts:
            return Within({}, np.zeros(0, np.int64))
        every = {name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]}
        ended = every["end_at"]
        inside = (ended >= edges[0]) & (ended < edges[-1])
        if len(without):
            latest = np.searchsorted(without[:, 0], ended, side="right") - 1
            inside &= (latest < 0) | (ended >= np.maximum.accumulate(without[:, 1])[latest])
        columns = {name: column[inside] for name, column in every.items()}
        return Within(columns, np.searchsorted(edges[1:-1], columns["end_at"], side="right").astype(np.int64))


class Within(NamedTuple):
    """The columns of the operations in the blocks, and the block of each."""

    columns: Mapping[str, Ints]
    block: Ints

    def kinds(self, names: Names) -> dict[Kind, KindSamples]:
        """Return the operations by kind."""
        found: dict[Kind, list[tuple[Ints, float | None]]] = {}
        for rows, ring, group, op, size_log2 in self._alike():
            kind = _kind(names, ring, group, op, size_log2)
            found.setdefault(kind, []).append((rows, bus_factor(kind.op, names.group(ring, group).size)))
        return {kind: self._samples(parts) for kind, parts in found.items()}

    def counts(self, names: Names) -> Counter[Kind]:
        """Return how many operations there are of each kind."""
        found: Counter[Kind] = Counter()
        for rows, ring, group, op, size_log2 in self._alike():
            found[_kind(names, ring, group, op, size_log2)] += len(rows)
        return found

    def _alike(self) -> Iterator[tuple[Ints, int, int, int, int]]:
        """Yield the indexes of the operations of one ring, group, op and size class, by start; and these four."""
        if not len(self.block):
            return
        of = self.columns
        size_log2 = np.where(of["flags"] & ev.NO_SIZE | (of["size"] <= 0), -1, np.searchsorted(_POWERS, of["size"]))
        keys = (size_log2, of["op"], of["group"], of["ring"])
        order = np.lexsort((of["start"], *keys))
        cuts = np.flatnonzero(np.any([np.diff(key[order]) for key in keys], axis=0)) + 1
        for rows in np.split(order, cuts):
            first = rows[0]
            ring, group, op, class_of = (int(key[first]) for key in reversed(keys))
            yield rows, ring, group, op, class_of

    def _samples(self, parts: list[tuple[Ints, float | None]]) -> KindSamples:
        of = self.columns
        every = np.concatenate([rows for rows, _ in parts])
        above, below = np.zeros(BLOCKS), np.zeros(BLOCKS)
        timed_of_all = []
        for rows, factor in parts:
            timed = rows[(of["flags"][rows] & (ev.UNTIMED | ev.FAILED)) == 0]
            timed_of_all.append(timed)
            if factor is not None and len(timed):
                blocks = self.block[timed]
                above += np.bincount(blocks, of["size"][timed] * factor, BLOCKS)
                below += np.bincount(blocks, _alone(of["start"][timed], of["end"][timed]) / 1e9, BLOCKS)
        timed = np.concatenate(timed_of_all)
        # An operation whose begin and end are at one moment took less than the clock can tell.
        seconds = np.maximum(of["end"][timed] - of["start"][timed], 1) / 1e9
        sizes = np.unique(of["size"][every], return_counts=True)
        return KindSamples(
            len(every),
            len(np.unique(of["ring"][every])),
            Samples(seconds, self.block[timed]),
            Sums(above, below),
            dict(zip(*(each.tolist() for each in sizes), strict=True)),
        )

    def waits(self, names: Names) -> Floats | None:
        """Return the seconds that all ranks together waited for late ranks, by block; ``None``: not known.

        They are known if nine in ten of the symmetric operations have times, and all ranks of their groups are in sight.
        """
        of = self.columns
        if not len(self.block):
            return None
        pairs, index = np.unique(of["ring"] << 16 | of["group"], return_inverse=True)
        infos = [names.group(int(pair) >> 16, int(pair) & 0xFFFF) for pair in pairs]
        numbers = {info.group_id: number for number, info in enumerate(infos)}
        number, size, aligned = (
            np.array(values, np.int64)[index]
            for values in zip(*((numbers[info.group_id], info.size, info.aligned) for info in infos), strict=True)
        )
        symmetric = (
            np.isin(of["op"], [ev.OP_CODE[op] for op in ev.SYMMETRIC]) & (size > 1) & (of["flags"] & ev.BESIDE == 0)
        )
        seen_late = (of["timing"] == ev.BY_WAIT) & (of["flags"] & ev.ASYNC > 0)
        unmeasured = of["flags"] & (ev.UNTIMED | ev.FAILED | ev.UNALIGNED) > 0
        rows = np.flatnonzero(symmetric & (aligned > 0) & ~unmeasured & ~seen_late)
        key = number[rows] << 32 | of["seq"][rows]
        order = np.argsort(key, kind="stable")
        rows, key = rows[order], key[order]
        first = np.flatnonzero(np.diff(key, prepend=-1))
        parts = np.diff(np.append(first, len(key)))
        complete = np.repeat(parts == size[rows[first]], parts)
        if 10 * complete.sum() < 9 * symmetric.sum() or not complete.any():
            return None
        lasts = of["end"][rows] - of["start"][rows]
        waits = np.where(complete, lasts - np.repeat(np.minimum.reduceat(lasts, first), parts), 0)
        return np.asarray(np.bincount(self.block[rows], waits / 1e9, BLOCKS), float)


def _kind(names: Names, ring: int, group: int, op: int, size_log2: int) -> Kind:
    return Kind(names.group(ring, group).label, names.op(ring, op), None if size_log2 < 0 else 1 << size_log2)


def _alone(starts: Ints, ends: Ints) -> Ints:
    """Return how much each operation adds to the time in which some of them ran; they are sorted by start."""
    until = np.maximum.accumulate(ends)
    begin = np.maximum(starts, np.append(starts[:1], until[:-1]))
    return np.asarray(np.maximum(ends - begin, 0), np.int64)
