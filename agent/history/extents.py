"""What the records of a chunk can match, so that a search decompresses no other chunk. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import compress
from operator import sub
from typing import Any, NamedTuple

from commwatch.collectors.wire.events import COUNTED, FAILED, MAX_PLAUSIBLE, RECORD_SIZE, STEP_MARK, UNTIMED

#: Codes and numbers are kept by their remainder, as bits of an integer that SQLite can store.
_BITS = 62


class Filter(NamedTuple):
    """A condition on operations. ``None``: any."""

    #: By ring: codes of ops, and numbers of groups in the ring.
    ops: Mapping[int, Collection[int]] | None = None
    groups: Mapping[int, Collection[int]] | None = None
    seq: int | None = None
    least_ns: int = 0

    def may_match(self, ring: int, ops: int | None, groups: int | None) -> bool:
        """Return whether a chunk with these bits can have a match; no bits are known of chunks before version 5."""
        return _overlap(self.ops, ring, ops) and _overlap(self.groups, ring, groups)

    def matches(self, ring: int, record: Any) -> bool:
        """Return whether a record of the ring matches."""
        return (
            (self.ops is None or record.op in self.ops.get(ring, ()))
            and (self.groups is None or record.group in self.groups.get(ring, ()))
            and (self.seq is None or record.seq == self.seq)
            and (not self.least_ns or _lasts(record.start_ns, record.end_ns, record.flags) >= self.least_ns)
        )


ANY = Filter()


class Extent(NamedTuple):
    """Bits of ops and groups, the longest duration in ns, and the range of sequence numbers of a chunk's operations."""

    ops: int
    groups: int
    longest_ns: int
    seq_from: int
    seq_until: int


class Columns:
    """Fields of whole records, each as a sequence; made by slices, because a loop over the records takes ten times as long."""

    def __init__(self, records: bytes | bytearray) -> None:
        words = memoryview(records)
        self.ops = bytes(records[4::RECORD_SIZE])
        self._low_groups = bytes(records[6::RECORD_SIZE])
        self.groups = words.cast("H")[3 :: RECORD_SIZE // 2].tolist()
        self.seqs = words.cast("I")[8 :: RECORD_SIZE // 4].tolist()
        self.ends = words.cast("Q")[6 :: RECORD_SIZE // 8].tolist()
        self._starts = words.cast("Q")[5 :: RECORD_SIZE // 8].tolist()
        self._flags = bytes(records[56::RECORD_SIZE])
        self._timings = bytes(records[57::RECORD_SIZE])

    def extent(self) -> Extent:
        """Return the extent of the operations among the records."""
        marks = _both(self.ops.translate(_IS_OP), self._timings.translate(_IS_SINGLE))
        if not any(marks):
            return Extent(0, 0, 0, 0, 0)
        timed = _both(marks, self._flags.translate(_IS_TIMED))
        longest = max(compress(map(sub, self.ends, self._starts), timed), default=-1)
        seqs = list(compress(self.seqs, marks))
        ops, groups = set(compress(self.ops, marks)), set(compress(self.groups, marks))
        longest = max(-1, min(longest, MAX_PLAUSIBLE - 1))  # times may be anything
        return Extent(_bits(ops), _bits(groups), longest, min(seqs), max(seqs))

    def spans(self) -> dict[int, tuple[int, int]]:
        """Return the range of sequence numbers by group; a step mark has no group."""
        is_op = self.ops.translate(_IS_OP)
        groups = set(compress(self.groups, is_op))
        if max(groups, default=0) > 0xFF or len(groups) > _FEW:
            return self._spans_of_many()
        found = {}
        for group in groups:
            seqs = list(compress(self.seqs, _both(is_op, self._low_groups.translate(_ONLY[group]))))
            found[group] = min(seqs), max(seqs)
        return found

    def _spans_of_many(self) -> dict[int, tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        for op, group, seq in zip(self.ops, self.groups, self.seqs, strict=True):
            if op != STEP_MARK:
                low, high = found.get(group, (seq, seq))
                found[group] = min(low, seq), max(high, seq)
        return found


#: Tables for ``bytes.translate``: 255 for the codes that count.
_IS_OP = bytes(255 if code != STEP_MARK else 0 for code in range(256))
_IS_SINGLE = bytes(255 if code != COUNTED else 0 for code in range(256))
_IS_TIMED = bytes(0 if code & (UNTIMED | FAILED) else 255 for code in range(256))
_ONLY = [bytes(255 if code == only else 0 for code in range(256)) for only in range(256)]
#: Groups that are each looked for by themselves.
_FEW = 16


def _both(one: bytes, other: bytes) -> bytes:
    return (int.from_bytes(one, "little") & int.from_bytes(other, "little")).to_bytes(len(one), "little")


def _lasts(start_ns: int, end_ns: int, flags: int) -> int:
    return -1 if flags & (UNTIMED | FAILED) else end_ns - start_ns


def _bits(codes: Collection[int]) -> int:
    bits = 0
    for code in set(codes):
        bits |= 1 << code % _BITS
    return bits


def _overlap(wanted: Mapping[int, Collection[int]] | None, ring: int, bits: int | None) -> bool:
    return wanted is None or bool(_bits(wanted.get(ring, ())) & (-1 if bits is None else bits))
