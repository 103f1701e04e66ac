"""The totals of one rank, from its records: cells, steps and waits. Pure: no clock, no file; times are parameters.

There is one ``RankTotals`` per ring. It counts in ``Cell``s, one per (group, op, size class) and 10 s of wall time; closed cells
go to the store, and their sums stay in memory for ``/metrics``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from commwatch.collectors.probe.governor import FULL
from commwatch.collectors.wire import events as ev
from commwatch.collectors.wire.ring import number_of
from commwatch.core.bandwidth import bus_factor
from commwatch.core.cells import (
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
from commwatch.core.sketch import merge, quantile
from commwatch.ingest.cell_totals import CellTotals, must_be_equal
from commwatch.ingest.collective_join import GroupJoin
from commwatch.ingest.own_time_state import OwnTime
from commwatch.ingest.step_accounting import StepAccounting
from commwatch.ingest.stragglers import BIN_NS, MOST_BINS
from commwatch.ingest.trainer_state import TrainerState

if TYPE_CHECKING:
    from commwatch.core.corruption.collectives import GroupChecks
    from commwatch.core.corruption.replicas import SetJoin
    from commwatch.ingest.columns import Codes

_MOST_FAILURES = 16
#: Most groups with kept numbers, dropped groups included.
_MOST_NUMBERS = 2 * (MOST_APART + LATEST_KNOWN)
#: Size of the kept latest records.
_TAIL_BYTES = 256 * ev.RECORD_SIZE
#: Window of ``lately``.
LAST_NS = 60_000_000_000
NO_GROUP = ev.NO_GROUP
_JOINABLE = ev.SYMMETRIC | ev.TO_ROOT | ev.FROM_ROOT
#: Most durations that wait for their place in a sketch.
_MOST_CODES = 16_384


class RankTotals(TrainerState):
    """The totals of one ring, that is of one run of one rank.

    Args:
        identity: of the ring.
        joins: of the job, by ``group_id``.
        sets: of the job: its replicated parameters; default: none is compared.
        checked: of the job, by ``group_id``: its checked collectives; default: none is compared.
    """

    def __init__(
        self,
        identity: dict[str, Any],
        joins: dict[str, GroupJoin],
        sets: dict[tuple[str, str], SetJoin] | None = None,
        checked: dict[str, GroupChecks] | None = None,
    ) -> None:
        super().__init__(identity)
        self._joins, self.sets, self.checked = joins, {} if sets is None else sets, {} if checked is None else checked
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
        self.own_time = OwnTime()
        #: There were messages on a GPU, whose waits are not known.
        self.on_device = False
        self._p2p_busy: dict[tuple[int, int], Intervals] = {}
        #: The live cells, by ``CellKey.place``; and how many were opened.
        self._live: dict[int, CellTotals] = {}
        self._opened = 0
        #: Slots that have ended while records are counted, oldest first, with their cells.
        self._ended: list[tuple[int, dict[int, CellTotals]]] = []
        #: Cells closed within the last minute.
        self._lately: deque[tuple[int, CellKey, Cell]] = deque()
        #: Whether a step mark has come.
        self.marked = False
        #: Number of the first record in the live cells.
        self.live_from: int | None = None
        self._slot_end = 0
        #: Number after the records that are being counted.
        self._until_n: int | None = None
        #: Durations that are not in the sketches of their live cells yet.
        self._codes: list[Codes] = []
        self._codes_held = 0

    # -- records ------------------------------------------------------------------------------

    def ingest(self, records: bytes, until_n: int | None = None) -> None:
        """Count whole records, in the order of the ring.

        Args:
            until_n: number of the record after the last one; default: from its stamp.
        """
        from commwatch.ingest.batches import ingest  # brings in numpy, which an agent without trainers does not need
        from commwatch.ingest.columns import Batch

        ingest([Batch(self, records, until_n)])

    def recall(self, records: bytes) -> None:
        """Take up the steps of earlier records, whose sums are in the history already."""
        before = RankTotals(self.identity, {})
        before.groups, before.ops, before.dtypes = self.groups, self.ops, self.dtypes
        before.ingest(records)
        self.steps = before.steps

    def take(self, records: bytes, until_n: int | None, nonsense: int) -> None:
        """Keep records that are about to be counted; ``nonsense`` of them will be skipped."""
        self.read += len(records) // ev.RECORD_SIZE
        self.tail = (self.tail + records[-_TAIL_BYTES:])[-_TAIL_BYTES:]
        self.nonsense += nonsense
        self._until_n = until_n

    def begin_live(self, stamp: int) -> None:
        """Note the first record in the live cells, if they were empty."""
        if self.live_from is None:
            self.live_from = number_of(stamp, self._until_n if self._until_n is not None else stamp + 1)

    def add_bins(self, codes: Codes) -> None:
        """Add durations to the sketches of live cells; each code has the cell's number and the bin."""
        self._codes.append(codes)
        self._codes_held += len(codes)
        if self._codes_held > _MOST_CODES:
            self._fill_sketches()

    def _fill_sketches(self) -> None:
        """Count the durations in the bins of the live cells."""
        if self._codes:
            from commwatch.ingest.rows import counted_bins

            slots = [*(cells for _, cells in self._ended), self._live]
            cells = {sums.number: sums.bins for slot in slots for sums in slot.values()}
            for number, bin_number, count in counted_bins(self._codes):
                bins = cells[number]
                bins[bin_number] = bins.get(bin_number, 0) + count
            self._codes, self._codes_held = [], 0

    def count_only(self, record: ev.Record, ended: int, startup: bool) -> None:
        """Count a record of operations of one kind and size class that were only counted.

        Args:
            ended: as for ``cell``.
            startup: as in ``CellKey``.
        """
        number = max(1, record.waited_us)
        each = -(-record.size_bytes // number)
        at = OTHER_ID if MOST_APART <= record.group < NO_GROUP else record.group
        cell = self.cell(CellKey(at, record.op, ev.size_log2(each), startup), ended)
        cell.count_unmeasured(record.size_bytes, failed=False, number=number)
        if self.op_name(record.op) in ev.P2P:  # their peers are not known
            self.messages_with(at, record.op, -1).add(record.size_bytes, 0, number)

    def note_number(self, group: int, seq: int, launch_ns: int, unseen: bool) -> None:
        """Note the number and the launch of a group's latest collective; or that its end was not seen."""
        if unseen:
            self.unseen[group] = seq
        else:
            self.last_seq[group], self.launched_ns[group] = seq, launch_ns

    def note_counted(self, group: int, seq: int, launch_ns: int) -> None:
        """Note the number and the launch of a group's latest collective that was only counted."""
        self.last_seq[group] = max(seq, self.last_seq.get(group, -1))
        self.launched_ns[group] = max(launch_ns, self.launched_ns.get(group, 0))
        self.unseen[group] = seq

    def add_lateness(self, group: int, lateness_ns: int) -> None:
        """Add how long others waited for this rank."""
        self.lateness_ns[group] = self.lateness_ns.get(group, 0) + lateness_ns

    def trim(self) -> None:
        """Drop the oldest intervals if there are too many."""
        self.steps.trim(self._p2p_busy.values())

    def add_wait(self, end_ns: int, waited_ns: int) -> None:
        """Add a wait of ``waited_ns`` that ended at ``end_ns``."""
        at = end_ns // BIN_NS
        self.binned_waits_ns[at] = self.binned_waits_ns.get(at, 0) + waited_ns
        if len(self.binned_waits_ns) > MOST_BINS:
            del self.binned_waits_ns[next(iter(self.binned_waits_ns))]

    def ran_of(self, key: CellKey, choice: int) -> Ran:
        """Return the sums over the operations of a kind for which NCCL chose the same."""
        kind = key._replace(startup=False), choice
        if kind not in self.ran and len(self.ran) >= MOST_KINDS:
            kind = OTHER_KIND, 0
        return self.ran.setdefault(kind, Ran())

    def messages_with(self, group: int, op: int, peer: int) -> Messages:
        """Return the sums over the messages with a peer; -1: of all peers that are not told apart."""
        whom = group, op, peer
        if whom not in self.messages and len(self.messages) >= MOST_PEERS:
            whom = group, op, -1
        return self.messages.setdefault(whom, Messages())

    def note_failure(self, record: ev.Record) -> None:
        """Store an operation in flight at its rank's death as failed."""
        self.failures.append(record)

    def live(self, key: CellKey) -> CellTotals:
        """Return the live cell of operations; open one if there is none, or return the shared one if there are too many."""
        return self._live.get(key.place) or self._open(key, self._live)

    def _open(self, key: CellKey, cells: dict[int, CellTotals]) -> CellTotals:
        """Open a new cell among ``cells``, or return the shared one if there are too many keys."""
        group, op, *_ = key
        if key not in self.totals and len(self.totals) + len(cells) >= MOST_KINDS and key != OTHER_KIND:
            return cells.get(OTHER_KIND.place) or self._open(OTHER_KIND, cells)
        name, info = self.op_name(op), self.group(group)
        joinable = name in _JOINABLE and info.aligned and info.size > 1
        join = self._joins.setdefault(info.group_id, GroupJoin(info.size, must_be_equal)) if joinable else None
        if join is not None:
            join.ranks.add(self.rank)
        p2p = self._p2p_busy.setdefault((group, op), Intervals()) if name in ev.P2P else None
        factor = bus_factor(name, info.size) or 0.0
        sums = CellTotals(self, key, name, factor, number=self._opened, join=join, union=p2p)
        cells[key.place] = sums
        self._opened += 1
        return sums

    def cell(self, key: CellKey, ended: int | None = None) -> Cell:
        """Return the cell of ``key``; open one if there is none.

        Args:
            ended: the slot, counted from the first one that is not closed; default: the live one.
        """
        cells = self._live if ended is None or ended == len(self._ended) else self._ended[ended][1]
        return (cells.get(key.place) or self._open(key, cells)).cell

    def tick(self, wall_ns: int, read_ns: int | None = None) -> None:
        """Close the cells if their slot has ended, or is in the future because of a wrong end; measure seconds without steps.

        Args:
            read_ns: wall time; the records of all operations that ended before it are counted. Default: ``wall_ns``.
        """
        if self._slot_end > wall_ns + LAST_NS:
            self._end_slot()
            self.close_slots()
            self._lately.clear()
            self._slot_end = 0
        self.roll(wall_ns if read_ns is None else read_ns)
        now_ns = wall_ns - self.offset_ns
        if self.lost != self._lost_before:
            self._lost_before, self._known_from_ns = self.lost, now_ns
        known_from_ns = max(self.mode_since_ns, self._known_from_ns) if self.mode == FULL else ev.MAX_PLAUSIBLE
        self.steps.tick(min((each.begun_ns for each in self.pending()), default=now_ns), known_from_ns)

    def roll(self, wall_ns: int) -> None:
        """Close the cells if their slot has ended by ``wall_ns``; begin the next slot."""
        if wall_ns >= self._slot_end:
            self.begin_slot(wall_ns)
            self.forget_messages(wall_ns)
            self.close_slots()

    def begin_slot(self, wall_ns: int) -> None:
        """Begin the slot of ``wall_ns``; the cells of the slot before it take further records until ``close_slots``."""
        self._end_slot()
        self._slot_end = wall_ns - wall_ns % SLOT_NS + SLOT_NS

    def forget_messages(self, wall_ns: int) -> None:
        """Forget when messages were under way that ended long before ``wall_ns``."""
        for p2p in self._p2p_busy.values():
            p2p.forget(wall_ns - self.offset_ns - SLOT_NS)

    @property
    def slot_end_ns(self) -> int:
        """When the cells will be closed, in wall time."""
        return self._slot_end

    def close_slots(self) -> None:
        """Close the cells of the slots that have ended."""
        self._fill_sketches()
        for slot, cells in self._ended:
            while self._lately and self._lately[0][0] <= slot - LAST_NS:
                self._lately.popleft()
            for sums in cells.values():
                self.totals.setdefault(sums.key, Cell()).add(sums.cell)
                sums.close()
                self.closed.append((slot, sums.key, sums.cell))
                self._lately.append((slot, sums.key, sums.cell))
        self._ended.clear()
        for number, sums in enumerate(self._live.values()):
            sums.number = number
        self._opened = len(self._live)

    def _end_slot(self) -> None:
        for sums in self._live.values():
            sums.live = False
            self.totals.setdefault(sums.key, Cell())  # counts as a kind
        self._ended.append((self._slot_end - SLOT_NS, self._live))
        self._live, self.live_from = {}, None
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
        self._fill_sketches()
        yield from self.sums()

    def sums(self) -> Iterator[tuple[CellKey, Cell]]:
        """Yield as ``cells``, but the latest durations may not be in the sketches."""
        yield from self.totals.items()
        yield from ((sums.key, sums.cell) for sums in self._live.values())

    def counted(self, job: str, key: CellKey, cell: Cell) -> Counted:
        """Return a cell with its names."""
        return counted(job, self.rank, self.group(key.group), self.op_name(key.op), key=key, cell=cell)

    def lately(self, now_ns: int) -> Iterator[tuple[int, CellKey, Cell]]:
        """Yield the cells of the last minute as (slot in wall time, key, cell); ``now_ns`` is on the trainer's clock."""
        self._fill_sketches()
        since = now_ns + self.offset_ns - LAST_NS
        yield from (counted for counted in self._lately if counted[0] >= since)
        if self._slot_end > since:
            yield from ((self._slot_end - SLOT_NS, sums.key, sums.cell) for sums in self._live.values())

    def live_cells(self) -> Iterator[tuple[int, CellKey, Cell]]:
        """Yield the cells that are not in the store yet, as (slot, key, cell)."""
        self._fill_sketches()
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
        self._end_slot()
        self.close_slots()
        for cell in self.totals.values():
            if isinstance(cell.bins, dict):  # the sums of all restarts of a job stay in memory
                cell.pack()
