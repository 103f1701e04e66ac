"""Ranges of the fields in runs of raw records. Pure. Import it only where there are records, because it brings in numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from commwatch.wire.events import COUNTED, FAILED, MAX_PLAUSIBLE, RECORD_SIZE, STEP_MARK, UNTIMED
from commwatch.wire.numbers import HALF, hull
from commwatch_agent.history.extents import BITS, Extent
from commwatch_agent.model.records import RECORD

_Numbers = npt.NDArray[np.uint32]
_BIT = 1 << np.arange(BITS, dtype=np.int64)


class Span(NamedTuple):
    """The operations of one group in a run: its number, the range of sequence numbers (as in ``numbers.hull``), bits of ops, longest duration in ns."""

    group: int
    seq_from: int
    seq_until: int
    ops: int
    longest_ns: int


class Ranges(NamedTuple):
    """Ranges in one run; step marks, and operations that were only counted, are in no span."""

    #: First and last plausible end of a record, on the clock of the history; 0 on the trainer's clock if none is plausible.
    from_ns: int
    until_ns: int
    spans: list[Span]

    def extent(self) -> Extent:
        """Return the extent of the operations."""
        ops = groups = 0
        for span in self.spans:
            ops, groups = ops | span.ops, groups | 1 << span.group % BITS
        return Extent(
            ops,
            groups,
            max((span.longest_ns for span in self.spans), default=0),
            *(hull((span.seq_from, span.seq_until) for span in self.spans) if self.spans else (0, 0)),
        )


def ranges(runs: Sequence[tuple[bytes | bytearray, int]]) -> list[Ranges]:
    """Return the ranges in some runs of whole records, none of them empty, each with the offset of its clock in ns."""
    raw = np.frombuffer(b"".join(records for records, _ in runs), RECORD)
    lengths = [len(records) // RECORD_SIZE for records, _ in runs]
    of, first = np.repeat(np.arange(len(runs)), lengths), np.cumsum([0, *lengths[:-1]])
    limits = np.array([max(0, MAX_PLAUSIBLE - offset) for _, offset in runs], np.uint64)
    ends = raw["end"]
    plausible = ends < limits[of]
    highest = np.maximum.reduceat(np.where(plausible, ends, 0), first).tolist()
    lowest = np.minimum.reduceat(np.where(plausible, ends, MAX_PLAUSIBLE), first).tolist()
    spans: list[list[Span]] = [[] for _ in runs]
    for run, span in _spans(raw, of):
        spans[run].append(span)
    return [
        Ranges(min(low, high) + offset, high + offset, each)
        for low, high, (_, offset), each in zip(lowest, highest, runs, spans, strict=True)
    ]


def _spans(raw: npt.NDArray[Any], run: npt.NDArray[np.int64]) -> Iterator[tuple[int, Span]]:
    """Yield run and span of each group in each run."""
    at = np.flatnonzero((raw["op"] != STEP_MARK) & (raw["timing"] != COUNTED))
    if not len(at):
        return
    group = raw["group"][at].astype(np.int64)
    place = run[at] * (int(group.max()) + 1) + group
    # numpy sorts 16 bits by radix.
    order = np.argsort(place.astype(np.uint16) if int(place.max()) < 1 << 16 else place, kind="stable")
    at, place = at[order], place[order]
    first = np.flatnonzero(np.append(True, place[1:] != place[:-1]))
    seq, start, end = raw["seq"][at], raw["start"][at], raw["end"][at]
    timed = (raw["flags"][at] & (UNTIMED | FAILED) == 0) & (end >= start)  # times may be anything
    lasts = np.where(timed, np.minimum(end - start, MAX_PLAUSIBLE - 1).astype(np.int64), -1)
    low, high = _around(seq, first)
    columns = (
        group[order][first], low, high,
        np.bitwise_or.reduceat(_BIT[raw["op"][at] % BITS], first), np.maximum.reduceat(lasts, first),
    )  # fmt: skip
    runs = run[at][first].tolist()
    yield from zip(runs, map(Span._make, zip(*(each.tolist() for each in columns), strict=True)), strict=True)


def _around(seq: _Numbers, first: npt.NDArray[np.int64]) -> tuple[_Numbers, _Numbers]:
    """Return first and last number of each stretch of numbers; ``first`` are the places of their begins."""
    low, high = np.minimum.reduceat(seq, first), np.maximum.reduceat(seq, first)
    if (high - low < HALF).all():
        return low, high
    # Some go on at 0: they are counted from one that is half of all numbers before the first one. It wraps as they do.
    since = seq[first] - np.uint32(HALF)
    turned = seq - np.repeat(since, np.diff(np.append(first, len(seq))))
    return np.minimum.reduceat(turned, first) + since, np.maximum.reduceat(turned, first) + since
