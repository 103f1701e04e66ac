"""The ranks of one collective side by side: who waited, and for whom (DESIGN §4).

Only for symmetric operations: their ranks finish together, so the one that took least time started last, and what it
took is the pure transfer. Clocks of different ranks are compared only to tell two lives of one job apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from statistics import median, median_low
from typing import Any, NamedTuple

from commwatch.ingest.stragglers import LateWindow

#: Collectives of one group waiting for their ranks; the oldest is given up first.
MOST_PENDING = 1024
_MOST_ODD = 4
#: In the place of a time.
NOT_KNOWN_NS = 1 << 62


class Part(NamedTuple):
    """One rank's part in a collective."""

    rank: int
    op: int
    launch_ns: int
    end_ns: int
    duration_ns: int
    #: The rank's own books; handed back untouched.
    book: Any
    size: int = 0
    dtype: str | None = None
    #: Time from the end of the symmetric operation that the rank stood in before, of whatever group, to this launch, less the waits
    #: for messages and operations with a root in between.
    own_ns: int = NOT_KNOWN_NS
    #: The same for the operations of one rank that ran while it went on; ``None``: the rank stood in it, or that is not known.
    run: int | None = None


class Waits(NamedTuple):
    """A complete collective."""

    transfer_ns: int
    #: Each part with how long it waited for the last rank.
    waits: list[tuple[Part, int]]
    #: The last rank to start, and how long the others (their median) waited for it.
    late: Part
    lateness_ns: int


class OwnLateness:
    """How late the ranks of a group come to its collectives through their own fault.

    That is at most what a rank took longer than the others (their lower median) from the operation before. A rank that came late out of
    another operation was late through no fault of its own, and ranks leave a collective on a slow link one after the other.
    Where no rank knows what it took, all of the lateness is its own; where only this one does not, none.

    Operations that run beside the computation form a run, which ends when the rank blocks in an operation or ends a step. One delay
    makes a rank late to all later operations of a run, and is counted once.
    """

    def __init__(self) -> None:
        #: By rank: its latest run of such operations, its lateness in them, and how much of that counted as its own.
        self._runs: dict[int, tuple[int, int, int]] = {}

    def of(self, joined: Waits) -> dict[int, int]:
        """Of the group's next collective, by rank, in ns."""
        known = [part.own_ns for part, _ in joined.waits if part.own_ns != NOT_KNOWN_NS]
        usual, most = median_low(known) if known else 0, max(wait for _, wait in joined.waits)
        late = {}
        for part, wait in joined.waits:
            lateness = most - wait
            run, before, counted = self._runs.get(part.rank, (None, 0, 0))
            if part.run is None or part.run != run:
                before = counted = 0
            if not known:
                own = lateness
            elif part.own_ns == NOT_KNOWN_NS:
                own = 0
            else:
                own = max(0, min(before + lateness, part.own_ns - usual))
            late[part.rank] = max(0, own - counted)
            if part.run is not None:
                self._runs[part.rank] = part.run, before + lateness, max(own, counted)
        return late


def split(parts: list[Part]) -> Waits:
    """Split the durations of all ranks of one collective into transfer and wait."""
    late = min(parts, key=lambda part: part.duration_ns)
    waits = [(part, part.duration_ns - late.duration_ns) for part in parts]
    others = [wait for part, wait in waits if part is not late]
    return Waits(late.duration_ns, waits, late, int(median(others)) if others else 0)


def waits_at_root(parts: Mapping[int, Part], root: int, to_root: bool) -> dict[int, int]:
    """How long each rank waited in an operation with a root for the side that it needs, in ns; all on one clock."""
    others = [rank for rank in parts if rank != root]
    last = max((parts[rank].launch_ns for rank in others), default=0) if to_root else parts[root].launch_ns
    waiting = [root] if to_root else others
    return {
        rank: max(0, min(part.duration_ns, last - part.launch_ns)) if rank in waiting else 0
        for rank, part in parts.items()
    }


def own_lateness_at_root(parts: Mapping[int, Part], root: int, to_root: bool) -> dict[int, int]:
    """How late each rank came to an operation with a root through its own fault, in ns; all on one clock.

    Only the root waits for the others (``to_root``), or only they wait for it. They do not end together, so launches are compared.
    """
    late = dict.fromkeys(parts, 0)
    others = [rank for rank in parts if rank != root]
    waiting, awaited = ([root], others) if to_root else (others, [root])
    known = [part.own_ns for part in parts.values()]
    if not others or NOT_KNOWN_NS in known:
        return late
    first, usual = median_low(parts[rank].launch_ns for rank in waiting), median_low(known)
    for rank in awaited:
        late[rank] = max(0, min(parts[rank].launch_ns - first, parts[rank].own_ns - usual))
    return late


class _Pending:
    """A collective some of whose ranks are here."""

    __slots__ = ("first_end", "last_launch", "op", "parts", "same_data", "same_op")

    def __init__(self, part: Part) -> None:
        self.parts = {part.rank: part}
        self.op, self.same_op, self.same_data = part.op, True, True
        self.first_end, self.last_launch = part.end_ns, part.launch_ns


class GroupJoin:
    """Collects the parts of one group's collectives by sequence number.

    Args:
        told: what must be the same on all ranks of a collective.
    """

    def __init__(
        self, size: int, told: Callable[[Part], object] = lambda part: (part.op, part.size, part.dtype)
    ) -> None:
        #: Ranks of the group.
        self.size = size
        self._told = told
        self._pending: dict[int, _Pending] = {}
        #: Collectives given up: a rank is not in sight, or was in another operation.
        self.unjoined = 0
        #: The latest ones whose ranks were in different operations, or passed different data; numbers, and their parts.
        self.odd: deque[tuple[int, list[Part]]] = deque(maxlen=_MOST_ODD)
        #: Operations with a root, some of whose ranks are here.
        self._rooted: dict[int, dict[int, Part]] = {}
        #: Who was late in those that came together.
        self.window, self.own_lateness = LateWindow(), OwnLateness()

    def restart(self) -> None:
        """Another life of the job begins: who was late in the one before does not count, and its parts join no others."""
        self.window, self.own_lateness = LateWindow(), OwnLateness()
        self._rooted.clear()

    def waiting(self) -> Iterator[tuple[int, list[Part]]]:
        """The collectives that are not complete and may never be here, the latest begun first: number and parts."""
        for seq, pending in reversed(self._pending.items()):
            if pending.same_op:
                yield seq, list(pending.parts.values())

    def add_rooted(self, seq: int, part: Part, root: int) -> dict[int, Part] | None:
        """Take one rank's part in an operation with a root; returns all parts, by rank, once they are there."""
        parts = self._rooted.setdefault(seq, {})
        if part.rank in parts or (parts and next(iter(parts.values())).op != part.op):
            parts.clear()  # of an earlier run of the same name
        parts[part.rank] = part
        if len(self._rooted) > MOST_PENDING:
            del self._rooted[next(iter(self._rooted))]
        if len(parts) < self.size or root not in parts:
            return None
        del self._rooted[seq]
        return parts

    def add(self, seq: int, part: Part) -> Waits | None:
        """Take one rank's part; returns the collective once it is complete."""
        pending = self._pending.get(seq)
        if pending is None:
            self._pending[seq] = _Pending(part)
            if len(self._pending) > MOST_PENDING:
                del self._pending[next(iter(self._pending))]
                self.unjoined += 1
            return None
        # Nobody finishes a symmetric operation before all have begun it: who did was in another run of the same name.
        if part.end_ns < pending.last_launch:
            self.unjoined += 1
            return None
        if pending.first_end < part.launch_ns or part.rank in pending.parts:
            self._pending[seq] = _Pending(part)
            self.unjoined += 1
            return None
        pending.parts[part.rank] = part
        pending.first_end = min(pending.first_end, part.end_ns)
        pending.last_launch = max(pending.last_launch, part.launch_ns)
        pending.same_op = pending.same_op and part.op == pending.op
        first = next(iter(pending.parts.values()))
        pending.same_data = pending.same_data and part.size == first.size and part.dtype == first.dtype
        if len(pending.parts) < self.size:
            return None
        del self._pending[seq]
        parts = list(pending.parts.values())
        if not (pending.same_op and pending.same_data) and len({self._told(part) for part in parts}) > 1:
            self.odd.append((seq, parts))
        if not pending.same_op:
            self.unjoined += 1
            return None
        return split(parts)
