"""What is counted: the values that flow from the aggregate to metrics, store and API."""

from __future__ import annotations

from typing import Any, NamedTuple

from commwatch.core.sketch import Packed, encode, merge

SLOT_NS = 10_000_000_000
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
#: Steps the shares in /metrics look back over.
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
    """A number or count that a trainer has written.

    Raises:
        TypeError, ValueError, OverflowError: it is none, or so large that it could not be stored.
    """
    number = int(value)
    if not 0 <= number < 1 << 31:
        raise ValueError(f"{number} is out of range")
    return number


UNKNOWN_GROUP = GroupInfo("unknown", "unknown", "unknown", "", None, 0, False)
#: What shares a label where there are more than can each have their own.
OTHER = "other"
#: Groups of one ring, in the order of their first operation, that are counted each for itself. The rest share one, and are
#: never joined: a trainer may make groups without end.
MOST_APART = 256
#: Of the rest so many are known by name, the latest: those that something is in flight in.
LATEST_KNOWN = 256
#: The number of the one that the rest share, as large as a group's number in a record can be but for ``NO_GROUP``.
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
        #: Bytes of S, and times the bus factor, of the operations whose duration is known.
        self.timed_bytes = self.bus_bytes = 0.0
        #: Length of the union of their intervals, and the sum of their durations.
        self.busy_ns = self.duration_ns = 0
        #: Collectives joined over all ranks, and how long this rank waited in them for late ones.
        self.joined = self.wait_ns = 0
        #: How long a thread stood in a wait for a send or recv.
        self.p2p_wait_ns = 0
        self.failed = self.untimed = 0
        #: Sketch of the durations, and their histogram by ``DURATION_BOUNDS_NS``.
        self.bins: dict[int, int] | Packed = {}
        self.durations = [0] * (len(DURATION_BOUNDS_NS) + 1)

    def count_unmeasured(self, size: int, failed: bool, number: int = 1) -> None:
        """Count an operation that has no duration; or several, with their bytes in all."""
        if failed:
            self.failed += number
        else:
            self.untimed += number
            self.count += number
            self.bytes += size

    def pack(self) -> None:
        """Nothing is counted here for now: keep it in less memory."""
        self.bins = Packed(encode(self.bins))

    def copy(self) -> Cell:
        """A snapshot."""
        snapshot = Cell()
        snapshot.add(self)
        return snapshot

    def add(self, other: Cell) -> None:
        """Take in another cell's sums."""
        for name in CELL_SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if isinstance(self.bins, Packed):
            self.bins = dict(self.bins)
        merge(self.bins, other.bins)
        self.durations = [a + b for a, b in zip(self.durations, other.durations, strict=True)]


class CellKey(NamedTuple):
    """What a cell is about: group by its number in the ring, op by code, S <= 2**size_log2 (-1: no size)."""

    group: int
    op: int
    size_log2: int

    @property
    def place(self) -> int:
        """All of it in one number."""
        return self.op | self.group << 8 | (self.size_log2 + 1) << 24


#: Kinds of operations of one ring that are counted each for itself, those of the slot that has begun among them. The rest share one.
MOST_KINDS = 16_384
OTHER_KIND = CellKey(OTHER_ID, 0, -1)
#: Groups, ops and peers of one ring whose messages are counted each for itself. The rest have no peer.
MOST_PEERS = 16_384


class Counted(NamedTuple):
    """A cell with everything its numbers stand for."""

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


def counted(job: str, rank: int, group: GroupInfo, op: str, key: CellKey, cell: Cell) -> Counted:
    """Join a cell with its names."""
    size = None if key.size_log2 < 0 else 1 << key.size_log2
    return Counted(job, rank, group.label, group.group_id, group.size, op, size, cell, group.backend)


class Compared:
    """Symmetric operations of one rank and group whose durations compare with those of the group's other ranks."""

    __slots__ = ("count", "duration_ns")

    def __init__(self) -> None:
        self.count = self.duration_ns = 0


class Messages:
    """Sums over the messages between a rank and one peer, in one direction."""

    __slots__ = ("bytes", "count", "waited_us")

    def __init__(self) -> None:
        self.count = self.bytes = self.waited_us = 0

    def add(self, size: int, waited_us: int) -> None:
        """Count one that has ended."""
        self.count += 1
        self.bytes += size
        self.waited_us += waited_us


class StepRecord(NamedTuple):
    """A step with its communication; times in ns of the trainer's clock."""

    seq: int
    start_ns: int
    end_ns: int
    #: ``None``: not known, for operations without times ran in it, or some that were only counted.
    comm_ns: int | None
    #: At most ``comm_ns``; ``None`` where not known.
    exposed_ns: int | None
    #: Communication time by group label: each the union of that group's operations, so their sum may be more than ``comm_ns``.
    groups: tuple[tuple[str, int], ...] = ()
    #: Union of the waits for messages; ``None``: this rank has never waited for one, or messages were only counted.
    p2p_wait_ns: int | None = None
    #: It took far longer than its neighbours.
    long: bool = False


class StepSums(NamedTuple):
    """Steps added up, as far as their communication is known."""

    #: With those of which it is not.
    steps: int
    known: int
    #: Of those of which it is, in whatever unit.
    duration: float
    comm: float
    #: Those of which exposed communication is known, too: how many, how long they are, and how much of it there is.
    exposed_known: int
    exposed_duration: float
    exposed: float

    def shares(self) -> tuple[float, float | None] | None:
        """Comm share and exposed share of the steps together.

        Steps of which a share is not known are left out of it. ``None``: there are no others, or more than one in ten is such a one.
        """
        if not self.duration or 10 * (self.steps - self.known) > self.steps:
            return None
        enough = self.exposed_duration and 10 * (self.known - self.exposed_known) <= self.known
        return self.comm / self.duration, self.exposed / self.exposed_duration if enough else None
