"""The latest operations of this node's ranks on one time axis: when each rank entered, and which ranks wait. Pure.

All trainers of a node share one monotonic clock, so their operations have a common time axis. Ranks of other nodes do not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from commwatch.collectors.wire import events as ev
from commwatch.collectors.wire.events import RECORD, RECORD_SIZE, STEP_MARK, Record
from commwatch.core.cells import GroupInfo
from commwatch.ingest.rank_totals import RankTotals

#: Most operations in one picture, and of one rank; but at least so many of each rank, however many ranks there are.
MOST_BARS, MOST_OF_RANK, LEAST_OF_RANK = 1024, 256, 24
#: Longest time that one picture covers.
LONGEST_NS = 10_000_000_000
_UNMEASURED = ev.FAILED | ev.UNTIMED


class Bar(NamedTuple):
    """An operation that has ended; times in µs from the begin of the picture."""

    #: Negative if it began before the picture.
    start_us: int
    duration_us: int
    #: First part of the duration: waiting for the last rank of its group; ``None``: not known, or not defined.
    wait_us: int | None
    #: Indexes into ``Timeline.ops`` and ``Timeline.groups``.
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
    """The operations of one rank, oldest first."""

    rank: int
    bars: list[Bar]
    pending: list[Pending]


@dataclass(frozen=True)
class Timeline:
    """The latest operations, on the clock of the node."""

    #: Seconds that the picture covers, and seconds since its end.
    span_s: float
    age_s: float
    #: Names of operations and labels of groups, by index.
    ops: list[str]
    groups: list[str]
    tracks: list[Track]


class _Ended(NamedTuple):
    """An operation that has ended; times in ns, op and group as indexes."""

    start_ns: int
    end_ns: int
    op: int
    group: int
    seq: int
    size_bytes: int | None
    #: Whether its duration is comparable with those of the group's other ranks.
    compares: bool


class _Names:
    """Indexes of the operations and groups of all ranks; a group is identified by its id, and shown by its label."""

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


def timeline(rank_totals: Iterable[RankTotals], now_ns: int) -> Timeline | None:
    """Return the latest operations of ranks; ``None`` if none has a known end and none is in flight.

    Args:
        rank_totals: totals of one job, one per rank, locked by the caller.
        now_ns: the monotonic clock in ns.
    """
    ranks, names = list(rank_totals), _Names()
    most = max(LEAST_OF_RANK, min(MOST_OF_RANK, MOST_BARS // max(1, len(ranks))))
    ended = [_ended(totals, most, names) for totals in ranks]
    pending = [list(totals.pending()) for totals in ranks]
    span = _span(ended, [record for of_rank in pending for record in of_rank], most)
    if span is None:
        return None
    begin_ns, end_ns = span
    transfers = _transfers(ended, names.sizes)
    tracks = [
        Track(
            totals.rank,
            [_bar(each, begin_ns, transfers) for each in done if each.end_ns > begin_ns],
            [_open(totals, record, names, begin_ns, now_ns) for record in waiting],
        )
        for totals, done, waiting in zip(ranks, ended, pending, strict=True)
    ]
    return Timeline((end_ns - begin_ns) / 1e9, max(0, now_ns - end_ns) / 1e9, list(names.ops), names.labels, tracks)


def _ended(totals: RankTotals, most: int, names: _Names) -> list[_Ended]:
    """Return the latest operations of a rank. It unpacks plain tuples, because there are thousands each second."""
    found = []
    known: dict[tuple[int, int], tuple[int, int, bool]] = {}
    for _, op, _, group, _, _, size, _, seq, _, start, end, flags, timing, _, _ in RECORD.iter_unpack(
        totals.tail[-most * RECORD_SIZE :]
    ):
        if op == STEP_MARK or flags & _UNMEASURED or not start <= end < ev.MAX_PLAUSIBLE:
            continue
        if (op, group) not in known:
            name, info = totals.op_name(op), totals.group(group)
            symmetric = name in ev.SYMMETRIC and info.aligned and info.size > 1
            known[op, group] = names.op(name), names.group(info), symmetric
        op_at, group_at, compares = known[op, group]
        # An end that was seen only when the caller began to wait is not the time when the ranks finished.
        compares = compares and not flags & ev.UNALIGNED and not (timing == ev.BY_WAIT and flags & ev.ASYNC)
        found.append(_Ended(start, end, op_at, group_at, seq, None if flags & ev.NO_SIZE else size, compares))
    return found


def _span(ended: list[list[_Ended]], pending: list[Record], most: int) -> tuple[int, int] | None:
    """Return begin and end of the picture in ns: it goes back as far as the operations of every rank are known."""
    moments = [each.end_ns for of_rank in ended for each in of_rank] + [record.begun_ns for record in pending]
    if not moments:
        return None
    end_ns = max(moments)
    starts = [each.start_ns for of_rank in ended for each in of_rank] or [end_ns - 1_000_000]
    # If a rank has more operations than fit, the earlier ones are not known.
    cut = [of_rank[0].start_ns for of_rank in ended if len(of_rank) >= most // 2]
    return max([min(starts), end_ns - LONGEST_NS, *cut]), end_ns


def _transfers(ended: list[list[_Ended]], sizes: list[int]) -> dict[tuple[int, int], int]:
    """Return the pure transfer time in ns of symmetric collectives with all ranks on this node, by (group, seq)."""
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


def _open(totals: RankTotals, record: Record, names: _Names, begin_ns: int, now_ns: int) -> Pending:
    op, group = names.op(totals.op_name(record.op)), names.group(totals.group(record.group))
    age_ns = max(0, now_ns - record.begun_ns)
    return Pending((record.begun_ns - begin_ns) // 1000, age_ns // 1000, op, group, record.seq)
