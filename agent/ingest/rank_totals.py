"""The totals of one rank, from its records: cells, steps and waits. Pure: no clock, no file; times are parameters.

There is one ``RankTotals`` per ring. It counts in ``Cell``s, one per (group, op, size class) and 10 s of wall time; closed cells
go to the store, and their sums stay in memory for ``/metrics``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from math import log
from typing import Any

from commwatch.collectors.probe.governor import FULL
from commwatch.collectors.wire import events as ev
from commwatch.collectors.wire.ring import number_of
from commwatch.core.bandwidth import bus_factor
from commwatch.core.cells import (
    DURATION_BOUNDS_NS,
    LATEST_KNOWN,
    MOST_APART,
    MOST_KINDS,
    MOST_PEERS,
    OTHER_ID,
    OTHER_KIND,
    SLOT_NS,
    Cell,
    CellKey,
    Compared,
    Counted,
    Messages,
    Ran,
    counted,
)
from commwatch.core.intervals import Intervals
from commwatch.core.sketch import BINS_PER_E, merge, quantile
from commwatch.ingest.cell_totals import CellTotals, compare, must_be_equal
from commwatch.ingest.collective_join import NOT_KNOWN_NS, GroupJoin, Part
from commwatch.ingest.step_accounting import StepAccounting
from commwatch.ingest.stragglers import BIN_NS, MOST_BINS
from commwatch.ingest.trainer_state import TrainerState

_MOST_FAILURES = 16
#: Most groups with kept numbers, dropped groups included.
_MOST_NUMBERS = 2 * (MOST_APART + LATEST_KNOWN)
#: Size of the kept latest records.
_TAIL_BYTES = 256 * ev.RECORD_SIZE
#: Window of ``lately``.
LAST_NS = 60_000_000_000
NO_GROUP = ev.NO_GROUP
_JOINABLE = ev.SYMMETRIC | ev.TO_ROOT | ev.FROM_ROOT
_UNMEASURED = ev.FAILED | ev.UNTIMED
#: Operations that do not block their caller: asynchronous, or on a stream.
_NOT_STOOD_IN = ev.ASYNC | ev.ON_DEVICE


class RankTotals(TrainerState):
    """The totals of one ring, that is of one run of one rank.

    Args:
        identity: of the ring.
        joins: of the job, by ``group_id``.
    """

    def __init__(self, identity: dict[str, Any], joins: dict[str, GroupJoin]) -> None:
        super().__init__(identity)
        self._joins = joins
        #: Closed cells not in the store yet; and the sums of all closed cells.
        self.closed: list[tuple[int, CellKey, Cell]] = []
        self.totals: dict[CellKey, Cell] = {}
        #: By group: how long others waited for this rank; number of its latest collective that ended, or whose end is not seen.
        self.lateness_ns: dict[int, int] = {}
        self.last_seq: dict[int, int] = {}
        #: By group: sums over the operations that were passed to the group's join.
        self.compared: dict[int, Compared] = {}
        self.steps = StepAccounting()
        #: By (group, op, peer): sums over its messages and the waits for them.
        self.messages: dict[tuple[int, int, int], Messages] = {}
        #: By kind and what NCCL chose (``events.nccl_choice``): sums over the operations that NCCL timed.
        self.ran: dict[tuple[CellKey, int], Ran] = {}
        self.lost = 0
        self.read = 0
        #: Skipped records: their stamps are valid, but their values impossible.
        self.nonsense = 0
        #: The latest operations that raised.
        self.failures: deque[ev.Record] = deque(maxlen=_MOST_FAILURES)
        #: The latest records, as whole records in bytes.
        self.tail = b""
        #: Of a rank with messages: its waits for messages and for late ranks, by bins of ``stragglers.BIN_NS``.
        self.binned_waits_ns: dict[int, int] = {}
        #: By group: launch of the collective in ``last_seq``; number of the latest whose end was not seen, or that was only counted.
        self.launched_ns: dict[int, int] = {}
        self.unseen: dict[int, int] = {}
        #: Lost records at the latest tick, and when they last grew: communication before that time is incomplete.
        self._lost_before = self._known_from_ns = 0
        #: End of the latest operation that blocked this rank, and of its latest collective of any kind; 0: not known.
        self._came_out_ns = self._ended_ns = 0
        #: The latest two step marks; the key of the current run (``collective_join.OwnLateness``), and when the communication before it ended.
        self._marks_ns = 0, 0
        self._run_ns, self._before_run_ns = -1, 0
        #: There were messages on a GPU, whose waits are not known.
        self.on_device = False
        self._p2p_busy: dict[tuple[int, int], Intervals] = {}
        self._live: dict[int, CellTotals] = {}
        #: Cells closed within the last minute.
        self._lately: deque[tuple[int, CellKey, Cell]] = deque()
        #: Number of the first record in the live cells.
        self.live_from: int | None = None
        self._slot_end = 0

    # -- records ------------------------------------------------------------------------------

    def ingest(self, records: bytes, until_n: int | None = None) -> None:
        """Count whole records, in the order of the ring.

        Args:
            until_n: number of the record after the last one; default: from its stamp.
        """
        live, offset, bounds, bins_per_e = self._live, self.offset_ns, DURATION_BOUNDS_NS, BINS_PER_E
        last_seq, launched, rank, dtypes = self.last_seq, self.launched_ns, self.rank, self.dtypes
        self.read += len(records) // ev.RECORD_SIZE
        self.tail = (self.tail + records)[-_TAIL_BYTES:]
        for record in ev.RECORD.iter_unpack(records):
            stamp, op, dtype, group, peer, _, size, launch, seq, waited_us, start, end, flags, timing, aux, _ = record
            if not launch <= end < ev.MAX_PLAUSIBLE or start > end or size >= ev.MAX_PLAUSIBLE:
                self.nonsense += 1
                continue
            if op == ev.STEP_MARK or timing == ev.COUNTED:
                self._take_other(ev.Record._make(record), until_n)
                continue
            if end + offset >= self._slot_end:
                self.roll(end + offset)
            sums = live.get(
                op
                | (at := OTHER_ID if MOST_APART <= group < NO_GROUP else group) << 8
                | ((size - 1).bit_length() + 1 if size else 0) << 24
            )
            if sums is None:
                sums = self._open(at, op, size)
            if self.live_from is None:
                self.live_from = _number(stamp, until_n)
            p2p, cell, duration = sums.p2p, sums.cell, end - start
            if p2p is None and not flags & ev.FAILED:
                last_seq[group], launched[group] = seq, launch
            if flags & _UNMEASURED:
                cell.count_unmeasured(size, failed=bool(flags & ev.FAILED))
                self._note(record, flags)
                continue
            cell.count += 1
            cell.bytes += size
            cell.duration_ns += duration
            cell.timed_bytes += size
            cell.bus_bytes += size * sums.factor
            bins, number = sums.bins, int(log(duration) * bins_per_e) if duration > 1 else 0
            bins[number] = bins.get(number, 0) + 1
            cell.durations[bisect_left(bounds, duration)] += 1
            self._ran(sums, aux, size, duration) if timing == ev.BY_NCCL and not aux & ev.SHARED_KERNEL else None
            came_out = self._came_out_ns
            if waited_us or not (p2p is not None or flags & _NOT_STOOD_IN):
                # Waits in operations that are not symmetric are no part of the rank's own time, so its start moves by them.
                self._came_out_ns = end if sums.symmetric else came_out and came_out + (waited_us * 1000 or duration)
            if p2p is not None:
                cell.busy_ns += p2p.add(start, end)
                cell.p2p_wait_ns += waited_us * 1000
                self._message(sums, peer, size, waited_us, start_ns=start, end_ns=end, flags=flags)
                continue
            cell.busy_ns += duration
            sums.busy.add(start, end)
            # An end seen only when the caller waits is not the time when the ranks finished.
            if sums.join is not None and not flags & ev.UNALIGNED and not (timing == ev.BY_WAIT and flags & ev.ASYNC):
                own = self._own(launch, end, came_out, flags)
                part = Part(rank, op, launch, end, duration, sums, size, dtypes.get(dtype), *own)
                compare(sums, sums.join, seq, part, peer)
        self.steps.trim(self._p2p_busy.values())

    def _own(self, launch_ns: int, end_ns: int, came_out_ns: int, flags: int) -> tuple[int, int | None]:
        """Return ``own_ns`` and ``run`` of the operation's ``Part``."""
        if not flags & _NOT_STOOD_IN:
            since, run = came_out_ns, None
        else:
            since, run = self._before_run(launch_ns, came_out_ns)
            if flags & ev.ON_DEVICE:  # the trainer's clock does not show when the GPU was ready
                since = 0
        self._ended_ns = max(self._ended_ns, end_ns)
        return launch_ns - since if launch_ns >= since > 0 else NOT_KNOWN_NS, run

    def _before_run(self, launch_ns: int, came_out_ns: int) -> tuple[int, int]:
        """Return when the communication before an operation's run ended, in ns, and the key of the run."""
        before, latest = self._marks_ns
        run = max(came_out_ns, latest if latest <= launch_ns else before)
        if run != self._run_ns:
            known = came_out_ns <= self._ended_ns <= launch_ns
            self._run_ns, self._before_run_ns = run, self._ended_ns if known else came_out_ns
        return self._before_run_ns, run

    def _take_other(self, record: ev.Record, until_n: int | None) -> None:
        """Count a step mark, or a record of operations of one kind and size class that were only counted."""
        if record.op == ev.STEP_MARK:
            self.steps.mark(record)
            self._marks_ns = self._marks_ns[1], record.end_ns
            return
        self._came_out_ns = self._ended_ns = 0  # the waits in these operations are not known
        self.roll(record.end_ns + self.offset_ns)
        number, group = max(1, record.waited_us), record.group
        each = -(-record.size_bytes // number)
        at = OTHER_ID if MOST_APART <= group < NO_GROUP else group
        cell = self.cell(CellKey(at, record.op, ev.size_log2(each)))
        if self.live_from is None:
            self.live_from = _number(record.stamp, until_n)
        cell.count_unmeasured(record.size_bytes, failed=False, number=number)
        if self.op_name(record.op) in ev.P2P:  # their peers are not known
            messages = self._messages_with(at, record.op, -1)
            messages.count, messages.bytes = messages.count + number, messages.bytes + record.size_bytes
        else:
            self.last_seq[group] = max(record.seq, self.last_seq.get(group, -1))
            self.launched_ns[group] = max(record.launch_ns, self.launched_ns.get(group, 0))
            self.unseen[group] = record.seq

    def _message(
        self, sums: CellTotals, peer: int, size: int, waited_us: int, *, start_ns: int, end_ns: int, flags: int
    ) -> None:
        """Count what only messages have: a peer, and a wait for them.

        On the CPU only the wait counts as communication. On a GPU a message occupies its stream from start to end, and the
        waits for it are not known.
        """
        if flags & ev.ON_DEVICE:
            self.on_device = True
            sums.busy.add(start_ns, end_ns)
        else:
            waited_ns = max(start_ns, end_ns - waited_us * 1000)
            sums.busy.add(waited_ns, end_ns)
            self.steps.messages().add(waited_ns, end_ns)
            self.add_wait(end_ns, end_ns - waited_ns)
        self._messages_with(sums.key.group, sums.key.op, peer).add(size, waited_us)

    def add_wait(self, end_ns: int, waited_ns: int) -> None:
        """Add a wait of ``waited_ns`` that ended at ``end_ns``."""
        at = end_ns // BIN_NS
        self.binned_waits_ns[at] = self.binned_waits_ns.get(at, 0) + waited_ns
        if len(self.binned_waits_ns) > MOST_BINS:
            del self.binned_waits_ns[next(iter(self.binned_waits_ns))]

    def _ran(self, sums: CellTotals, choice: int, size: int, duration_ns: int) -> None:
        """Count an operation that NCCL timed."""
        kind = sums.key, choice
        if kind not in self.ran and len(self.ran) >= MOST_KINDS:
            kind = OTHER_KIND, 0
        self.ran.setdefault(kind, Ran()).add(size, size * sums.factor, duration_ns)

    def _messages_with(self, group: int, op: int, peer: int) -> Messages:
        whom = group, op, peer
        if whom not in self.messages and len(self.messages) >= MOST_PEERS:
            whom = group, op, -1
        return self.messages.setdefault(whom, Messages())

    def note_failure(self, record: ev.Record) -> None:
        """Store an operation in flight at its rank's death as failed."""
        self._note(record, ev.FAILED)

    def _note(self, record: tuple[int, ...], flags: int) -> None:
        """Store an operation that raised; of one without a seen end, its launch."""
        noted = ev.Record._make(record)
        if not flags & _NOT_STOOD_IN:
            self._came_out_ns = self._ended_ns = 0  # its end is not known
        if flags & ev.FAILED:
            self.failures.append(noted)
            return
        message = self.op_name(noted.op) in ev.P2P
        if not message:
            self.unseen[noted.group] = noted.seq
        if not message or flags & ev.ON_DEVICE:  # a message on the CPU counts only while a thread waits
            self.steps.untimed(noted.launch_ns)

    def _open(self, group: int, op: int, size: int) -> CellTotals:
        """Open a new cell, or return the shared one if there are too many keys."""
        key = CellKey(group, op, ev.size_log2(size))
        if key not in self.totals and len(self.totals) + len(self._live) >= MOST_KINDS and key != OTHER_KIND:
            return self._live.get(OTHER_KIND.place) or self._open(OTHER_ID, 0, 0)
        name, info = self.op_name(op), self.group(group)
        joinable = name in _JOINABLE and info.aligned and info.size > 1
        join = self._joins.setdefault(info.group_id, GroupJoin(info.size, must_be_equal)) if joinable else None
        p2p = self._p2p_busy.setdefault((group, op), Intervals()) if name in ev.P2P else None
        sums = CellTotals(self, key, name, bus_factor(name, info.size) or 0.0, join=join, p2p=p2p)
        self._live[key.place] = sums
        return sums

    def cell(self, key: CellKey) -> Cell:
        """Return the live cell of ``key``; open one if there is none."""
        sums = self._live.get(key.place)
        return (sums or self._open(key.group, key.op, 0 if key.size_log2 < 0 else 1 << key.size_log2)).cell

    def tick(self, wall_ns: int) -> None:
        """Close the cells if their slot has ended, or is in the future because of a wrong end; measure seconds without steps."""
        if self._slot_end > wall_ns + LAST_NS:
            self._close()
            self._lately.clear()
            self._slot_end = 0
        self.roll(wall_ns)
        now_ns = wall_ns - self.offset_ns
        if self.lost != self._lost_before:
            self._lost_before, self._known_from_ns = self.lost, now_ns
        known_from_ns = max(self.mode_since_ns, self._known_from_ns) if self.mode == FULL else ev.MAX_PLAUSIBLE
        self.steps.tick(min((each.begun_ns for each in self.pending()), default=now_ns), known_from_ns)

    def roll(self, wall_ns: int) -> None:
        """Close the cells if their slot has ended by ``wall_ns``; begin the next slot."""
        if wall_ns < self._slot_end:
            return
        self._close()
        for p2p in self._p2p_busy.values():
            p2p.forget(wall_ns - self.offset_ns - SLOT_NS)
        self._slot_end = wall_ns - wall_ns % SLOT_NS + SLOT_NS

    def _close(self) -> None:
        slot = self._slot_end - SLOT_NS
        while self._lately and self._lately[0][0] <= slot - LAST_NS:
            self._lately.popleft()
        for sums in self._live.values():
            sums.close()
            self.closed.append((slot, sums.key, sums.cell))
            self._lately.append((slot, sums.key, sums.cell))
            self.totals.setdefault(sums.key, Cell()).add(sums.cell)
        self._live.clear()
        self.live_from = None
        for numbers in (self.last_seq, self.launched_ns, self.unseen):
            if len(numbers) > _MOST_NUMBERS:
                for forgotten in numbers.keys() - self.groups.keys():
                    del numbers[forgotten]

    def usual_ns(self, group: int, op: int) -> float | None:
        """Return the median duration in ns of this group's op so far; ``None`` if none has ended."""
        bins: dict[int, int] = {}
        for key, cell in self.cells():
            if (key.group, key.op) == (group, op):
                merge(bins, cell.bins)
        return quantile(bins, 0.5)

    def cells(self) -> Iterator[tuple[CellKey, Cell]]:
        """Yield all that was counted since the agent opened this ring: sums of closed cells, and live cells."""
        yield from self.totals.items()
        yield from ((sums.key, sums.cell) for sums in self._live.values())

    def counted(self, job: str, key: CellKey, cell: Cell) -> Counted:
        """Return a cell with its names."""
        return counted(job, self.rank, self.group(key.group), self.op_name(key.op), key=key, cell=cell)

    def lately(self, now_ns: int) -> Iterator[tuple[int, CellKey, Cell]]:
        """Yield the cells of the last minute as (slot in wall time, key, cell); ``now_ns`` is on the trainer's clock."""
        since = now_ns + self.offset_ns - LAST_NS
        yield from (counted for counted in self._lately if counted[0] >= since)
        if self._slot_end > since:
            yield from ((self._slot_end - SLOT_NS, sums.key, sums.cell) for sums in self._live.values())

    def live_cells(self) -> Iterator[tuple[int, CellKey, Cell]]:
        """Yield the cells that are not in the store yet, as (slot, key, cell)."""
        yield from self.closed
        yield from ((self._slot_end - SLOT_NS, sums.key, sums.cell) for sums in self._live.values())

    def take_closed(self, count: int | None = None) -> list[tuple[int, CellKey, Cell]]:
        """Remove and return the oldest ``count`` closed cells (default: all)."""
        taken = self.closed[:count]
        del self.closed[: len(taken)]
        return taken

    def finish(self) -> None:
        """Close all cells and steps of a rank that has ended. Waits that other ranks add later open new cells."""
        self.steps.end()
        self._p2p_busy.clear()
        self._close()
        for cell in self.totals.values():
            if isinstance(cell.bins, dict):  # the sums of all restarts of a job stay in memory
                cell.pack()


def _number(stamp: int, until_n: int | None) -> int:
    """Return a record's number, from its stamp and the number after the last record; without that, its stamp."""
    return number_of(stamp, until_n if until_n is not None else stamp + 1)
