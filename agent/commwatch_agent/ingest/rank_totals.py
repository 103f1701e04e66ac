"""The totals of one rank, from its records: cells, steps and waits. Pure: no clock, no file; times are parameters.

There is one ``RankTotals`` per ring. It counts in ``Cell``s, one per (group, op, size class) and 10 s of wall time; closed cells
go to the store, and their sums stay in memory for ``/metrics``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from commwatch.wire import events as ev
from commwatch.wire.modes import FULL
from commwatch.wire.ring import number_of
from commwatch_agent.ingest.collective_join import GroupJoin, Part
from commwatch_agent.ingest.own_time_state import Blocked, OwnTime
from commwatch_agent.ingest.step_accounting import StepAccounting
from commwatch_agent.ingest.tables.side_tables import SideTables
from commwatch_agent.ingest.tables.sketches import Sketches, coarse
from commwatch_agent.ingest.tables.weights import ENDED_KIND, KIND, PIECE
from commwatch_agent.model.bandwidth import bus_factor
from commwatch_agent.model.cells import (
    MOST_APART,
    MOST_KINDS,
    OTHER_ID,
    OTHER_KIND,
    SLOT_NS,
    Cell,
    CellKey,
    Compared,
    Counted,
    GroupInfo,
    counted,
)
from commwatch_agent.model.intervals import Intervals
from commwatch_agent.model.shares import Account
from commwatch_agent.model.sketch import merge, quantile

if TYPE_CHECKING:
    from commwatch_agent.ingest.columns import Codes
    from commwatch_agent.ingest.tables.rhythm import Rhythm
    from commwatch_agent.model.corruption.collectives import GroupChecks
    from commwatch_agent.model.corruption.replicas import SetJoin

#: Size of the kept latest records.
_TAIL_BYTES, _LEAST_TAIL_BYTES = 256 * ev.RECORD_SIZE, 16 * ev.RECORD_SIZE
#: Window of ``lately``.
LAST_NS = 60_000_000_000
NO_GROUP = ev.NO_GROUP
_JOINABLE = ev.SYMMETRIC | ev.TO_ROOT | ev.FROM_ROOT
#: Most durations that wait for their place in a sketch.
_MOST_CODES = 16_384
#: Slots of kinds that are kept for ``lately``: those of a minute, the one before, and some that ended early.
_SLOTS_LATELY = 8
#: Most records in live cells: an agent that starts counts them again.
MOST_UNROLLED = 1 << 18


class CellTotals:
    """A live cell with all that counting its records needs."""

    __slots__ = (
        "bins", "busy", "cell", "compared", "factor", "is_message", "join", "joinable", "key", "live", "number", "op", "owner", "symmetric", "union",
    )  # fmt: skip

    def __init__(
        self,
        owner: RankTotals,
        key: CellKey,
        op: str,
        factor: float,
        *,
        number: int,
        join: GroupJoin | None,
        union: Intervals | None,
    ) -> None:
        self.owner, self.key, self.op, self.factor = owner, key, op, factor
        #: Place among the rank's live cells.
        self.number = number
        #: Of collectives whose ranks are joined.
        self.join, self.joinable = join, join is not None
        #: Of messages: when some of their group and op were under way.
        self.union, self.is_message = union, union is not None
        self.symmetric = op in ev.SYMMETRIC
        self.busy = owner.steps.busy(owner.group(key.group).label)
        self.cell, self.compared = Cell(), owner.compared.setdefault(key.group, Compared())
        #: The cell's bins, while it is live.
        self.bins: dict[int, int] = {}
        self.cell.bins = self.bins
        #: False once the cell's slot has ended.
        self.live = True

    def close(self) -> None:
        """Stop counting and save memory, because incomplete collectives may keep this object for long."""
        self.bins = {}
        self.cell.pack()


class RankTotals(SideTables):
    """The totals of one ring, that is of one run of one rank.

    Args:
        identity: of the ring.
        joins: of the job, by ``group_id``.
        sets: of the job: its replicated parameters; default: none is compared.
        checked: of the job, by ``group_id``: its checked collectives; default: none is compared.
        account: of the memory that the tables take, in bytes; default: room of their own.
        settle: called when records are counted: keeps what the job's ranks share within its bounds.
    """

    def __init__(
        self,
        identity: dict[str, Any],
        joins: dict[str, GroupJoin],
        sets: dict[tuple[str, str], SetJoin] | None = None,
        checked: dict[str, GroupChecks] | None = None,
        *,
        account: Account | None = None,
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(identity, account)
        self.settle = settle
        self._joins, self.sets, self.checked = joins, {} if sets is None else sets, {} if checked is None else checked
        #: Closed cells not in the store yet; and the sums of all closed cells.
        self.closed: list[tuple[int, CellKey, Cell]] = []
        self.totals: dict[CellKey, Cell] = {}
        #: By group: sums over the operations that were passed to the group's join.
        self.compared: dict[int, Compared] = {}
        self.steps = StepAccounting(lambda group: self.group(group).size)
        self.lost = 0
        self.read = 0
        #: When the latest record ended (``None``: there is none), and the longest time without one between two of them.
        self.recorded_ns: int | None = None
        self.longest_pause_ns = 0
        #: The places of its work; ``None``: it has not recorded anything.
        self.rhythm: Rhythm | None = None
        #: Skipped records: their stamps are valid, but their values impossible.
        self.nonsense = 0
        #: The latest records, as whole records in bytes.
        self.tail = b""
        #: Lost records at the latest tick, and when they last grew: communication before that time is incomplete.
        self._lost_before = self._known_from_ns = 0
        self.own_time, self.blocked = OwnTime(), Blocked()
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
        #: Whether a step mark has come; and whether the first step has begun, which may be an iteration.
        self.marked = self.begun = False
        #: Number of the first record in the live cells.
        self.live_from: int | None = None
        self._slot_end = 0
        #: Number after the records that are being counted.
        self._until_n: int | None = None
        #: Number of records in the live cells.
        self._unrolled = 0
        self._sketches = Sketches(self.account)
        #: What is charged for steps and intervals, in bytes; and the number of kinds that are charged.
        self._steps_bytes = self._kinds = 0
        #: The rank has ended, and all its records are counted.
        self.is_over = False
        #: Size of ``tail``.
        self._tail_bytes = 0
        #: Durations that are not in the sketches of their live cells yet.
        self._codes: list[Codes] = []
        self._codes_held = 0

    # -- records ------------------------------------------------------------------------------

    def take(self, records: bytes, until_n: int | None, nonsense: int) -> None:
        """Keep records that are about to be counted; ``nonsense`` of them will be skipped."""
        self.read += len(records) // ev.RECORD_SIZE
        self._unrolled += len(records) // ev.RECORD_SIZE
        if not self._tail_bytes:
            self._tail_bytes = _TAIL_BYTES if self.account.take(_TAIL_BYTES) else _LEAST_TAIL_BYTES
        self.tail = (self.tail + records[-self._tail_bytes :])[-self._tail_bytes :]
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
            # Brings in numpy, which an agent without trainers does not need.
            from commwatch_agent.ingest.tables.bins import counted_bins

            slots = [*(cells for _, cells in self._ended), self._live]
            cells = {sums.number: sums.bins for slot in slots for sums in slot.values()}
            left = self._sketches.take(self._codes_held)
            for number, bin_number, count in counted_bins(self._codes):
                bins = cells[number]
                if bin_number in bins:
                    bins[bin_number] += count
                elif left:
                    left -= 1
                    bins[bin_number] = count
                else:
                    shared = coarse(bin_number)
                    bins[shared] = bins.get(shared, 0) + count
            self._sketches.give(left)
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

    def trim(self) -> None:
        """Drop the oldest intervals and steps if there are too many."""
        self.steps.trim(self._p2p_busy.values())
        while not self.account.change(self._steps_bytes, now := self._bytes_of_steps()):
            self.steps.halve()
            for p2p in self._p2p_busy.values():
                p2p.halve()
        self._steps_bytes = now

    def _bytes_of_steps(self) -> int:
        return self.steps.bytes() + PIECE * sum([len(p2p.starts) for p2p in self._p2p_busy.values()])

    def live(self, key: CellKey) -> CellTotals:
        """Return the live cell of operations; open one if there is none, or return the shared one if there are too many."""
        return self._live.get(key.place) or self._open(key, self._live)

    def _open(self, key: CellKey, cells: dict[int, CellTotals]) -> CellTotals:
        """Open a new cell among ``cells``, or return the shared one if there are too many keys."""
        group, op, *_ = key
        if key not in self.totals and key != OTHER_KIND and not self._may_have_kinds(1 + len(cells)):
            return cells.get(OTHER_KIND.place) or self._open(OTHER_KIND, cells)
        name, info = self.op_name(op), self.group(group)
        joinable = name in _JOINABLE and info.aligned and info.size > 1
        join = self._join(info) if joinable else None
        p2p = self._p2p_busy.setdefault((group, op), Intervals()) if name in ev.P2P else None
        factor = bus_factor(name, info.size) or 0.0
        sums = CellTotals(self, key, name, factor, number=self._opened, join=join, union=p2p)
        cells[key.place] = sums
        self._opened += 1
        return sums

    def _may_have_kinds(self, live: int) -> bool:
        """Return whether there is room for one more kind of operations, if that makes so many live ones; take it."""
        has_room = len(self.totals) + live <= MOST_KINDS and self.account.take(KIND)
        self._kinds += has_room
        return has_room

    def _join(self, info: GroupInfo) -> GroupJoin:
        """Return the join of a group."""
        join = self._joins.get(info.group_id)
        if join is None:
            join = self._joins[info.group_id] = GroupJoin(info.size, must_be_equal)
        join.ranks.add(self.rank)
        return join

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
        if self._unrolled > MOST_UNROLLED:
            self._end_slot()
            self.close_slots()
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
                total = self.totals.setdefault(sums.key, Cell())
                self._sketches.add(total, sums.cell)
                sums.close()
                self.closed.append((slot, sums.key, sums.cell))
                self._lately.append((slot, sums.key, sums.cell))
        if self._ended:
            self._sketches.settle(self.totals.values())
        self._ended.clear()
        while len(self._lately) > _SLOTS_LATELY * len(self.totals):
            self._lately.popleft()
        for number, sums in enumerate(self._live.values()):
            sums.number = number
        self._opened = len(self._live)

    def _end_slot(self) -> None:
        for sums in self._live.values():
            sums.live = False
            self.totals.setdefault(sums.key, Cell())  # counts as a kind
        self._ended.append((self._slot_end - SLOT_NS, self._live))
        self._live, self.live_from, self._unrolled = {}, None, 0
        self.forget_numbers()

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
        self.trim()
        if not self.is_over:  # the sums of all restarts of a job stay in memory
            self.is_over = True
            self._sketches.pack(self.totals.values())
            self.account.give((KIND - ENDED_KIND) * self._kinds)


def op_of(part: Part) -> tuple[str, int, str | None]:
    """Return op name, size in bytes and dtype name of a part."""
    sums: CellTotals = part.totals
    return sums.owner.op_name(part.op), part.size, part.dtype


def must_be_equal(part: Part) -> tuple[str, int | None, str | None]:
    """Return what must be equal on all ranks of a collective."""
    name, size, dtype = op_of(part)
    return name, size if name in ev.SAME_SIZE else None, dtype
