"""Union of time intervals, which counts overlapping time once. Pure."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from operator import sub


class Intervals:
    """A growing union of intervals, as sorted disjoint pieces; times in ns, of 64 bits.

    Arrays, because a rank has thousands of pieces, and Python's integers take five times the memory.
    """

    __slots__ = ("ends", "starts")

    def __init__(self) -> None:
        self.starts, self.ends = array("q"), array("q")

    def add(self, start: int, end: int) -> int:
        """Add ``[start, end)``; return how many ns of it were not covered before."""
        if end <= start:
            return 0
        ends = self.ends
        latest = ends[-1] if ends else None
        if latest is None or start > latest:
            self.starts.append(start)
            ends.append(end)
            return end - start
        if start >= self.starts[-1]:  # the usual case: the latest piece grows
            if end <= latest:
                return 0
            ends[-1] = end
            return end - latest
        first, last = bisect_left(self.ends, start), bisect_right(self.starts, end)
        if first == last:
            self.starts.insert(first, start)
            self.ends.insert(first, end)
            return end - start
        covered = sum(self.ends[first:last]) - sum(self.starts[first:last])
        start, end = min(start, self.starts[first]), max(end, self.ends[last - 1])
        self.starts[first:last], self.ends[first:last] = array("q", [start]), array("q", [end])
        return end - start - covered

    def extend(self, starts: array[int], ends: array[int]) -> None:
        """Add disjoint intervals, earliest first."""
        at = 0
        while at < len(starts) and self.ends and starts[at] <= self.ends[-1]:
            self.add(starts[at], ends[at])
            at += 1
        self.starts += starts[at:]
        self.ends += ends[at:]

    def within(self, start: int, end: int) -> tuple[list[int], list[int]]:
        """Return starts and ends of the covered pieces of ``[start, end)``, in order."""
        first, last = bisect_right(self.ends, start), bisect_left(self.starts, end)
        if end <= start or last <= first:
            return [], []
        starts, ends = self.starts[first:last].tolist(), self.ends[first:last].tolist()
        starts[0], ends[-1] = max(starts[0], start), min(ends[-1], end)
        return starts, ends

    def measure(self, start: int, end: int) -> int:
        """Return how many ns of ``[start, end)`` are covered."""
        starts, ends = self.within(start, end)
        return sum(ends) - sum(starts)

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

    def halve(self) -> None:
        """Drop the older half of the pieces."""
        gone = -(-len(self.starts) // 2)
        del self.starts[:gone], self.ends[:gone]

    def forget(self, before: int) -> None:
        """Drop the pieces that ended by ``before``."""
        gone = bisect_right(self.ends, before)
        del self.starts[:gone], self.ends[:gone]


def covered(parts: Iterable[Intervals], start: int, end: int) -> int:
    """Return how many ns of ``[start, end)`` at least one of ``parts`` covers."""
    return length([part.within(start, end) for part in parts])


def length(unions: Iterable[tuple[list[int], list[int]]]) -> int:
    """Return how many ns at least one of some unions covers, each given as starts and ends of its pieces."""
    starts, ends = [], []
    for begins, until in unions:
        starts += begins
        ends += until
    if not starts:
        return 0
    starts.sort()
    ends.sort()
    # Before the start of piece n nothing is covered since the n-th end, if that is earlier: then all n pieces before have ended.
    gaps: list[int] = list(map(sub, starts[1:], ends))
    return ends[-1] - starts[0] - (sum(map(abs, gaps)) + sum(gaps)) // 2  # the positive ones
