"""The latest operations of the ranks of this node side by side: who entered when, and who waits. Pure.

All trainers of a node share one monotonic clock, so their operations stand on one line of time. Ranks of other nodes do not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from commwatch.collectors.wire import events as ev
from commwatch.collectors.wire.events import RECORD, RECORD_SIZE, STEP_MARK, Record
from commwatch.core.cells import GroupInfo
from commwatch.ingest.rank_totals import RankTotals

#: Operations in one picture, and how many of a rank at most; at least so many, however many ranks there are.
MOST_BARS, MOST_OF_RANK, LEAST_OF_RANK = 1024, 256, 24
#: Operations further apart are not of one picture.
LONGEST_NS = 10_000_000_000
_UNMEASURED = ev.FAILED | ev.UNTIMED


class Bar(NamedTuple):
    """An operation that has ended; times in µs from the beginning of the picture."""

    #: Negative where it began before.
    start_us: int
    duration_us: int
    #: The first part of it, spent waiting for the last rank of its group; ``None``: not known, or not defined.
    wait_us: int | None
    #: Places in ``Timeline.ops`` and ``Timeline.groups``.
    op: int
    group: int
    seq: int
    #: ``None``: it has no size.
    size_bytes: int | None


class Pending(NamedTuple):
    """An operation that has not ended."""

    start_us: int
    age_us: int
    op: int
    group: int
    seq: int


@dataclass(frozen=True)
class Track:
    """What one rank did, oldest first."""

    rank: int
    bars: list[Bar]
    pending: list[Pending]


@dataclass(frozen=True)
class Timeline:
    """The latest operations, on the clock of the node."""

    #: Seconds that the picture spans, and how long ago it ended.
    span_s: float
    age_s: float
    #: Names of operations, and of groups by number and label.
    ops: list[str]
    groups: list[str]
    tracks: list[Track]


class _Ended(NamedTuple):
    """An operation that has ended, in ns, with its names by place."""

    start_ns: int
    end_ns: int
    op: int
    group: int
    seq: int
    size_bytes: int | None
    #: Its duration compares with those of the group's other ranks.
    compares: bool


class _Names:
    """Operations and groups of all ranks, each with a place; a group is known by its id, and shown by its label."""

    def __init__(self) -> None:
        self.ops: dict[str, int] = {}
        self.groups: dict[str, int] = {}
        self.labels: list[str] = []
        self.sizes: list[int] = []

    def op(self, name: str) -> int:
        return self.ops.setdefault(name, len(self.ops))

    def group(self, group: GroupInfo) -> int:
        if group.group_id not in self.groups:
            self.groups[group.group_id] = len(self.labels)
            self.labels.append(group.label)
            self.sizes.append(group.size)
        return self.groups[group.group_id]


def timeline(books: Iterable[RankTotals], now_ns: int) -> Timeline | None:
    """The latest operations of ranks; ``None`` where none has an end that is known, and none is in flight.

    Args:
        books: of one job, each rank once, held still by the caller.
        now_ns: the monotonic clock.
    """
    ranks, names = list(books), _Names()
    most = max(LEAST_OF_RANK, min(MOST_OF_RANK, MOST_BARS // max(1, len(ranks))))
    ended = [_ended(book, most, names) for book in ranks]
    pending = [list(book.pending()) for book in ranks]
    span = _span(ended, [record for of_rank in pending for record in of_rank], most)
    if span is None:
        return None
    begin_ns, end_ns = span
    transfers = _transfers(ended, names.sizes)
    tracks = [
        Track(
            book.rank,
            [_bar(each, begin_ns, transfers) for each in done if each.end_ns > begin_ns],
            [_open(book, record, names, begin_ns, now_ns) for record in waiting],
        )
        for book, done, waiting in zip(ranks, ended, pending, strict=True)
    ]
    return Timeline((end_ns - begin_ns) / 1e9, max(0, now_ns - end_ns) / 1e9, list(names.ops), names.labels, tracks)


def _ended(book: RankTotals, most: int, names: _Names) -> list[_Ended]:
    """The latest of a rank. Plain tuples all the way: there are thousands, each second."""
    found = []
    known: dict[tuple[int, int], tuple[int, int, bool]] = {}
    for _, op, _, group, _, _, size, _, seq, _, start, end, flags, timing, _, _ in RECORD.iter_unpack(
        book.tail[-most * RECORD_SIZE :]
    ):
        if op == STEP_MARK or flags & _UNMEASURED or not start <= end < ev.MAX_PLAUSIBLE:
            continue
        if (op, group) not in known:
            name, info = book.op_name(op), book.group(group)
            symmetric = name in ev.SYMMETRIC and info.aligned and info.size > 1
            known[op, group] = names.op(name), names.group(info), symmetric
        op_at, group_at, compares = known[op, group]
        # An end seen when the caller came to wait for it says nothing about when the ranks finished.
        compares = compares and not flags & ev.UNALIGNED and not (timing == ev.BY_WAIT and flags & ev.ASYNC)
        found.append(_Ended(start, end, op_at, group_at, seq, None if flags & ev.NO_SIZE else size, compares))
    return found


def _span(ended: list[list[_Ended]], pending: list[Record], most: int) -> tuple[int, int] | None:
    """First and last moment of the picture: as far back as all is known of every rank."""
    moments = [each.end_ns for of_rank in ended for each in of_rank] + [record.launch_ns for record in pending]
    if not moments:
        return None
    end_ns = max(moments)
    starts = [each.start_ns for of_rank in ended for each in of_rank] or [end_ns - 1_000_000]
    # Of a rank with more operations than are shown, those before are not known.
    cut = [of_rank[0].start_ns for of_rank in ended if len(of_rank) >= most // 2]
    return max([min(starts), end_ns - LONGEST_NS, *cut]), end_ns


def _transfers(ended: list[list[_Ended]], sizes: list[int]) -> dict[tuple[int, int], int]:
    """Of collectives all of whose ranks are here and whose ranks finish together: what the pure transfer took, in ns."""
    durations: dict[tuple[int, int], list[int]] = {}
    for of_rank in ended:
        for start_ns, end_ns, _, group, seq, _, compares in of_rank:
            if compares:
                durations.setdefault((group, seq), []).append(end_ns - start_ns)
    return {at: min(found) for at, found in durations.items() if len(found) == sizes[at[0]]}


def _bar(each: _Ended, begin_ns: int, transfers: dict[tuple[int, int], int]) -> Bar:
    start_ns, end_ns, op, group, seq, size, compares = each
    transfer_ns = transfers.get((group, seq)) if compares else None
    waited = None if transfer_ns is None else (end_ns - start_ns - transfer_ns) // 1000
    return Bar((start_ns - begin_ns) // 1000, (end_ns - start_ns) // 1000, waited, op, group, seq, size)


def _open(book: RankTotals, record: Record, names: _Names, begin_ns: int, now_ns: int) -> Pending:
    op, group = names.op(book.op_name(record.op)), names.group(book.group(record.group))
    age_ns = max(0, now_ns - record.launch_ns)
    return Pending((record.launch_ns - begin_ns) // 1000, age_ns // 1000, op, group, record.seq)
