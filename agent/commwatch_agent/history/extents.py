"""What the records of a chunk can match, so that a search decompresses no other chunk. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from commwatch.wire.events import FAILED, UNTIMED

#: Codes and numbers are kept by their remainder, as bits of an integer that SQLite can store.
BITS = 62


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


def _lasts(start_ns: int, end_ns: int, flags: int) -> int:
    return -1 if flags & (UNTIMED | FAILED) else end_ns - start_ns


def _bits(codes: Collection[int]) -> int:
    bits = 0
    for code in set(codes):
        bits |= 1 << code % BITS
    return bits


def _overlap(wanted: Mapping[int, Collection[int]] | None, ring: int, bits: int | None) -> bool:
    return wanted is None or bool(_bits(wanted.get(ring, ())) & (-1 if bits is None else bits))
