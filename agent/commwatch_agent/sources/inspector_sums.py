"""The sums over the JSON files of NCCL Inspector of one job."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from commwatch_agent.model.bandwidth import algbw, bus_factor
from commwatch_agent.model.cells import UNKNOWN_GROUP, GroupInfo
from commwatch_agent.model.witness_views import InspectorRow
from commwatch_agent.sources.nccl_groups import fitting
from commwatch_collectors.nccl.follow import Follower
from commwatch_collectors.nccl.input.lines import split_lines
from commwatch_collectors.nccl.inspector import Dropped, Reader, Timed

#: Sums kept of one job.
MOST_CELLS = 4096
#: Looks at the files without a record of a communicator after which its files are read to their ends.
_QUIET_LOOKS = 120


class Key(NamedTuple):
    """What the operations of one sum have in common."""

    rank: int
    comm: str
    op: str
    #: -1: no size.
    size_log2: int
    algorithm: str | None
    protocol: str | None
    timing: str


@dataclass
class Cell:
    """Sums over operations."""

    count: int = 0
    bytes: int = 0
    bus_bytes: float = 0.0
    seconds: float = 0.0


@dataclass
class Communicator:
    """A communicator of NCCL, as the files describe it."""

    size: int
    name: str | None
    #: (rank in the communicator, global rank).
    places: set[tuple[int, int]] = field(default_factory=set)
    #: Host and pid.
    processes: set[tuple[str, int]] = field(default_factory=set)
    #: Looks since its latest record.
    quiet: int = 0

    @property
    def places_taken(self) -> int:
        """How many places and processes are kept of it."""
        return len(self.places) + len(self.processes)


class JobFiles:
    """Sums over the JSON files of one job, of its present run.

    Args:
        most: sums kept.
    """

    def __init__(self, since: float, lock: threading.RLock, most: int) -> None:
        self.most = most
        self.follower = Follower(self._take, since)
        self.ranks: dict[tuple[str, int], int] = {}
        self.comms: dict[str, Communicator] = {}
        self._cells: dict[Key, Cell] = {}
        #: Operations that Inspector overwrote before it wrote them, by communicator and rank in it.
        self._drops: dict[tuple[str, int], int] = {}
        self._places = 0
        self.unknown_fields = self.left_out = 0
        #: By path: the reader, and the number of its latest line.
        self._readers: dict[str, tuple[Reader, int]] = {}
        self._skipped_bytes = 0
        self._lock = lock

    @property
    def unknown_lines(self) -> int:
        return sum(reader.unknown_lines for reader, _ in self._readers.values())

    @property
    def unread_versions(self) -> set[str]:
        """Unknown formats, some lines of which cannot be read."""
        return {version for reader, _ in self._readers.values() for version in reader.unread_versions}

    @property
    def records(self) -> int:
        """Operations in the sums."""
        return sum(cell.count for cell in self._cells.values())

    @property
    def dropped(self) -> int | None:
        """Operations that Inspector overwrote before it wrote them; ``None``: not reported."""
        return sum(self._drops.values()) if self._drops else None

    def _take(self, texts: Iterable[tuple[int, str]], path: str) -> None:
        for number, line in split_lines(texts):
            self._take_line(line, path, number)

    def _take_line(self, line: str, path: str, number: int) -> None:
        with self._lock:
            if self.follower.skipped_bytes != self._skipped_bytes:
                self._skipped_bytes = self.follower.skipped_bytes
                for reader, _ in self._readers.values():
                    reader.forget()
            reader, latest = self._readers.get(path) or (Reader(), 0)
            if number <= latest:  # the file was truncated or replaced
                reader.forget()
            self._readers[path] = (reader, number)
            record = reader.read(line)
            if record is None:
                return
            self.unknown_fields += record.unknown_fields
            rank = self.ranks.get(_process(record))
            if rank is None:
                self.left_out += 1
            elif isinstance(record, Dropped):
                self.left_out += not self._add_drops(record, rank)
            else:
                self.left_out += not self._add(record, rank)

    def _comm(self, record: Timed | Dropped, rank: int) -> Communicator | None:
        """Return the communicator of a record; ``None`` if it has another size than before."""
        comm = self.comms.get(record.comm)
        if comm is None:
            comm = self.comms[record.comm] = Communicator(record.group_size, record.comm_name)
        if comm.size != record.group_size:
            return None
        comm.name, comm.quiet = comm.name or record.comm_name, 0
        if self._places < 2 * self.most:
            self._places -= comm.places_taken
            comm.places.add((record.group_rank, rank))
            comm.processes.add(_process(record))
            self._places += comm.places_taken
        return comm

    def _add_drops(self, dropped: Dropped, rank: int) -> bool:
        source = dropped.comm, dropped.group_rank
        if source not in self._drops and len(self._drops) >= self.most:
            return False
        if self._comm(dropped, rank) is None:
            return False
        self._drops[source] = dropped.collectives + dropped.messages
        return True

    def _add(self, timed: Timed, rank: int) -> bool:
        size_log2 = -1 if timed.size_bytes is None else max(0, (timed.size_bytes - 1).bit_length())
        key = Key(rank, timed.comm, timed.op, size_log2, timed.algorithm, timed.protocol, timed.timing)
        if key not in self._cells and len(self._cells) >= self.most:
            return False
        comm = self._comm(timed, rank)
        if comm is None:
            return False
        cell = self._cells.setdefault(key, Cell())
        cell.count += 1
        cell.seconds += timed.duration_s
        cell.bytes += timed.size_bytes or 0
        cell.bus_bytes += (timed.size_bytes or 0) * (bus_factor(timed.op, comm.size) or 0.0)
        return True

    def forget(self, past: Set[tuple[str, int]]) -> None:
        """Forget communicators of earlier runs; call once for each look.

        A run makes its communicators anew, each with a new hash: the old ones must not use up the room of the runs that follow.

        Args:
            past: host and pid of the processes of earlier runs.
        """
        with self._lock:
            for name, comm in list(self.comms.items()):
                comm.quiet += 1
                if comm.quiet > _QUIET_LOOKS and comm.processes <= past:
                    self._places -= self.comms.pop(name).places_taken
            self._cells = {key: cell for key, cell in self._cells.items() if key.comm in self.comms}
            self._drops = {source: count for source, count in self._drops.items() if source[0] in self.comms}

    def rows(self, job: str, groups: list[GroupInfo]) -> Iterator[InspectorRow]:
        """Yield the sums as the API shows them."""
        where = {name: self._group(comm, groups) for name, comm in self.comms.items()}
        for key, cell in self._cells.items():
            group, group_id = where[key.comm]
            yield InspectorRow(
                job_id=job,
                rank=key.rank,
                group=group,
                group_id=group_id,
                comm=key.comm,
                group_size=self.comms[key.comm].size,
                op=key.op,
                size_bytes=None if key.size_log2 < 0 else 1 << key.size_log2,
                algorithm=key.algorithm,
                protocol=key.protocol,
                timing=key.timing,
                count=cell.count,
                bytes=cell.bytes,
                seconds=cell.seconds,
                algbw=algbw(cell.bytes, cell.seconds),
                busbw=algbw(cell.bus_bytes, cell.seconds),
            )

    def _group(self, comm: Communicator, groups: list[GroupInfo]) -> tuple[str, str | None]:
        """Return label and id of a communicator's process group, found by its members, then by its name."""
        fits = fitting(comm.size, comm.places, groups)
        if len(fits) > 1:
            fits = [group for group in fits if comm.name in (group.name, group.description)] or fits
        labels = {group.label for group in fits}
        label = labels.pop() if len(labels) == 1 else UNKNOWN_GROUP.label
        return label, fits[0].group_id if len(fits) == 1 else None


def _process(record: Timed | Dropped) -> tuple[str, int]:
    return record.host.partition(".")[0], record.pid
