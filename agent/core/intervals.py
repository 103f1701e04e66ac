"""Union of time intervals, which counts overlapping time once. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable


class Intervals:
    """A growing union of intervals, as sorted disjoint pieces; times in ns."""

    __slots__ = ("ends", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []

    def add(self, start: int, end: int) -> int:
        """Add ``[start, end)``; return how many ns of it were not covered before."""
        if end <= start:
            return 0
        if not self.ends or start > self.ends[-1]:
            self.starts.append(start)
            self.ends.append(end)
            return end - start
        if start >= self.starts[-1]:  # the usual case: the latest piece grows
            grown = end - self.ends[-1]
            if grown <= 0:
                return 0
            self.ends[-1] = end
            return grown
        first, last = bisect_left(self.ends, start), bisect_right(self.starts, end)
        if first == last:
            self.starts.insert(first, start)
            self.ends.insert(first, end)
            return end - start
        covered = sum(self.ends[first:last]) - sum(self.starts[first:last])
        start, end = min(start, self.starts[first]), max(end, self.ends[last - 1])
        self.starts[first:last], self.ends[first:last] = [start], [end]
        return end - start - covered

    def extend(self, starts: list[int], ends: list[int]) -> None:
        """Add disjoint intervals, earliest first."""
        at = 0
        while at < len(starts) and self.ends and starts[at] <= self.ends[-1]:
            self.add(starts[at], ends[at])
            at += 1
        self.starts += starts[at:]
        self.ends += ends[at:]

    def pieces(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the covered pieces of ``[start, end)``, as (start, end)."""
        if end <= start:
            return []
        first, last = bisect_right(self.ends, start), bisect_left(self.starts, end)
        within = zip(self.starts[first:last], self.ends[first:last], strict=True)
        return [(max(s, start), min(e, end)) for s, e in within]

    def measure(self, start: int, end: int) -> int:
        """Return how many ns of ``[start, end)`` are covered."""
        return sum(e - s for s, e in self.pieces(start, end))

    def minus(self, other: Intervals) -> Intervals:
        """Return the part of this union that is not in ``other``."""
        left, at = Intervals(), 0
        for start, end in zip(self.starts, self.ends, strict=True):
            while at < len(other.ends) and other.ends[at] <= start:
                at += 1
            here, free = at, start
            while here < len(other.starts) and other.starts[here] < end:
                left.add(free, other.starts[here])
                free = other.ends[here]
                here += 1
            left.add(free, end)
        return left

    def forget(self, before: int) -> None:
        """Drop the pieces that ended by ``before``."""
        gone = bisect_right(self.ends, before)
        del self.starts[:gone], self.ends[:gone]


def covered(parts: Iterable[Intervals], start: int, end: int) -> int:
    """Return how many ns of ``[start, end)`` at least one of ``parts`` covers."""
    total, reached = 0, start
    for s, e in sorted(piece for part in parts for piece in part.pieces(start, end)):
        if e > reached:
            total += e - max(s, reached)
            reached = e
    return total
