"""Which ranks make the others of a group wait: a rolling window over its joined collectives. Pure.

What counts is that a rank costs the others time again and again. The number of collectives that it is late in says little: of the
buckets of a step only the first after a delay waits for it. The sum says little, either: one checkpoint of a rank can cost more than
a straggler does in a minute, and among ranks with uneven work one leads by chance. So the window is cut into ten parts, and
what is compared is what each part lost to the rank.

No standard deviations over ranks: among n one cannot be further than (n-1)/sqrt(n) of them from the mean, 1.2 of three, so
"three sigma" would never fire on a node.
"""

from __future__ import annotations

import struct
from collections import Counter, deque
from collections.abc import Collection, Sequence
from math import sqrt
from statistics import median
from typing import NamedTuple

#: Nothing is said of a group whose latest collective is older.
WINDOW_NS = 30_000_000_000
#: The shortest of these times up to now is judged that has so many collectives (but for the longest), and some in so many of its
#: parts. A job that began later is judged from its first collective on, after a time that no start takes.
_SPANS_NS, _LEAST, _PARTS, _LEAST_PARTS = (10_000_000_000, 30_000_000_000, 120_000_000_000), 20, 10, 8
_LEAST_SPAN_NS = 3_000_000_000
#: Who is named was to be named so long ago as well.
_STANDING_NS = 2_000_000_000
#: More collectives than this are not kept.
MOST = 4096
#: A straggler costs the others so much of the time.
COSTS = 0.05
#: How alike the parts are: the cosine between what each lost to the straggler, less what it lost to the next rank, and as many equal parts. A rank
#: that is late from now on comes as far after seven of ten parts. And how far it leads, in what was lost.
_ALIKE, _LEAD = 0.8, 0.4
#: What lost this many times as much as is usual is left out: there is a checkpoint in it, say.
_ODD = 3
#: Two ranks may be at fault together in a group of so many.
_LEAST_SIZE_FOR_TWO = 4
#: By less than this, or than the transfer itself takes, nobody is called late.
LEAST_LATE_NS = 1_000_000
#: A joined collective: its end, how late the last rank was, what the transfer took (all in ns), and which rank that was. Packed it takes a
#: third of the memory of a tuple, and a busy node keeps tens of thousands.
_JOINED = struct.Struct("<qqqi")


class Late(NamedTuple):
    """A rank that was late in a window, and what it cost."""

    rank: int
    collectives: int
    late_in: int
    #: Half of the cost comes from delays as long as this or longer; it counts as late in those at least half as long.
    lateness_ns: int
    #: What the others (their median) waited for it, in all.
    cost_ns: int
    window_ns: int


class LateWindow:
    """The latest joined collectives of a group whose ranks are all in sight.

    Args:
        size: ranks of the group.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._joined: deque[bytes] = deque()
        #: Lateness of all of them.
        self._sum_ns = 0

    def add(self, end_ns: int, rank: int, lateness_ns: int, transfer_ns: int) -> None:
        """A collective ended: who was last, how long the others waited by its own fault, what the transfer took."""
        self._joined.append(_JOINED.pack(end_ns, lateness_ns, transfer_ns, rank))
        self._sum_ns += lateness_ns
        if len(self._joined) > MOST:
            self._drop()

    def late(self, now_ns: int) -> list[Late]:
        """The stragglers up to now, by rank."""
        while self._joined and _end_ns(self._joined[0]) <= now_ns - _SPANS_NS[-1]:
            self._drop()
        joined = self._joined
        if not joined or max(_end_ns(joined[-1]), _end_ns(joined[0])) <= now_ns - WINDOW_NS:
            return []
        # Nobody can have cost more than all together in the shortest time: nearly always this is all that has to be looked at.
        if self._sum_ns < COSTS * min(_SPANS_NS[0], abs(_end_ns(joined[-1]) - _end_ns(joined[0]))):
            return []
        window = [each for each in map(_JOINED.unpack, joined) if each[0] > now_ns - _SPANS_NS[-1]]
        found = _stragglers(window, now_ns, self._size)
        if found:
            before = {late.rank for late in _stragglers(window, now_ns - _STANDING_NS, self._size)}
            found = [late for late in found if late.rank in before]
        return found

    def _drop(self) -> None:
        _, lateness_ns, _, _ = _JOINED.unpack(self._joined.popleft())
        self._sum_ns -= lateness_ns


def _cut(window: Sequence[tuple[int, int, int, int]]) -> list[Counter[int]]:
    """What each rank has cost the others a collective, in ns, by part of the time; parts without a collective are left out."""
    ends = [end for end, *_ in window]
    first, span = min(ends, default=0), max(ends, default=0) - min(ends, default=0)
    if span < _LEAST_SPAN_NS:
        return []
    parts: dict[int, Counter[int]] = {}
    number = Counter[int]()
    for end, lateness, transfer, rank in window:
        at = min(_PARTS - 1, _PARTS * (end - first) // span)
        costs = parts.setdefault(at, Counter())
        number[at] += 1
        if _is_late(lateness, transfer):
            costs[rank] += lateness
    # Of long steps one part has two and the next three.
    return [Counter({rank: cost // number[at] for rank, cost in costs.items()}) for at, costs in parts.items()]


def _is_late(lateness_ns: int, transfer_ns: int) -> bool:
    return lateness_ns >= max(LEAST_LATE_NS, transfer_ns)


def _stragglers(window: Sequence[tuple[int, int, int, int]], now_ns: int, size: int) -> list[Late]:
    """Who is at fault, by rank, in the collectives (end, lateness, transfer, rank) up to a time."""
    for span_ns in _SPANS_NS:
        latest = [each for each in window if now_ns - span_ns < each[0] <= now_ns]
        parts = _cut(latest)
        if len(parts) >= _LEAST_PARTS and (len(latest) >= _LEAST or span_ns == _SPANS_NS[-1]):
            return [late for rank in sorted(_culprits(parts, size)) if (late := _late(latest, rank)) is not None]
    return []


def _late(window: Sequence[tuple[int, int, int, int]], rank: int) -> Late | None:
    """What a culprit has cost; ``None``: not enough."""
    ends = [end for end, *_ in window]
    span = max(ends) - min(ends)
    late = [lateness for _, lateness, transfer, who in window if who == rank and _is_late(lateness, transfer)]
    if sum(late) < COSTS * span:
        return None
    usual = _usual(late)
    return Late(rank, len(window), sum(2 * each >= usual for each in late), usual, sum(late), span)


def _culprits(parts: Sequence[Counter[int]], size: int) -> list[int]:
    """The rank, or the two, that nearly all parts lost most of their time to."""
    usual = median(costs.total() for costs in parts)
    kept = [costs for costs in parts if costs.total() <= _ODD * usual]
    if not usual or len(kept) < _LEAST_PARTS:
        return []
    cost = sum(kept, Counter[int]())
    leading = sorted(cost, key=lambda rank: -cost[rank])[:2]
    if _alike(kept, leading[:1], usual):
        return leading[:1]
    return leading if len(leading) == 2 and size >= _LEAST_SIZE_FOR_TWO and _alike(kept, leading, usual) else []


def _alike(parts: Sequence[Counter[int]], culprits: Collection[int], usual: float) -> bool:
    """Whether each of these ranks has cost nearly each part much more than any other has."""
    lead = []
    for costs in parts:
        others = max((cost for rank, cost in costs.items() if rank not in culprits), default=0)
        lead.append(max(-usual, min(usual, min(costs[rank] for rank in culprits) - others)))
    length = sqrt(len(lead) * sum(each * each for each in lead))
    much = len(culprits) * sum(lead) >= _LEAD * sum(costs.total() for costs in parts)
    return much and sum(lead) >= _ALIKE * length > 0


def _usual(late: list[int]) -> int:
    """The delay that matters: the median would be that of the buckets behind it, which end a little apart."""
    left = sum(late) / 2
    for each in sorted(late, reverse=True):
        left -= each
        if left <= 0:
            return each
    return 0


def _end_ns(joined: bytes) -> int:
    return int(_JOINED.unpack(joined)[0])
