"""The latest operations of a job's ranks on one time axis: when each rank entered, and which ranks wait. Pure.

All trainers of a node share one monotonic clock. The clocks of several nodes are compared by the ends of collectives (``model/clocks.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from commwatch.wire import events as ev
from commwatch.wire.events import RECORD, RECORD_SIZE, STEP_MARK
from commwatch_agent.history.operations import Names as RecordNames
from commwatch_agent.history.rows import RingRow
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.model.cells import GroupInfo
from commwatch_agent.model.clocks import Clock, compare
from commwatch_agent.model.model_parts.joining import parts_of

#: Most operations in one picture, and of one rank; but at least so many of each rank, however many ranks there are.
MOST_BARS, MOST_OF_RANK, LEAST_OF_RANK = 1024, 256, 24
#: Most ranks that one picture has rows for.
MOST_RANKS = 64
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
    #: Index into ``Timeline.parts``: the part of the model that it carries; ``None``: not known, or not certain.
    part: int | None = None


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
    """The latest operations, on the clock of the first node."""

    #: Seconds that the picture covers, and seconds since its end.
    span_s: float
    age_s: float
    #: Names of operations and labels of groups, by index.
    ops: list[str]
    groups: list[str]
    tracks: list[Track]
    #: Names of parts of the model, by index.
    parts: list[str]


class Ended(NamedTuple):
    """An operation that has ended; times in ns, op and group as indexes."""

    start_ns: int
    end_ns: int
    op: int
    group: int
    seq: int
    size_bytes: int | None
    #: Whether its duration is comparable with those of the group's other ranks.
    compares: bool
    #: What it carries, as an index; ``None``: as in ``Bar``.
    part: int | None = None


class Begun(NamedTuple):
    """An operation that has not ended; its begin in ns, op and group as indexes."""

    begun_ns: int
    op: int
    group: int
    seq: int


class GroupName(NamedTuple):
    """A group: it is identified by its id, and shown by its label."""

    group_id: str
    label: str
    size: int


@dataclass(frozen=True)
class RankBars:
    """The latest operations of one rank."""

    rank: int
    #: Oldest first.
    ended: list[Ended]
    pending: list[Begun]
    #: It may have had more since the first of ``ended``.
    cut: bool


@dataclass(frozen=True)
class NodeBars:
    """The latest operations of the ranks of one node, by its own clock."""

    now_ns: int
    ops: list[str]
    groups: list[GroupName]
    ranks: list[RankBars]
    parts: list[str]


class _Names:
    """Indexes of operations and groups."""

    def __init__(self) -> None:
        self.ops: dict[str, int] = {}
        self.groups: dict[GroupName, int] = {}
        self.parts: dict[str, int] = {}

    def op(self, name: str) -> int:
        return self.ops.setdefault(name, len(self.ops))

    def part(self, name: str | None) -> int | None:
        return None if name is None else self.parts.setdefault(name, len(self.parts))

    def group(self, group: GroupInfo | GroupName) -> int:
        name = GroupName(group.group_id, group.label, group.size)
        return self.groups.setdefault(name, len(self.groups))


def bars(rank_totals: Iterable[RankTotals], now_ns: int) -> NodeBars:
    """Return the latest operations of the ranks of this node.

    Args:
        rank_totals: totals of one job, one per rank, locked by the caller.
        now_ns: the monotonic clock in ns.
    """
    ranks, names = list(rank_totals), _Names()
    most = max(LEAST_OF_RANK, min(MOST_OF_RANK, MOST_BARS // max(1, len(ranks))))
    found = [_of_rank(totals, most, names) for totals in ranks]
    return NodeBars(now_ns, list(names.ops), list(names.groups), found, list(names.parts))


def timeline(nodes: Sequence[NodeBars]) -> Timeline | None:
    """Return the latest operations of a job; ``None`` if none has a known end and none is in flight.

    Args:
        nodes: the parts of its nodes. A part whose clock cannot be compared with that of the first is left out.
    """
    names, ranks = _Names(), list[RankBars]()
    for part, clock in zip(nodes, compare([_shared(node) for node in nodes]), strict=True):
        ranks += () if clock is None else _renamed(part, clock, names)
    ranks.sort(key=lambda each: each.rank)
    span = _span(ranks)
    if span is None:
        return None
    begin_ns, end_ns = span
    now_ns, transfers = nodes[0].now_ns, _transfers(ranks, [group.size for group in names.groups])
    tracks = [
        Track(
            each.rank,
            [_bar(one, begin_ns, transfers) for one in each.ended if one.end_ns > begin_ns],
            [_open(one, begin_ns, now_ns) for one in each.pending],
        )
        for each in ranks
    ]
    labels = [group.label for group in names.groups]
    span_s, age_s = (end_ns - begin_ns) / 1e9, max(0, now_ns - end_ns) / 1e9
    return Timeline(span_s, age_s, list(names.ops), labels, tracks, list(names.parts))


def _shared(node: NodeBars) -> dict[tuple[str, int], int]:
    """Return the ends of the node's symmetric collectives, by group and number; where its ranks differ, the latest."""
    ends: dict[tuple[str, int], int] = {}
    for each in node.ranks:
        for one in each.ended:
            if one.compares:
                at = node.groups[one.group].group_id, one.seq
                ends[at] = max(ends.get(at, one.end_ns), one.end_ns)
    return ends


def _renamed(node: NodeBars, clock: Clock, names: _Names) -> Iterator[RankBars]:
    """Yield the operations of a node's ranks by the clock of the first node, with indexes of ``names``."""
    ops, groups = [names.op(op) for op in node.ops], [names.group(group) for group in node.groups]
    parts = [names.part(part) for part in node.parts]
    for each in node.ranks:
        ended = [
            one._replace(
                start_ns=clock.of_first(one.start_ns),
                end_ns=clock.of_first(one.end_ns),
                op=ops[one.op],
                group=groups[one.group],
                part=None if one.part is None else parts[one.part],
            )
            for one in each.ended
        ]
        pending = [Begun(clock.of_first(one[0]), ops[one.op], groups[one.group], one.seq) for one in each.pending]
        yield RankBars(each.rank, ended, pending, each.cut)


def _of_rank(totals: RankTotals, most: int, names: _Names) -> RankBars:
    pending = [
        Begun(record.begun_ns, names.op(totals.op_name(record.op)), names.group(totals.group(record.group)), record.seq)
        for record in totals.pending()
    ]
    ended = _ended(totals, most, names)
    # With fewer than half of them, operations without known ends took the room.
    return RankBars(totals.rank, ended, pending, len(ended) >= most // 2)


def _ended(totals: RankTotals, most: int, names: _Names) -> list[Ended]:
    """Return the latest operations of a rank. It unpacks plain tuples, because there are thousands each second."""
    found = []
    known: dict[tuple[int, int], tuple[int, int, bool]] = {}
    parts = _parts(totals, 2 * most)
    for stamp, op, _, group, _, _, size, _, seq, _, start, end, flags, timing, _, _ in RECORD.iter_unpack(
        totals.tail[-most * RECORD_SIZE :]
    ):
        if op == STEP_MARK or flags & _UNMEASURED or not start <= end < ev.MAX_PLAUSIBLE:
            continue
        if (op, group) not in known:
            name, info = totals.op_name(op), totals.group(group)
            known[op, group] = names.op(name), names.group(info), _ends_together(name, info)
        op_at, group_at, compares = known[op, group]
        compares = compares and _is_end(flags, timing)
        part = names.part(parts.get(stamp))
        found.append(Ended(start, end, op_at, group_at, seq, None if flags & ev.NO_SIZE else size, compares, part))
    return found


def _parts(totals: RankTotals, most: int) -> dict[int, str]:
    """Return what operations among the latest ``most`` records of a rank carry, by stamp."""
    if not totals.parts:
        return {}
    records = map(ev.Record._make, RECORD.iter_unpack(totals.tail[-most * RECORD_SIZE :]))
    return parts_of(records, list(totals.parts.values()), totals.dtypes)


def _ends_together(op: str, group: GroupInfo) -> bool:
    """Return whether all ranks of a group finish the operation at the same time."""
    return op in ev.SYMMETRIC and group.aligned and group.size > 1


def _is_end(flags: int, timing: int) -> bool:
    """Return whether the end in a record is the time when the ranks finished, and not when the caller began to wait."""
    return not flags & ev.UNALIGNED and not (timing == ev.BY_WAIT and flags & ev.ASYNC)


def past_bars(
    records: Iterable[tuple[RingRow, ev.Record]],
    known: RecordNames,
    part_of: Callable[[RingRow, ev.Record], str | None] = lambda ring, record: None,
) -> NodeBars:
    """Return the latest operations of the ranks of this node from the history.

    Args:
        records: of one job, newest first; only those of the newest record's run and boot are used.
        known: what the numbers in records mean.
        part_of: returns what an operation carries.
    """
    names, newest = _Names(), None
    by_rank: dict[int, list[Ended]] = {}
    end_ns = rank = 0
    for count, (ring, record) in enumerate(records):
        run = ring.restart, ring.identity.get("boot_id")
        newest, end_ns = newest or run, end_ns or record.end_ns
        if run != newest or record.end_ns < end_ns - LONGEST_NS or count == MOST_BARS:
            break
        if record.flags & _UNMEASURED or not record.start_ns <= record.end_ns < ev.MAX_PLAUSIBLE:
            continue
        op, group, rank = known.op(ring.id, record.op), known.group(ring.id, record.group), ring.rank
        size = None if record.flags & ev.NO_SIZE else record.size_bytes
        compares = _ends_together(op, group) and _is_end(record.flags, record.timing)
        where = names.op(op), names.group(group), record.seq
        part = names.part(part_of(ring, record))
        by_rank.setdefault(rank, []).append(Ended(record.start_ns, record.end_ns, *where, size, compares, part))
    # Nothing is known of the time before the oldest record.
    found = [RankBars(each, ended[::-1], [], each == rank) for each, ended in by_rank.items()]
    return NodeBars(end_ns, list(names.ops), list(names.groups), found, list(names.parts))


def _span(ranks: list[RankBars]) -> tuple[int, int] | None:
    """Return begin and end of the picture in ns: it goes back as far as the operations of every rank are known."""
    moments = [one.end_ns for each in ranks for one in each.ended] + [one[0] for each in ranks for one in each.pending]
    if not moments:
        return None
    end_ns = max(moments)
    starts = [one.start_ns for each in ranks for one in each.ended] or [end_ns - 1_000_000]
    # If a rank has more operations than fit, the earlier ones are not known.
    cut = [each.ended[0].start_ns for each in ranks if each.cut]
    return max([min(starts), end_ns - LONGEST_NS, *cut]), end_ns


def _transfers(ranks: list[RankBars], sizes: list[int]) -> dict[tuple[int, int], int]:
    """Return the pure transfer time in ns of symmetric collectives of which all ranks are known, by (group, seq)."""
    durations: dict[tuple[int, int], list[int]] = {}
    for each in ranks:
        for start_ns, end_ns, _, group, seq, _, compares, _ in each.ended:
            if compares:
                durations.setdefault((group, seq), []).append(end_ns - start_ns)
    return {at: min(found) for at, found in durations.items() if len(found) == sizes[at[0]]}


def _bar(each: Ended, begin_ns: int, transfers: dict[tuple[int, int], int]) -> Bar:
    start_ns, end_ns, op, group, seq, size, compares, part = each
    transfer_ns = transfers.get((group, seq)) if compares else None
    waited = None if transfer_ns is None else (end_ns - start_ns - transfer_ns) // 1000
    return Bar((start_ns - begin_ns) // 1000, (end_ns - start_ns) // 1000, waited, op, group, seq, size, part)


def _open(each: Begun, begin_ns: int, now_ns: int) -> Pending:
    begun_ns, op, group, seq = each
    return Pending((begun_ns - begin_ns) // 1000, max(0, now_ns - begun_ns) // 1000, op, group, seq)
