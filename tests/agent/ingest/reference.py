"""What the intake must compute, one record after the other: slow and plain. The tests compare the product with it.

Rings are read in turns; of one turn, all records of the first ring come before those of the second. Nothing here limits memory.
"""

from __future__ import annotations

from bisect import bisect_left
from statistics import median, median_low
from typing import Any, NamedTuple

from commwatch.wire import events as ev
from commwatch_agent.ingest.rank_totals import LAST_NS
from commwatch_agent.ingest.step_accounting import StepAccounting
from commwatch_agent.ingest.stragglers import BIN_NS
from commwatch_agent.model.bandwidth import bus_factor
from commwatch_agent.model.cells import (
    DURATION_BOUNDS_NS,
    MOST_APART,
    OTHER_ID,
    SLOT_NS,
    Cell,
    CellKey,
    Messages,
    Ran,
    StepRecord,
)
from commwatch_agent.model.intervals import Intervals
from commwatch_agent.model.names_file import Names
from commwatch_agent.model.sketch import bin_of

UNKNOWN_NS = 1 << 62


class Part(NamedTuple):
    """One rank's part in a collective."""

    owner: ReferenceRank
    key: CellKey
    op: int
    size: int
    dtype: str | None
    launch_ns: int
    end_ns: int
    duration_ns: int
    #: The rank's own time before it, and the run that it belongs to.
    own_ns: int
    run: int | None
    root: int | None
    #: How long the rank was blocked in it.
    blocked_ns: int

    @property
    def data(self) -> tuple[str, int | None, str | None]:
        """What must be equal on all ranks."""
        name = self.owner.names.op_name(self.op)
        return name, self.size if name in ev.SAME_SIZE else None, self.dtype


class ReferenceJoin:
    """The join of one group."""

    def __init__(self, size: int) -> None:
        self.size, self.unjoined = size, 0
        self.pending: dict[int, dict[int, Part]] = {}
        self.rooted: dict[int, dict[int, Part]] = {}
        self.odd: list[tuple[int, list[Part]]] = []
        self.late: dict[int, dict[int, int]] = {}
        self.runs: dict[int, tuple[int, int, int]] = {}
        #: How late a root came, by its rank, the operation and its size.
        self.roots: dict[tuple[int, int, int], list[int]] = {}
        #: By rank: until when its lateness to operations with a root is counted.
        self.until: dict[int, int] = {}

    def restart(self) -> None:
        """Another run of the job begins."""
        self.late, self.runs, self.rooted, self.roots, self.until = {}, {}, {}, {}, {}

    def symmetric(self, seq: int, part: Part) -> None:
        """Add a part of an operation whose ranks end together."""
        parts = self.pending.setdefault(seq, {})
        if parts and part.end_ns < max(each.launch_ns for each in parts.values()):
            self.unjoined += 1
            return
        if parts and (min(each.end_ns for each in parts.values()) < part.launch_ns or part.owner.rank in parts):
            self.unjoined += 1
            parts.clear()
        parts[part.owner.rank] = part
        if len(parts) == self.size:
            del self.pending[seq]
            self._complete(seq, list(parts.values()))

    def _complete(self, seq: int, parts: list[Part]) -> None:
        if len({part.data for part in parts}) > 1:
            self.odd = [*self.odd, (seq, parts)][-4:]
        if len({part.op for part in parts}) > 1:
            self.unjoined += 1
            return
        last = min(parts, key=lambda part: part.duration_ns)
        waits = [part.duration_ns - last.duration_ns for part in parts]
        others = [wait for part, wait in zip(parts, waits, strict=True) if part is not last]
        for part, wait in zip(parts, waits, strict=True):
            part.owner.waited(part, wait)
        lateness = last.owner.lateness_ns
        lateness[last.key.group] = lateness.get(last.key.group, 0) + int(median(others))
        self._own_lateness(parts, last.end_ns)

    def _own_lateness(self, parts: list[Part], end_ns: int) -> None:
        blocked_ns = max(part.blocked_ns for part in parts)
        known = [part.own_ns for part in parts if part.own_ns != UNKNOWN_NS]
        for part in parts:
            lateness, rank = max(0, blocked_ns - part.duration_ns), part.owner.rank
            run, before, counted = self.runs.get(rank, (None, 0, 0))
            if part.run is None or part.run != run:
                before = counted = 0
            if not known:
                own = lateness
            elif part.own_ns == UNKNOWN_NS:
                own = 0
            else:
                own = max(0, min(before + lateness, part.own_ns - median_low(known)))
            self._late(end_ns, rank, own - counted)
            if part.run is not None:
                self.runs[rank] = part.run, before + lateness, max(own, counted)

    def _late(self, end_ns: int, rank: int, own_ns: int) -> None:
        of_bin = self.late.setdefault(end_ns // BIN_NS, {})
        if own_ns > 0:
            of_bin[rank] = of_bin.get(rank, 0) + own_ns

    def with_root(self, seq: int, part: Part, root: int, to_root: bool) -> None:
        """Add a part of an operation with a root."""
        parts = self.rooted.setdefault(seq, {})
        if part.owner.rank in parts or any(each.op != part.op for each in parts.values()):
            parts.clear()
        parts[part.owner.rank] = part
        roots = {each.root for each in parts.values()}
        if len(parts) < self.size or (roots == {root} and root not in parts):
            return
        del self.rooted[seq]
        if len(roots) > 1 or len({each.data for each in parts.values()}) > 1:
            self.odd = [*self.odd, (seq, list(parts.values()))][-4:]
        if len(roots) > 1:
            return
        others = [each for rank, each in parts.items() if rank != root]
        waiting, awaited = ([parts[root]], others) if to_root else (others, [parts[root]])
        last = max((each.launch_ns for each in awaited), default=0)
        for each in parts.values():
            wait = max(0, min(each.duration_ns, last - each.launch_ns)) if each in waiting else 0
            each.owner.waited(each, wait)
        self._late(part.end_ns, part.owner.rank, 0)
        if not to_root:
            waiting = [each for each in others if not each.key.startup] or others
            awaited = [] if parts[root].key.startup else awaited
        known = [each.own_ns for each in [*waiting, *awaited]]
        if UNKNOWN_NS not in known and others:
            first, usual = median_low(each.launch_ns for each in waiting), median_low(known)
            for each in awaited:
                late_ns = max(0, min(each.launch_ns - first, each.own_ns - usual))
                late_ns = late_ns if to_root else self._beyond(each, late_ns)
                self._late(part.end_ns, each.owner.rank, self._once(each, late_ns))

    def _once(self, late: Part, late_ns: int) -> int:
        """How much of this lateness ends after what is counted of the rank already."""
        until, rank = late.launch_ns, late.owner.rank
        before = self.until.get(rank, 0)
        self.until[rank] = max(before, until) if late_ns else before
        return max(0, until - max(until - late_ns, before))

    def _beyond(self, root: Part, late_ns: int) -> int:
        of_place = self.roots.setdefault((root.owner.rank, root.op, root.size.bit_length()), [])
        of_place.append(late_ns)
        whole = [sorted(of_place[at - 32 : at]) for at in range(32, len(of_place) + 1, 32)]
        return late_ns - min(each[27] for each in whole) if whole else 0


class ReferenceRank:
    """The totals of one ring."""

    def __init__(self, identity: dict[str, Any], names: list[dict[str, Any]], joins: dict[str, ReferenceJoin]) -> None:
        self.rank: int = identity["rank"]
        self.offset_ns: int = identity["wall_offset_ns"]
        self.names, self.joins = Names(), joins
        self.names.learn(names)
        self.cells: dict[tuple[int, CellKey], Cell] = {}
        self.slot_ns, self.first_n, self.marked = 0, -1, False
        self.nonsense, self.on_device = 0, False
        self.failures: list[ev.Record] = []
        self.last_seq: dict[int, int] = {}
        self.launched_ns: dict[int, int] = {}
        self.unseen: dict[int, int] = {}
        self.blocked_ns, self.waits_seen, self.waits_not_known = 0, False, False
        self.lateness_ns: dict[int, int] = {}
        self.compared: dict[int, tuple[int, int]] = {}
        self.messages: dict[tuple[int, int, int], Messages] = {}
        self.ran: dict[tuple[CellKey, int], Ran] = {}
        self.waits_ns: dict[int, int] = {}
        self.steps, self.finished = StepAccounting(), list[StepRecord]()
        self.busy: dict[tuple[int, int], Intervals] = {}
        self.came_out_ns = self.ended_ns = 0
        self.marks_ns, self.run_ns, self.before_run_ns = (0, 0), -1, 0

    def ingest(self, records: bytes, until_n: int) -> None:
        """Count records, the last of which has number ``until_n - 1``."""
        first = until_n - len(records) // ev.RECORD_SIZE
        for number, fields in enumerate(ev.RECORD.iter_unpack(records), start=first):
            self._take(ev.Record._make(fields), number)

    def tick(self, now_ns: int) -> None:
        """Close the cells if their time is over, or far in the future; take the steps."""
        if self.slot_ns + SLOT_NS > now_ns + self.offset_ns + LAST_NS:
            self.slot_ns = 0
        self._roll(now_ns + self.offset_ns)
        self.steps.tick(now_ns)
        self.finished += self.steps.take()

    def waited(self, part: Part, wait_ns: int) -> None:
        """Count the wait of a part for late ranks, in the cell that is open now."""
        cell = self._cell(part.key)
        cell.wait_ns += wait_ns
        cell.joined += 1
        if self.messages and part.run is None:
            self._add_wait(part.end_ns, wait_ns)

    def _roll(self, wall_ns: int) -> None:
        if wall_ns < self.slot_ns + SLOT_NS and self.slot_ns:
            return
        for union in self.busy.values():
            union.forget(wall_ns - self.offset_ns - SLOT_NS)
        self.slot_ns, self.first_n = wall_ns - wall_ns % SLOT_NS, -1

    def _cell(self, key: CellKey) -> Cell:
        return self.cells.setdefault((self.slot_ns, key), Cell())

    def _take(self, record: ev.Record, number: int) -> None:
        if (
            not record.launch_ns <= record.end_ns < 1 << 62
            or record.start_ns > record.end_ns
            or record.size_bytes >= 1 << 62
        ):
            self.nonsense += 1
        elif record.op == ev.STEP_MARK:
            known = self.waits_seen and not self.waits_not_known and record.flags & ev.EXPOSED and not record.timing
            exposed = min(record.size_bytes, self.blocked_ns) if known else record.size_bytes
            self.steps.mark(record._replace(size_bytes=exposed))
            self.blocked_ns, self.waits_seen, self.waits_not_known = 0, False, False
            self.marked = True
            self.marks_ns = self.marks_ns[1], record.end_ns
        else:
            self._roll(record.end_ns + self.offset_ns)
            self.first_n = number if self.first_n < 0 else self.first_n
            self._blocked(record)
            if record.timing == ev.COUNTED:
                self._only_counted(record)
            else:
                self._operation(record)

    def _blocked(self, record: ev.Record) -> None:
        """Sum up how long threads were blocked in operations, up to the next mark."""
        seen, message = bool(record.flags & ev.WAIT_SEEN), self.names.op_name(record.op) in ev.P2P
        timed = not record.flags & (ev.FAILED | ev.UNTIMED) and record.timing != ev.COUNTED
        beside = record.flags & ev.BESIDE
        self.waits_not_known |= (not timed and not beside) or bool(record.flags & ev.ON_DEVICE)
        if timed and not beside:
            duration = record.end_ns - record.start_ns
            longest = min(duration, record.waited_us * 1000) if seen or message else duration
            self.blocked_ns += min(longest, 1 << 47)
            self.waits_seen |= seen and not message

    def _only_counted(self, record: ev.Record) -> None:
        self.came_out_ns = self.ended_ns = 0
        number, size = max(1, record.waited_us), record.size_bytes
        key = CellKey(_apart(record.group), record.op, ev.size_log2(-(-size // number)), not self.marked)
        self._cell(key).count_unmeasured(size, failed=False, number=number)
        if self.names.op_name(record.op) in ev.P2P:
            messages = self.messages.setdefault((key.group, record.op, -1), Messages())
            messages.count, messages.bytes = messages.count + number, messages.bytes + size
            return
        known = self.last_seq.get(record.group, record.seq)
        self.last_seq[record.group] = known if (known - record.seq) % (1 << 32) < 1 << 31 else record.seq
        self.launched_ns[record.group] = max(record.launch_ns, self.launched_ns.get(record.group, 0))
        self.unseen[record.group] = record.seq

    def _operation(self, record: ev.Record) -> None:
        name, flags = self.names.op_name(record.op), record.flags
        in_no_step = not self.marked or bool(flags & ev.BESIDE)
        key = CellKey(_apart(record.group), record.op, ev.size_log2(record.size_bytes), in_no_step)
        cell, message = self._cell(key), name in ev.P2P
        if not message and not flags & ev.FAILED:
            self.last_seq[record.group], self.launched_ns[record.group] = record.seq, record.launch_ns
        if flags & (ev.FAILED | ev.UNTIMED):
            cell.count_unmeasured(record.size_bytes, failed=bool(flags & ev.FAILED))
            self._unmeasured(record, message)
            return
        factor = bus_factor(name, self.names.group(key.group).size) or 0.0
        self._timed(cell, record, factor)
        if record.timing == ev.BY_NCCL and not record.aux & ev.SHARED_KERNEL:
            ran = self.ran.setdefault((key._replace(startup=False), record.aux), Ran())
            queued_ns = max(0, record.start_ns - record.launch_ns)
            ran.add(record.size_bytes, record.size_bytes * factor, record.end_ns - record.start_ns, queued_ns)
        came_out = self.came_out_ns
        stood_in = not flags & (ev.ASYNC | ev.ON_DEVICE | ev.BESIDE)
        if record.waited_us if message else stood_in:
            longer = record.waited_us * 1000 if message else record.end_ns - record.start_ns
            self.came_out_ns = record.end_ns if name in ev.SYMMETRIC else came_out and came_out + longer
        if message:
            self._message(cell, key, record)
        else:
            self._collective(cell, key, record, came_out)

    def _unmeasured(self, record: ev.Record, message: bool) -> None:
        if not record.flags & (ev.ASYNC | ev.ON_DEVICE | ev.BESIDE):
            self.came_out_ns = self.ended_ns = 0
        if record.flags & ev.FAILED:
            self.failures = [*self.failures, record][-16:]
            return
        if not message:
            self.unseen[record.group] = record.seq
        if not record.flags & ev.BESIDE and (not message or record.flags & ev.ON_DEVICE):
            self.steps.add_untimed([record.launch_ns])

    def _timed(self, cell: Cell, record: ev.Record, factor: float) -> None:
        duration, size = record.end_ns - record.start_ns, record.size_bytes
        cell.count += 1
        cell.bytes += size
        cell.duration_ns += duration
        cell.timed_bytes += size
        cell.bus_bytes += size * factor
        number = bin_of(duration)
        assert isinstance(cell.bins, dict)
        cell.bins[number] = cell.bins.get(number, 0) + 1
        cell.durations[bisect_left(DURATION_BOUNDS_NS, duration)] += 1

    def _message(self, cell: Cell, key: CellKey, record: ev.Record) -> None:
        start, end = record.start_ns, record.end_ns
        cell.busy_ns += self.busy.setdefault((key.group, key.op), Intervals()).add(start, end)
        cell.p2p_wait_ns += record.waited_us * 1000
        label = self.names.group(key.group).label
        if record.flags & ev.ON_DEVICE:
            self.on_device = True
            self._busy_in_step(record, label, start)
        else:
            waited_ns = max(start, end - record.waited_us * 1000)
            self._busy_in_step(record, label, waited_ns)
            if not record.flags & ev.BESIDE:
                self.steps.messages().add(waited_ns, end)
            self._add_wait(end, end - waited_ns)
        self.messages.setdefault((key.group, key.op, record.peer), Messages()).add(record.size_bytes, record.waited_us)

    def _busy_in_step(self, record: ev.Record, label: str, since_ns: int) -> None:
        if not record.flags & ev.BESIDE:
            self.steps.busy(label).add(since_ns, record.end_ns)

    def _add_wait(self, end_ns: int, waited_ns: int) -> None:
        self.waits_ns[end_ns // BIN_NS] = self.waits_ns.get(end_ns // BIN_NS, 0) + waited_ns

    def _collective(self, cell: Cell, key: CellKey, record: ev.Record, came_out_ns: int) -> None:
        name, info, flags, duration = (
            self.names.op_name(key.op),
            self.names.group(key.group),
            record.flags,
            record.end_ns - record.start_ns,
        )
        cell.busy_ns += duration
        self._busy_in_step(record, info.label, record.start_ns)
        joined = name in ev.SYMMETRIC | ev.TO_ROOT | ev.FROM_ROOT and info.aligned and info.size > 1
        if not joined or flags & ev.NOT_JOINED or (record.timing == ev.BY_WAIT and flags & ev.ASYNC):
            return
        own = self._own(record, came_out_ns)
        dtype = self.names.dtypes.get(record.dtype)
        root = None if name in ev.SYMMETRIC else record.peer
        blocked = min(duration, record.waited_us * 1000) if flags & ev.WAIT_SEEN else duration
        part = Part(
            self, key, key.op, record.size_bytes, dtype, record.launch_ns, record.end_ns, duration, *own, root, blocked
        )
        join = self.joins.setdefault(info.group_id, ReferenceJoin(info.size))
        if name in ev.SYMMETRIC:
            count, total = self.compared.get(key.group, (0, 0))
            self.compared[key.group] = count + 1, total + duration
            join.symmetric(record.seq, part)
        elif record.peer >= 0:
            join.with_root(record.seq, part, record.peer, name in ev.TO_ROOT)

    def _own(self, record: ev.Record, came_out_ns: int) -> tuple[int, int | None]:
        launch, since, run = record.launch_ns, came_out_ns, None
        if record.flags & (ev.ASYNC | ev.ON_DEVICE):
            before, latest = self.marks_ns
            run = max(came_out_ns, latest if latest <= launch else before)
            if run != self.run_ns:
                known = came_out_ns <= self.ended_ns <= launch
                self.run_ns, self.before_run_ns = run, self.ended_ns if known else came_out_ns
            since = 0 if record.flags & ev.ON_DEVICE else self.before_run_ns
        elif self.names.op_name(record.op) not in ev.SYMMETRIC and came_out_ns <= self.ended_ns <= launch:
            since = self.ended_ns
        self.ended_ns = max(self.ended_ns, record.end_ns)
        return launch - since if launch >= since > 0 else UNKNOWN_NS, run


def _apart(group: int) -> int:
    return OTHER_ID if MOST_APART <= group < ev.NO_GROUP else group
