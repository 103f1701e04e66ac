"""Counts the records of several rings at a time. Pure.

The result is that of one record after the other, ring by ring: of one collective the parts of an earlier ring come first, and its waits
are added to the cells that are live when its last part has come.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from commwatch.wire import events as ev
from commwatch_agent.ingest.batch_joins import BatchJoins, add_waits
from commwatch_agent.ingest.batch_steps import BatchSteps, Busy, Untimed
from commwatch_agent.ingest.blocked_steps import between_marks, blocked
from commwatch_agent.ingest.columns import (
    Columns,
    Flags,
    Ints,
    by_index,
    combined,
    counts,
    distinct,
    first_of,
    last_of,
    sums,
)
from commwatch_agent.ingest.cycles.cycle import CLASS_SHIFT, GROUP_SHIFT, PEER_SHIFT, Operations
from commwatch_agent.ingest.cycles.ends import End
from commwatch_agent.ingest.own_time import Events, own_times
from commwatch_agent.ingest.own_time_state import Blocked
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.ingest.rows import Rows, SlotBoundary
from commwatch_agent.model.cells import MOST_APART

#: Operations that do not block the thread that trains: asynchronous, on a stream, or in another thread.
_BESIDE = ev.ASYNC | ev.ON_DEVICE | ev.BESIDE
_PEERS = (1 << GROUP_SHIFT - PEER_SHIFT) - 1


class RecordBatch:
    """Some records, in the order in which they were read.

    Args:
        columns: all records; their ``ring`` is an index in ``ranks``.
        raw: the bytes that ``columns.place`` counts records in.
        cuts: where slots of 10 s end, in order.
    """

    def __init__(self, columns: Columns, raw: bytes, ranks: Sequence[RankTotals], cuts: Sequence[SlotBoundary]) -> None:
        self._all, self._raw, self._ranks, self._cuts = columns, raw, ranks, cuts
        self._mark = columns.op == ev.STEP_MARK
        self._counted = (columns.timing == ev.COUNTED) & ~self._mark
        rare = self._mark | self._counted
        #: Place in the section of each operation; and the operations.
        self._at: Ints = np.flatnonzero(~rare)
        self._operations = columns.of(self._at) if rare.any() else columns
        bounds = np.searchsorted(columns.ring, np.arange(len(ranks) + 1)).tolist()
        self._bounds = list(pairwise(bounds))

    def ingest(self) -> None:
        """Count the records."""
        each = self._operations
        marked = self._first_marks()
        self._rows = Rows(each, self._at, self._ranks, self._cuts, marked)
        self._of = self._rows.of
        self._message = self._rows.p2p[self._of]
        self._raised = each.flags & ev.FAILED != 0
        self._untimed = ~self._raised & (each.flags & ev.UNTIMED != 0)
        self._timed = ~(self._raised | self._untimed)
        self._at_timed: Ints = np.flatnonzero(self._timed)
        #: Those for which the training may wait.
        self._of_training = each.flags & ev.BESIDE == 0
        none = not (self._message.any() or self._counted.any())
        first_message = {
            totals: -1 if totals.messages else len(self._all) if none else self._first_message(ring)
            for ring, totals in enumerate(self._ranks)
        }
        #: Places where slots of a rank end.
        self._slots: dict[RankTotals, list[int]] = {}
        for cut in self._cuts:
            self._slots.setdefault(self._ranks[cut.ring], []).append(cut.place)
        own, run = self._own_times()
        self._count()
        self._only_counted(marked)
        self._numbers()
        self._follow_steps()
        joins = BatchJoins(self._rows, self._ranks, first_message, self._slots)
        at = np.flatnonzero(self._joined)
        joins.join(each.of(at), self._of[at], self._at[at], own[at], run[at])
        for totals in self._slots:
            totals.close_slots()

    @cached_property
    def _joined(self) -> Flags:
        """Which operations are joined. An end seen only when the caller waits is not the time when the ranks finished."""
        each = self._operations
        late = (each.timing == ev.BY_WAIT) & (each.flags & ev.ASYNC != 0)
        joined: Flags = self._timed & self._rows.joinable[self._of] & (each.flags & ev.NOT_JOINED == 0) & ~late
        return joined

    def _record(self, place: int) -> ev.Record:
        """Return the record at a place of the section."""
        return ev.Record._make(ev.RECORD.unpack_from(self._raw, int(self._all.place[place]) * ev.RECORD_SIZE))

    def _first_marks(self) -> Ints | None:
        """Return where each rank's first step begins, as ``Rows`` takes it; note the ranks that now have a step mark."""
        if all(totals.marked for totals in self._ranks):
            return None
        first = np.full(len(self._ranks), -1, np.int64)
        for ring, (totals, (since, until)) in enumerate(zip(self._ranks, self._bounds, strict=True)):
            if not totals.marked:
                marks = self._mark[since:until]
                totals.marked = bool(marks.any())
                if totals.marked:
                    totals.steps.begin_marks()
                if not totals.begun:
                    first[ring] = since + int(marks.argmax()) if totals.marked else until
                    totals.begun = totals.marked
        return first

    def _first_message(self, ring: int) -> int:
        """Return the place of a ring's first message; after all others if there is none."""
        since, until = self._bounds[ring]
        found = self._at[self._message & self._timed & (self._operations.ring == ring)][:1].tolist()
        totals = self._ranks[ring]
        for place in np.flatnonzero(self._counted[since:until]).tolist():
            if totals.op_name(int(self._all.op[since + place])) in ev.P2P:
                found.append(since + place)
                break
        return min(found, default=len(self._all))

    def _own_times(self) -> tuple[Ints, Ints]:
        """Return own time and run of each operation (``own_time``)."""
        each = self._operations
        beside = each.flags & _BESIDE != 0
        waits = self._message & (each.waited > 0)
        blocked = self._timed & (waits | ~(beside | self._message))
        symmetric = self._rows.symmetric[self._of]
        waited_ns = np.where(waits, each.waited * 1000, each.end - each.start)

        def spread(values: Flags) -> Flags:
            if len(each) == len(self._all):
                return values
            full = np.zeros(len(self._all), np.bool_)
            full[self._at] = values
            return full

        all_waited_ns = np.zeros(len(self._all), np.int64)
        all_waited_ns[self._at] = waited_ns
        events = Events(
            ring=self._all.ring, bounds=self._bounds, mark=self._mark, lost=spread(~self._timed & ~beside) | self._counted,
            left=spread(blocked & symmetric), waited=spread(blocked & ~symmetric), waited_ns=all_waited_ns, joined=spread(self._joined),
            beside=spread(beside), on_device=spread(each.flags & ev.ON_DEVICE != 0), launch=self._all.launch, end=self._all.end,
        )  # fmt: skip
        own, run = own_times([totals.own_time for totals in self._ranks], events)
        return own[self._at], run[self._at]

    # -- sums ---------------------------------------------------------------------------------

    def _count(self) -> None:
        """Add the operations to the cells."""
        each, of = self._operations, self._of
        begun = ~self._mark
        for totals, places in self._slots.items():
            totals.begin_live(self._record(places[-1]).stamp)
        for (since, until), totals in zip(self._bounds, self._ranks, strict=True):
            if totals.live_from is None and begun[since:until].any():
                totals.begin_live(self._record(since + int(begun[since:until].argmax())).stamp)
        if not self._timed.all():
            some = np.flatnonzero(~self._timed)
            self._rows.count_unmeasured(each.of(some), of[some])
            for place, ring in zip(self._at[self._raised].tolist(), each.ring[self._raised].tolist(), strict=True):
                self._ranks[ring].failures.append(self._record(place))
            each, of = each.of(self._at_timed), of[self._at_timed]
        message = np.flatnonzero(self._rows.p2p[of])
        busy_ns = self._under_way(self._at[self._at_timed[message]], of[message], each.of(message))
        if len(message):
            self._messages(each.of(message), of[message])
        codes = self._rows.count(each, of, busy_ns)
        self._rows.count_nccl(each, of)
        bounds = np.searchsorted(each.ring, np.arange(len(self._ranks) + 1)).tolist()
        for totals, since, until in zip(self._ranks, bounds[:-1], bounds[1:], strict=True):
            if since < until:
                totals.add_bins(codes[since:until])

    def _under_way(self, places: Ints, of: Ints, each: Columns) -> list[int]:
        """Return for each row how much longer its messages were under way."""
        if not len(of):
            for ended in self._cuts:
                self._ranks[ended.ring].forget_messages(ended.wall_ns)
            return [0] * len(self._rows.cells)
        unions = [cell.union for cell in self._rows.cells]
        index = {id(union): at for at, union in enumerate(unions)}
        which = np.array([index[id(union)] for union in unions], np.int64)[of]
        longer_ns, since = np.zeros(len(of), np.int64), 0
        cuts = np.searchsorted(places, [cut.place for cut in self._cuts]).tolist()
        for cut, until in zip([*self._cuts, None], [*cuts, len(of)], strict=True):
            if since < until:
                at = since + by_index(which[since:until])
                starts, ends, added = each.start[at].tolist(), each.end[at].tolist(), list[int]()
                for first, last in pairwise([0, *(np.flatnonzero(np.diff(which[at])) + 1).tolist(), len(at)]):
                    union = unions[which[at[first]]]
                    assert union is not None
                    added += map(union.add, starts[first:last], ends[first:last])
                longer_ns[at], since = added, until
            if cut is not None:
                self._ranks[cut.ring].forget_messages(cut.wall_ns)
        busy_ns: list[int] = sums(of, len(unions), longer_ns).tolist()
        return busy_ns

    def _messages(self, each: Columns, of: Ints) -> None:
        """Count what only messages have: a peer, and a wait."""
        cells = self._rows.cells
        on_device = each.flags & ev.ON_DEVICE != 0
        for ring in set(each.ring[on_device].tolist()):
            self._ranks[ring].on_device = True
        peers, which = distinct(combined(of, each.peer - each.peer.min()))
        first = first_of(which, len(peers))
        number, waited = counts(which, len(peers)).tolist(), sums(which, len(peers), each.waited).tolist()
        size, rows, peer = sums(which, len(peers), each.size).tolist(), of[first].tolist(), each.peer[first].tolist()
        for at in np.argsort(first).tolist():
            cell = cells[rows[at]]
            cell.owner.messages_with(cell.key.group, cell.key.op, peer[at]).add(size[at], waited[at], number[at])
        cpu = ~on_device
        waited_ns = np.minimum(each.end - each.start, each.waited * 1000)[cpu]
        add_waits(self._ranks, each.ring[cpu], each.end[cpu], waited_ns)

    def _only_counted(self, marked: Ints | None) -> None:
        """Count the records of operations that were only counted; ``marked`` as for ``Rows``."""
        for place in np.flatnonzero(self._counted).tolist():
            ring = int(self._all.ring[place])
            totals, startup = self._ranks[ring], marked is not None and place < int(marked[ring])
            totals.count_only(self._record(place), bisect_right(self._slots.get(totals, ()), place), startup)

    def _numbers(self) -> None:
        """Keep the latest number, and its launch, of each group's collectives."""
        each, shared = self._operations, (self._all.group >= MOST_APART) & (self._all.group < ev.NO_GROUP)
        if self._counted.any() or shared.any():
            self._numbers_one_by_one()
            return
        collective = ~self._message & ~self._raised
        for wanted, unseen in ((collective, False), (collective & self._untimed, True)):
            at = np.flatnonzero(wanted)
            last = last_of(self._of[at], len(self._rows.cells))
            last = np.sort(last[last >= 0])
            for ring, group, seq, launch in _lists(each.of(at[last]), "ring", "group", "seq", "launch"):
                self._ranks[ring].note_number(group, seq, launch, unseen)

    def _numbers_one_by_one(self) -> None:
        message, silent = np.zeros(len(self._all), np.bool_), np.zeros(len(self._all), np.bool_)
        raised = silent.copy()
        message[self._at], silent[self._at], raised[self._at] = self._message, self._untimed, self._raised
        flags = zip(
            self._mark.tolist(), self._counted.tolist(), message.tolist(), silent.tolist(), raised.tolist(), strict=True
        )
        fields = _lists(self._all, "ring", "op", "group", "seq", "launch")
        for (mark, counted, p2p, untimed, failed), (ring, op, group, seq, launch) in zip(flags, fields, strict=True):
            totals = self._ranks[ring]
            if counted and totals.op_name(op) not in ev.P2P:
                totals.note_counted(group, seq, launch)
            elif not (mark or counted or p2p or failed):
                totals.note_number(group, seq, launch, False)
                if untimed:
                    totals.note_number(group, seq, launch, True)

    # -- steps --------------------------------------------------------------------------------

    def _blocked_before_marks(self) -> Iterator[tuple[int, Blocked]]:
        """Yield the place of each step mark, with how long threads were blocked since the one before."""
        each = self._operations
        seen = (each.flags & ev.WAIT_SEEN != 0) & self._timed & ~self._message
        longest = blocked(each.waited, each.end - each.start, seen | self._message)
        of_records = np.zeros((3, len(self._all) + 1), np.int64)
        not_known = (~self._timed & self._of_training) | (each.flags & ev.ON_DEVICE != 0)
        of_records[:, self._at + 1] = np.where(self._timed & self._of_training, longest, 0), seen, not_known
        of_records[2, np.flatnonzero(self._counted) + 1] = 1
        of_records = of_records.cumsum(axis=1)
        for totals, (since, until) in zip(self._ranks, self._bounds, strict=True):
            places = (np.flatnonzero(self._mark[since:until]) + since).tolist()
            found, totals.blocked = between_marks(of_records, [since, *places], until, totals.blocked)
            yield from zip(places, found, strict=True)

    def _follow_steps(self) -> None:
        """Add the times in which the ranks communicated, and the step marks, in their order."""
        some = np.flatnonzero(self._timed & self._of_training)
        each, of, at = self._operations.of(some), self._of[some], self._at[some]
        on_cpu = np.flatnonzero(self._rows.p2p[of] & (each.flags & ev.ON_DEVICE == 0))
        first_wait: list[int | None] = [None] * len(self._ranks)
        marks: list[list[ev.Record | End]] = [[] for _ in self._ranks]
        for place, before in self._blocked_before_marks():
            marks[self._all.ring[place]].append(before.bounded(self._record(place)))
        number = self._mark.astype(np.int64)
        for rank, end in self._iterations():
            marks[rank].append(end)
            number[end.place] += 1
        #: Number of the stretch between two marks of one ring.
        stretch = np.cumsum(number) - number + self._all.ring
        begins = np.cumsum([0, *(len(of_rank) + 1 for of_rank in marks)])
        rings, first = np.unique(each.ring[on_cpu], return_index=True)
        for ring, before in zip(rings.tolist(), stretch[at[on_cpu[first]]].tolist(), strict=True):
            first_wait[ring] = before - int(begins[ring])
        steps = [totals.steps for totals in self._ranks]
        section = BatchSteps(steps, marks, first_wait)
        index = {id(union): target for target, union in enumerate(section.targets)}
        target = np.array([index[id(cell.busy)] for cell in self._rows.cells], np.int64)[of]
        busy = Busy(stretch[at], target, each.start, each.end)
        if len(on_cpu):  # only the wait for a message counts
            start, ring = busy.start.copy(), each.ring[on_cpu]
            start[on_cpu] = np.maximum(start[on_cpu], busy.end[on_cpu] - each.waited[on_cpu] * 1000)
            waits = np.array([index.get(id(rank.unions().get(None)), 0) for rank in steps], np.int64)[ring]
            waited = Busy(busy.stretch[on_cpu], waits, start[on_cpu], busy.end[on_cpu])
            busy = Busy(*map(np.append, busy._replace(start=start), waited))
        in_step = self._of_training & (~self._message | (self._operations.flags & ev.ON_DEVICE != 0))
        untimed = np.flatnonzero(self._untimed & in_step)
        late = self._operations.of(untimed)
        section.add(busy, Untimed(stretch[self._at[untimed]], late.ring, late.launch))
        for totals in self._ranks:
            totals.begun = totals.begun or totals.steps.totals.count > 0

    def _iterations(self) -> Iterator[tuple[int, End]]:
        """Yield the ends of iterations of the ranks without marks, with the index of the rank; their places are in the section."""
        if all(totals.marked for totals in self._ranks):
            return
        bounds = np.searchsorted(self._operations.ring, np.arange(len(self._ranks) + 1)).tolist()
        operations, of_root_ns = self._repeatable(), self._of_root_ns()
        for ring, (totals, (since, until)) in enumerate(zip(self._ranks, pairwise(bounds), strict=True)):
            if not totals.marked and since < until:
                some = slice(since, until)
                rooted_ns = None if of_root_ns is None else of_root_ns[some] - (of_root_ns[since - 1] if since else 0)
                for end in totals.steps.iterations.feed(operations.some(some), self._message[some], rooted_ns):
                    yield ring, end._replace(place=int(self._at[since + end.place]))

    def _of_root_ns(self) -> Ints | None:
        """Return the time up to each operation in those in which ranks wait for a root; ``None``: there are none."""
        of_root = np.array([cell.op in ev.FROM_ROOT for cell in self._rows.cells], np.bool_)
        if not of_root.any():
            return None
        each = self._operations
        return np.cumsum(np.where(of_root[self._of] & self._timed, each.end - each.start, 0))

    def _repeatable(self) -> Operations:
        """Return what of the operations repeats in a cycle."""
        each = self._operations
        codes = [
            key.op | (key.size_log2 + 1 if cell.op in ev.SAME_SIZE else 0) << CLASS_SHIFT | key.group << GROUP_SHIFT
            for cell in self._rows.cells
            for key in (cell.key,)
        ]
        code = np.array(codes, np.int64)[self._of]
        if self._message.any():
            code += np.where(self._message, (each.peer + 1 & _PEERS) << PEER_SHIFT, 0)
        return Operations(code, each.seq, each.launch, each.end)


def _lists(columns: Columns, *names: str) -> Iterator[tuple[int, ...]]:
    return zip(*(getattr(columns, name).tolist() for name in names), strict=True)
