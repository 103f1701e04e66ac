"""Cells: the sums that flow from the totals in memory to metrics, history and API. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from commwatch_agent.model.sketch import Packed, encode, merge, merged

SLOT_NS = 10_000_000_000
#: Most records of all ranks that are counted at a time.
MOST_TOGETHER = 1 << 14
#: Upper bounds in ns of the duration histogram (12 buckets with +Inf).
DURATION_BOUNDS_NS = [
    10_000,
    30_000,
    100_000,
    300_000,
    1_000_000,
    3_000_000,
    10_000_000,
    30_000_000,
    100_000_000,
    1_000_000_000,
    10_000_000_000,
]
#: Upper bounds of the size histogram as powers of two (8 buckets with +Inf).
SIZE_BOUNDS_LOG2 = [10, 14, 17, 20, 23, 26, 29]
#: Window of the shares in /metrics.
SHARE_WINDOW_NS = 60_000_000_000


class GroupInfo(NamedTuple):
    """A process group as one rank announced it."""

    group_id: str
    label: str
    name: str
    description: str
    ranks: tuple[int, ...] | None
    size: int
    aligned: bool
    #: torch's name of its backend; ``None``: not known.
    backend: str | None = None


def count_of(value: Any) -> int:
    """Return a number written by a trainer as an integer from 0 to 2**31 - 1.

    Raises:
        TypeError, ValueError, OverflowError: ``value`` is not such a number.
    """
    number = int(value)
    if not 0 <= number < 1 << 31:
        raise ValueError(f"{number} is out of range")
    return number


UNKNOWN_GROUP = GroupInfo("unknown", "unknown", "unknown", "", None, 0, False)
#: Shared label of what exceeds a limit on the number of labels.
OTHER = "other"
#: The first groups of one ring, up to this number, have cells of their own. The rest share cells and are never joined,
#: because a trainer may create any number of groups.
MOST_APART = 256
#: Names kept of the remaining groups: the latest, which operations in flight belong to.
LATEST_KNOWN = 256
#: Number of the shared group: the largest that a record can hold below ``NO_GROUP``.
OTHER_ID = 0xFFFE
OTHER_GROUP = GroupInfo(OTHER, OTHER, OTHER, "", None, 0, False)


#: The fields of a cell that are plain sums.
CELL_SUMS = (
    "count", "bytes", "timed_bytes", "bus_bytes", "busy_ns", "duration_ns", "joined", "wait_ns", "p2p_wait_ns", "failed", "untimed",
)  # fmt: skip


class Cell:
    """Sums over the operations of one rank, group, op and size class."""

    __slots__ = (
        "bins", "bus_bytes", "busy_ns", "bytes", "count", "duration_ns", "durations", "failed", "joined", "p2p_wait_ns", "timed_bytes", "untimed", "wait_ns",
    )  # fmt: skip

    def __init__(self) -> None:
        self.count = self.bytes = 0
        #: Over operations with a known duration: sum of S in bytes, and of S times the bus factor.
        self.timed_bytes = self.bus_bytes = 0.0
        #: Time in which they ran, overlaps counted once; and the sum of their durations.
        self.busy_ns = self.duration_ns = 0
        #: Collectives joined over all ranks, and how long this rank waited in them for late ranks.
        self.joined = self.wait_ns = 0
        #: How long a thread waited for sends and receives.
        self.p2p_wait_ns = 0
        self.failed = self.untimed = 0
        #: Sketch of the durations, and their histogram by ``DURATION_BOUNDS_NS``.
        self.bins: dict[int, int] | Packed = {}
        self.durations = [0] * (len(DURATION_BOUNDS_NS) + 1)

    def count_unmeasured(self, size: int, failed: bool, number: int = 1) -> None:
        """Count ``number`` operations without a duration; ``size`` is their bytes in total."""
        if failed:
            self.failed += number
        else:
            self.untimed += number
            self.count += number
            self.bytes += size

    def pack(self) -> None:
        """Encode the bins, to save memory while nothing is added."""
        self.bins = Packed(encode(self.bins))

    def copy(self) -> Cell:
        """Return an independent copy."""
        snapshot = Cell()
        snapshot.add(self)
        return snapshot

    def add(self, other: Cell) -> None:
        """Add the sums and the sketch of another cell."""
        self.add_sums(other)
        if isinstance(self.bins, Packed):
            self.bins = dict(self.bins)
        merge(self.bins, other.bins)

    def add_sums(self, other: Cell) -> None:
        """Add the sums and the histogram of another cell. Often called, so it is no loop over ``CELL_SUMS``."""
        self.count += other.count
        self.bytes += other.bytes
        self.timed_bytes += other.timed_bytes
        self.bus_bytes += other.bus_bytes
        self.busy_ns += other.busy_ns
        self.duration_ns += other.duration_ns
        self.joined += other.joined
        self.wait_ns += other.wait_ns
        self.p2p_wait_ns += other.p2p_wait_ns
        self.failed += other.failed
        self.untimed += other.untimed
        self.durations = [a + b for a, b in zip(self.durations, other.durations, strict=True)]


def sum_of(cells: Iterable[Cell]) -> Cell:
    """Return a new cell with the sums of cells, as ``Cell.add`` makes them one by one."""
    total, bins = Cell(), list[Mapping[int, int]]()
    for cell in cells:
        total.add_sums(cell)
        bins.append(cell.bins)
    total.bins = merged(bins)
    return total


class CellKey(NamedTuple):
    """Key of a cell: group number in the ring, op code, size class S <= 2**size_log2 (-1: no size)."""

    group: int
    op: int
    size_log2: int
    #: Whether the operations are in no step: before the rank's first step mark, or beside the training.
    startup: bool = False

    @property
    def place(self) -> int:
        """The key packed into one integer."""
        return self.op | self.group << 8 | (self.size_log2 + 1) << 24 | self.startup << 32


#: Most cell keys of one ring, those of the current slot included. Further operations share one key.
MOST_KINDS = 16_384
OTHER_KIND = CellKey(OTHER_ID, 0, -1)
#: Most (group, op, peer) keys of one ring. Further messages are counted without a peer.
MOST_PEERS = 16_384


class Counted(NamedTuple):
    """A cell with the names behind its numbers."""

    job_id: str
    rank: int
    group: str
    group_id: str
    group_size: int
    op: str
    #: Upper end of the size class in bytes, a power of two; ``None``: the op has no size.
    size: int | None
    cell: Cell
    #: torch's name of the group's backend; ``None``: not known.
    backend: str | None = None
    #: Number of the rank's node within an answer; 0: that of the agent.
    node: int = 0
    #: As in ``CellKey``.
    startup: bool = False


def counted(job: str, rank: int, group: GroupInfo, op: str, *, key: CellKey, cell: Cell) -> Counted:
    """Return a cell with its names."""
    size = None if key.size_log2 < 0 else 1 << key.size_log2
    return Counted(
        job, rank, group.label, group.group_id, group.size, op, size, cell, group.backend, startup=key.startup
    )


class Compared:
    """Sums over the symmetric operations of one rank and group whose durations are comparable across ranks."""

    __slots__ = ("count", "duration_ns")

    def __init__(self) -> None:
        self.count = self.duration_ns = 0


class Ran:
    """Sums over operations of one kind and size class that NCCL timed, and for which it chose the same."""

    __slots__ = ("apart_us", "bus_bytes", "bytes", "count", "duration_ns", "last", "queued_ns")

    def __init__(self) -> None:
        self.count = self.bytes = self.duration_ns = 0
        #: How many of them a channel ended last, and the sum of the times from the end of their first channel to that of their last.
        self.last: dict[int, int] = {}
        self.apart_us = 0
        #: From their launch to the begin of their kernels.
        self.queued_ns = 0
        self.bus_bytes = 0.0

    def add(self, size: int, bus_bytes: float, duration_ns: int, queued_ns: int, count: int = 1) -> None:
        """Count operations."""
        self.count += count
        self.bytes += size
        self.bus_bytes += bus_bytes
        self.duration_ns += duration_ns
        self.queued_ns += queued_ns

    def add_ends(self, last: int, apart_us: int, count: int = 1) -> None:
        """Note that a channel ended last in operations."""
        self.last[last] = self.last.get(last, 0) + count
        self.apart_us += apart_us


class Messages:
    """Sums over the messages between a rank and one peer, in one direction."""

    __slots__ = ("bytes", "count", "waited_us")

    def __init__(self) -> None:
        self.count = self.bytes = self.waited_us = 0

    def add(self, size: int, waited_us: int, count: int = 1) -> None:
        """Count finished messages."""
        self.count += count
        self.bytes += size
        self.waited_us += waited_us


class StepRecord(NamedTuple):
    """A step with its communication; times in ns of the trainer's clock."""

    seq: int
    start_ns: int
    end_ns: int
    #: ``None``: not known, because operations without times, or only counted, ran in it.
    comm_ns: int | None
    #: At most ``comm_ns``; ``None`` where not known.
    exposed_ns: int | None
    #: Communication time by group label, each a union of that label's operations; their sum may exceed ``comm_ns``.
    groups: tuple[tuple[str, int], ...] = ()
    #: Union of the waits for messages; ``None``: this rank has never waited for one, or operations were only counted.
    p2p_wait_ns: int | None = None
    #: It took far longer than its neighbours.
    long: bool = False


class StepSums(NamedTuple):
    """Sums over steps, and the shares that follow from them."""

    #: All steps, and those whose communication is known.
    steps: int
    known: int
    #: Sums over the known ones, all in one unit.
    duration: float
    comm: float
    #: Of these, the steps whose exposed communication is known: number, duration, exposed communication.
    exposed_known: int
    exposed_duration: float
    exposed: float

    def shares(self) -> tuple[float, float | None] | None:
        """Return comm share and exposed share (0 to 1) of the steps together.

        Steps without a known share are left out. ``None``: no step is left, or more than one in ten is left out.
        """
        if not self.duration or 10 * (self.steps - self.known) > self.steps:
            return None
        enough = self.exposed_duration and 10 * (self.known - self.exposed_known) <= self.known
        return self.comm / self.duration, self.exposed / self.exposed_duration if enough else None


class WaitSums(NamedTuple):
    """Sums over the operations of a slot, and the share of time spent waiting that follows from them."""

    #: Time of the ranks with operations in it.
    covered: float
    #: Of this, the time spent waiting for late ranks and for messages.
    waited: float
    #: Symmetric operations with a bandwidth, and how many of them have known waits.
    symmetric: float
    joined: float
    #: Ranks that did not run throughout the slot, and long steps: with these, time and steps do not compare.
    broken: float

    def share(self, comm: float | None) -> float | None:
        """Return the share of the steps spent waiting, at most ``comm``, the share of communication.

        ``None``: not known, as with waits for only some operations, or more waiting than communication.
        """
        measured = self.joined if self.symmetric else self.waited
        if comm is None or self.broken or not self.covered or not measured:
            return None
        # Waits are counted when the last rank is read: after a gap, in another slot.
        if 10 * abs(self.symmetric - self.joined) > self.symmetric:
            return None
        waiting = self.waited / self.covered
        return None if waiting > _ALIKE * comm else min(comm, waiting)


#: Waiting up to this factor above communication is still a part of it, because their slots differ a little.
_ALIKE = 1.2


NO_STEPS, NO_WAITS = StepSums(0, 0, 0, 0, 0, 0, 0), WaitSums(0, 0, 0, 0, 0)
_Sums = TypeVar("_Sums", StepSums, WaitSums)


def added(sums: Iterable[_Sums], nothing: _Sums) -> _Sums:
    """Return the sums of several ranks or slots together; ``nothing``: those of none."""
    return type(nothing)(*(sum(column) for column in zip(nothing, *sums, strict=True)))
