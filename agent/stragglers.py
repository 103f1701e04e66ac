"""Who is late most of the time: a rolling window over the joined collectives of one group. Pure.

By medians, never by standard deviations: among n ranks one cannot be further than (n-1)/sqrt(n) of them from the mean, 1.2 of
three, so "three sigma" would never fire on a node.
"""

from __future__ import annotations

import struct
from collections import deque
from statistics import median
from typing import NamedTuple

WINDOW_NS = 30_000_000_000
#: Fewer collectives than this say nothing; more than that are not kept.
LEAST, MOST = 5, 4096
#: What has been so for less than this may be chance: the start of a job, one checkpoint.
LEAST_NS = 3_000_000_000
#: A straggler is late in so much of a window's collectives, and costs the others so much of its time.
LATE_IN, COSTS = 0.6, 0.05
#: By less than this, or than the transfer itself takes, nobody is called late.
LEAST_LATE_NS = 1_000_000
#: A joined collective: its end, how late the last rank was, what the transfer took (all in ns), and which rank that was. Packed it takes a
#: third of the memory of a tuple, and a busy node keeps tens of thousands.
_JOINED = struct.Struct("<qqqi")


class Late(NamedTuple):
    """The rank that was late in a window, and what it cost."""

    rank: int
    collectives: int
    late_in: int
    #: Median over the collectives in which it was late.
    lateness_ns: int
    #: What the others (their median) waited for it, in all.
    cost_ns: int
    window_ns: int


class LateWindow:
    """The latest joined collectives of a group whose ranks are all in sight."""

    def __init__(self) -> None:
        self._joined: deque[bytes] = deque()
        #: Lateness of all of them.
        self._sum_ns = 0

    def add(self, end_ns: int, rank: int, lateness_ns: int, transfer_ns: int) -> None:
        """A collective ended: who was last, how long the others waited by its own fault, what the transfer took."""
        self._joined.append(_JOINED.pack(end_ns, lateness_ns, transfer_ns, rank))
        self._sum_ns += lateness_ns
        if len(self._joined) > MOST:
            self._drop()

    def late(self, now_ns: int, least_ns: int = LEAST_NS) -> Late | None:
        """The straggler of the window up to now, if there is one.

        Args:
            least_ns: a window that is shorter names none.
        """
        while self._joined and _end_ns(self._joined[0]) <= now_ns - WINDOW_NS:
            self._drop()
        joined = self._joined
        # Nobody can have cost more than all together: nearly always this is all that has to be looked at.
        if len(joined) < LEAST or self._sum_ns < COSTS * (_end_ns(joined[-1]) - _end_ns(joined[0])):
            return None
        window = [each for each in map(_JOINED.unpack, joined) if each[0] > now_ns - WINDOW_NS]
        by_rank: dict[int, list[int]] = {}
        for _, lateness, _, rank in window:
            by_rank.setdefault(rank, []).append(lateness)
        rank = max(by_rank, key=lambda rank: len(by_rank[rank]))
        late, ends = by_rank[rank], [end for end, *_ in window]
        span = max(ends) - min(ends)
        if len(window) < LEAST or len(late) < LATE_IN * len(window) or span < max(1, least_ns):
            return None
        usual, cost = int(median(late)), sum(late)
        if usual < max(LEAST_LATE_NS, median(transfer for _, _, transfer, _ in window)) or cost < COSTS * span:
            return None
        return Late(rank, len(window), len(late), usual, cost, span)

    def _drop(self) -> None:
        _, lateness_ns, _, _ = _JOINED.unpack(self._joined.popleft())
        self._sum_ns -= lateness_ns


def _end_ns(joined: bytes) -> int:
    return int(_JOINED.unpack(joined)[0])
