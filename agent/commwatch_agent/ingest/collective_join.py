"""Joins what the ranks recorded of one collective: waits, lateness, and ranks in different operations. Pure.

The ranks of a symmetric operation (all_reduce, all_gather, ...) finish together (docs/numbers.md). So the rank with the
shortest duration began last, and its duration is the pure transfer. Clocks of ranks are compared only for operations with a
root, and to separate two runs of one job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from statistics import median, median_low
from typing import Any, NamedTuple, Protocol

from commwatch_agent.ingest.stragglers import LateWindow
from commwatch_agent.ingest.tables.weights import JOIN, PART, RUN

#: Most incomplete collectives of one group; beyond it the oldest is dropped.
MOST_PENDING = 1024
#: Parts of each rank that are kept at least: more, because ranks are not read at the same moment.
_LEAST_KEPT = MOST_PENDING + 256
_MOST_ODD = 4
#: Placeholder for an unknown time.
NOT_KNOWN_NS = 1 << 62
#: Number of a root's operations by which its usual lateness is known, and how many of them do not exceed it. Most places.
_USUAL_OF, _USUAL, _MOST_PLACES = 32, 28, 256


class Part(NamedTuple):
    """One rank's part in a collective."""

    rank: int
    op: int
    launch_ns: int
    end_ns: int
    duration_ns: int
    #: The rank's own totals; returned unchanged.
    totals: Any
    size: int = 0
    dtype: str | None = None
    #: The rank's own time: from the end of the previous symmetric operation that blocked it, of any group, to this launch, without
    #: the waits for messages and operations with a root in between.
    own_ns: int = NOT_KNOWN_NS
    #: Run of the operation (``OwnLateness``) if it ran beside the computation; ``None``: it blocked the rank, or not known.
    run: int | None = None
    #: Global rank of the root; ``None``: its collective has none.
    root: int | None = None
    #: How long a thread of the rank was blocked in it, up to its end; ``NOT_KNOWN_NS``: perhaps for all of its duration.
    blocked_ns: int = NOT_KNOWN_NS


class KeptParts(Sized, Iterable[tuple[int, Part]], Protocol):
    """Parts that are not added yet, each with the number of its collective (``part_table.PartTable``)."""

    def numbers(self) -> set[int]:
        """Return the numbers of the collectives whose ranks end together."""


class Waits(NamedTuple):
    """A complete collective, split into transfer and waits."""

    transfer_ns: int
    #: Each part with how long it waited for the last rank.
    waits: list[tuple[Part, int]]
    #: The last rank to start, and how long the others (their median) waited for it.
    late: Part
    lateness_ns: int
    #: How long the rank was blocked that was blocked longest, before the last rank began.
    lost_ns: int


class OwnLateness:
    """State of the own lateness of a group's ranks (``lateness``): how late they come to its collectives through their own fault.

    It is a time for which another rank was blocked: one that computes beside an asynchronous operation has lost nothing by who begins it later.

    It is at most what a rank's own time (``Part.own_ns``) exceeds the lower median of all ranks. A rank that left its previous
    operation late is not at fault; on a slow link ranks leave a collective one after the other. If no rank's own time is known,
    all of the lateness counts; if only this rank's is not, none does.

    Operations that run beside the computation form a run, which ends when the rank blocks in an operation or ends a step. One delay
    makes a rank late to all later operations of a run, and is counted once. So it is in operations with a root: several can wait for
    a rank at the same time, and only the time that no other one counted is added.
    """

    def __init__(self) -> None:
        #: By rank: its latest run, its lateness in it, and how much of that was counted as its own.
        self.runs: dict[int, tuple[int, int, int]] = {}
        #: By rank: until when its lateness to operations with a root is counted, in ns.
        self._counted_until_ns: dict[int, int] = {}

    def once(self, parts: Mapping[int, Part], late: Mapping[int, int]) -> dict[int, int]:
        """Return, and note as counted, what no other operation with a root counted of the lateness of ranks in this one."""
        added = {}
        for rank, late_ns in late.items():
            launch, until = parts[rank].launch_ns, self._counted_until_ns.get(rank, 0)
            added[rank] = max(0, min(late_ns, launch - until))
            if late_ns:
                self._counted_until_ns[rank] = max(until, launch)
        return added


def split(parts: list[Part]) -> Waits:
    """Split the durations of all ranks of one collective into transfer and wait."""
    late = min(parts, key=lambda part: part.duration_ns)
    waits = [(part, part.duration_ns - late.duration_ns) for part in parts]
    others = [wait for part, wait in waits if part is not late]
    blocked_ns = max(min(part.blocked_ns, part.duration_ns) for part in parts)
    lost_ns = max(0, blocked_ns - late.duration_ns)
    return Waits(late.duration_ns, waits, late, int(median(others)) if others else 0, lost_ns)


def waits_at_root(parts: Mapping[int, Part], root: int, to_root: bool) -> dict[int, int]:
    """Return by rank how long it waited, in ns, in an operation with a root; all times must be on one clock."""
    others = [rank for rank in parts if rank != root]
    last = max((parts[rank].launch_ns for rank in others), default=0) if to_root else parts[root].launch_ns
    waiting = [root] if to_root else others
    return {
        rank: max(0, min(part.duration_ns, last - part.launch_ns)) if rank in waiting else 0
        for rank, part in parts.items()
    }


def own_lateness_at_root(parts: Mapping[int, Part], root: int, to_root: bool) -> dict[int, int]:
    """Return the own lateness in ns by rank in an operation with a root; all times must be on one clock.

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


class UsualLateness:
    """How late the roots of a group's operations usually are, by place: root, operation and size.

    A root may wait for requests, or read the data of all ranks. It is late only by more than in its best 32 operations.
    """

    def __init__(self) -> None:
        self._latest_ns: dict[tuple[int, int, int], list[int]] = {}
        self._usual_ns: dict[tuple[int, int, int], int] = {}

    def beyond(self, part: Part, late_ns: int) -> int:
        """Add how late a root came with its part; return how much of that, in ns, is more than usual: none while that is not known."""
        place = part.rank, part.op, part.size.bit_length()
        if place not in self._latest_ns and len(self._latest_ns) >= _MOST_PLACES:
            return 0
        latest = self._latest_ns.setdefault(place, [])
        latest.append(late_ns)
        if len(latest) == _USUAL_OF:
            self._usual_ns[place] = min(self._usual_ns.get(place, NOT_KNOWN_NS), sorted(latest)[_USUAL - 1])
            latest.clear()
        return max(0, late_ns - self._usual_ns.get(place, late_ns))


class _Pending:
    """An incomplete collective."""

    __slots__ = ("first_end", "last_launch", "op", "parts", "same_data", "same_op")

    def __init__(self, part: Part) -> None:
        self.parts = {part.rank: part}
        self.op, self.same_op, self.same_data = part.op, True, True
        self.first_end, self.last_launch = part.end_ns, part.launch_ns


class GroupJoin:
    """Collects the parts of one group's collectives by sequence number.

    Args:
        compared: returns what must be equal on all ranks of a collective.
    """

    def __init__(
        self, size: int, compared: Callable[[Part], object] = lambda part: (part.op, part.size, part.dtype)
    ) -> None:
        #: Ranks of the group.
        self.size = size
        self._compared = compared
        self._pending: dict[int, _Pending] = {}
        self._unjoined = 0
        #: The latest collectives whose ranks were in different operations, or passed different data: number and parts.
        self.odd: deque[tuple[int, list[Part]]] = deque(maxlen=_MOST_ODD)
        #: Incomplete operations with a root.
        self._rooted: dict[int, dict[int, Part]] = {}
        #: Own lateness in the complete collectives.
        self.window, self.own_lateness, self.usual_lateness = LateWindow(), OwnLateness(), UsualLateness()
        #: The ranks of the group on this node.
        self.ranks: set[int] = set()
        #: Parts that are not added yet, because no collective can be complete; and their number.
        self._kept: deque[KeptParts] = deque()
        self._parts_kept = 0
        #: Parts of incomplete collectives.
        self._parts = 0

    @property
    def bytes(self) -> int:
        """About how many bytes the tables take, those of parts that are not added yet as if they were."""
        odd = sum([len(parts) for _, parts in self.odd])
        return (
            JOIN + PART * (self._parts + self._parts_kept + odd) + self.window.bytes + RUN * len(self.own_lateness.runs)
        )

    def halve(self) -> None:
        """Drop the older half of the incomplete collectives, and of the lateness in complete ones."""
        for _ in range(-(-len(self._kept) // 2)):
            self._drop_kept()
        for _ in range(-(-len(self._pending) // 2)):
            self._drop_pending()
        for _ in range(-(-len(self._rooted) // 2)):
            self._drop_rooted()
        self.odd.clear()
        self.window.halve()
        if not self._parts:
            self.own_lateness = OwnLateness()

    def _drop_kept(self) -> None:
        dropped = self._kept.popleft()
        self._parts_kept -= len(dropped)
        following = self._kept[0].numbers() if self._kept else set()
        self._unjoined += len(dropped.numbers() - following)

    def _drop_pending(self) -> None:
        self._parts -= len(self._pending.pop(next(iter(self._pending))).parts)
        self._unjoined += 1

    def _drop_rooted(self) -> None:
        self._parts -= len(self._rooted.pop(next(iter(self._rooted))))

    @property
    def unjoined(self) -> int:
        """Number of dropped collectives: a rank is missing, or was in another operation."""
        self._add_kept()
        return self._unjoined

    @property
    def is_here(self) -> bool:
        """Whether all ranks of the group are on this node."""
        return len(self.ranks) >= self.size

    def keep(self, parts: KeptParts) -> None:
        """Keep parts of a group that is not ``is_here``; they are added when they are needed."""
        self._kept.append(parts)
        self._parts_kept += len(parts)
        while self._parts_kept - len(self._kept[0]) >= _LEAST_KEPT * len(self.ranks):
            self._drop_kept()

    def _add_kept(self) -> None:
        if not self._kept:
            return
        kept, self._kept, self._parts_kept = self._kept, deque(), 0
        for parts in kept:
            for seq, part in parts:
                if part.root is None:
                    self.add(seq, part)
                else:
                    self.add_rooted(seq, part)

    def is_rooted_since(self, since_ns: int) -> bool:
        """Return whether an incomplete operation with a root ended on a rank of this node since then."""
        self._add_kept()
        return any(part.end_ns >= since_ns for parts in self._rooted.values() for part in parts.values())

    def restart(self) -> None:
        """Drop the lateness, and the incomplete operations with a root, of the job's previous run."""
        self._add_kept()
        self.window, self.own_lateness, self.usual_lateness = LateWindow(), OwnLateness(), UsualLateness()
        while self._rooted:
            self._drop_rooted()

    @property
    def has_begun(self) -> bool:
        """Whether there are incomplete collectives."""
        return bool(self._pending or self._kept)

    def numbers(self) -> Collection[int]:
        """Return the numbers of the incomplete collectives."""
        self._add_kept()
        return self._pending.keys()

    def waiting(self) -> Iterator[tuple[int, list[Part]]]:
        """Yield number and parts of the incomplete collectives, latest begun first, if their ranks are in one op."""
        self._add_kept()
        for seq, pending in reversed(self._pending.items()):
            if pending.same_op:
                yield seq, list(pending.parts.values())

    def part(self, seq: int, rank: int) -> Part | None:
        """Return a rank's part in an incomplete collective; ``None``: it is not known."""
        self._add_kept()
        pending = self._pending.get(seq)
        parts = self._rooted.get(seq, {}) if pending is None or rank not in pending.parts else pending.parts
        return parts.get(rank)

    def add_rooted(self, seq: int, part: Part) -> dict[int, Part] | None:
        """Add one rank's part in an operation with a root; return all parts by rank once they are complete, and have one root."""
        self._add_kept()
        parts = self._rooted.setdefault(seq, {})
        if part.rank in parts or (parts and next(iter(parts.values())).op != part.op):
            self._parts -= len(parts)
            parts.clear()  # of an earlier run of the job
        parts[part.rank] = part
        self._parts += 1
        if len(self._rooted) > MOST_PENDING:
            self._drop_rooted()
        if len(parts) < self.size:
            return None
        roots = {each.root for each in parts.values()}
        if len(roots) == 1 and part.root not in parts:
            return None
        self._parts -= len(self._rooted.pop(seq, ()))
        if len({(each.root, self._compared(each)) for each in parts.values()}) > 1:
            self.odd.append((seq, list(parts.values())))
        return parts if len(roots) == 1 else None

    def add(self, seq: int, part: Part) -> Waits | None:
        """Add one rank's part; return the collective once it is complete."""
        self._add_kept()
        pending = self._pending.get(seq)
        if pending is None:
            self._pending[seq] = _Pending(part)
            self._parts += 1
            if len(self._pending) > MOST_PENDING:
                self._drop_pending()
            return None
        # No rank finishes a symmetric operation before all begin it; an earlier end is of another run of the job.
        if part.end_ns < pending.last_launch:
            self._unjoined += 1
            return None
        if pending.first_end < part.launch_ns or part.rank in pending.parts:
            self._parts += 1 - len(pending.parts)
            self._pending[seq] = _Pending(part)
            self._unjoined += 1
            return None
        pending.parts[part.rank] = part
        self._parts += 1
        pending.first_end = min(pending.first_end, part.end_ns)
        pending.last_launch = max(pending.last_launch, part.launch_ns)
        pending.same_op = pending.same_op and part.op == pending.op
        first = next(iter(pending.parts.values()))
        pending.same_data = pending.same_data and part.size == first.size and part.dtype == first.dtype
        if len(pending.parts) < self.size:
            return None
        del self._pending[seq]
        self._parts -= len(pending.parts)
        parts = list(pending.parts.values())
        if not (pending.same_op and pending.same_data) and len({self._compared(part) for part in parts}) > 1:
            self.odd.append((seq, parts))
        if not pending.same_op:
            self._unjoined += 1
            return None
        return split(parts)
