"""Single operations from the raw records of the history: newest first, filtered, in pages."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from commwatch.wire import events as ev
from commwatch_agent.history.extents import ANY, Filter
from commwatch_agent.history.history import Chunk, History
from commwatch_agent.history.part_names import PartNames
from commwatch_agent.history.rows import RingRow
from commwatch_agent.model.bandwidth import algbw, bus_factor
from commwatch_agent.model.cells import UNKNOWN_GROUP, GroupInfo

#: Most records in the heap; beyond it the oldest are dropped, and another pass reads them again.
MOST_WAITING = 1 << 17
Cursor = tuple[int, int, int]
#: A record with its place, each number negated for the order newest first.
_Placed = tuple[int, int, int, ev.Record]


@dataclass(frozen=True)
class Operation:
    """One finished operation of one rank. ``None``: does not apply, or is not known."""

    #: Place in the history; also the cursor to continue from.
    id: str
    job_id: str
    restart: int
    rank: int
    group: str
    group_id: str
    group_size: int
    op: str
    seq: int
    peer: int | None
    tag: int | None
    dtype: str | None
    size_bytes: int | None
    #: Unix time in seconds: when it was called, when it could begin, when its end was seen.
    launch_at: float
    start_at: float
    end_at: float
    duration_s: float | None
    algbw: float | None
    busbw: float | None
    p2p_wait_s: float | None
    is_async: bool
    failed: bool
    timing: str
    aligned: bool
    #: What NCCL chose for it, as its profiler plugin reports.
    algorithm: str | None
    protocol: str | None
    channels: int | None
    #: NCCL ran it in one kernel with others, and its times are those of all of them.
    shared_kernel: bool
    #: The channel whose kernel ended last, from 0, and how long before it that of the first channel ended; by NCCL's profiler plugin.
    last_channel: int | None
    channels_apart_s: float | None
    #: The part of the model that it carries: a bucket of DDP with its parameters, or a unit of FSDP2. ``None``: not known, or not certain.
    part: str | None = None


def place_of(operation_id: str) -> Cursor:
    """Return the place in an operation id: end in ns, ring, stamp; raise ``ValueError`` for other text."""
    end, ring, stamp = (int(part) for part in operation_id.split("-"))
    return end, ring, stamp


class Names(NamedTuple):
    """What numbers in records mean, by (ring, number)."""

    groups: Mapping[tuple[int, int], GroupInfo]
    ops: Mapping[tuple[int, int], str]

    def group(self, ring: int, number: int) -> GroupInfo:
        """Return a group."""
        return self.groups.get((ring, number), UNKNOWN_GROUP)

    def op(self, ring: int, code: int) -> str:
        """Return the name of an operation."""
        return ev.OPS[code - 1] if 1 <= code <= len(ev.OPS) else self.ops.get((ring, code), "unknown")


class Reader:
    """Turns records into operations; built once per query. Reads only the rings in ``rings``.

    Args:
        in_pieces: no cursor stays open while an operation is used (``History.chunks_in_pieces``).
    """

    def __init__(self, history: History, rings: Mapping[int, RingRow], *, in_pieces: bool = False) -> None:
        self._history, self._rings, self._ids, self._in_pieces = history, rings, list(rings), in_pieces
        self.names = Names(history.groups(self._ids), history.names("op", self._ids))
        self.dtypes = history.names("dtype", self._ids)
        self.parts = PartNames(history, rings, self.dtypes)

    def operation(self, ring: RingRow, record: ev.Record) -> Operation:
        """Return a record as an operation, with names and bandwidths."""
        op, group = self.names.op(ring.id, record.op), self.names.group(ring.id, record.group)
        size = None if record.flags & ev.NO_SIZE else record.size_bytes
        duration = None if record.flags & (ev.UNTIMED | ev.FAILED) else (record.end_ns - record.start_ns) / 1e9
        factor = bus_factor(op, group.size)
        rate = algbw(size, duration) if size is not None and duration is not None and op != "barrier" else None
        offset = ring.wall_offset_ns
        ends = ev.ChannelEnds() if op in ev.P2P else ev.channel_ends(record.timing, record.tag)
        return Operation(
            id=f"{record.end_ns + offset}-{ring.id}-{record.stamp}",
            job_id=ring.job,
            restart=ring.restart,
            rank=ring.rank,
            group=group.label,
            group_id=group.group_id,
            group_size=group.size,
            op=op,
            seq=record.seq,
            peer=record.peer if record.peer >= 0 else None,
            tag=record.tag if op in ev.P2P else None,
            dtype=self.dtypes.get((ring.id, record.dtype)),
            size_bytes=size,
            launch_at=(record.launch_ns + offset) / 1e9,
            start_at=(record.start_ns + offset) / 1e9,
            end_at=(record.end_ns + offset) / 1e9,
            duration_s=duration,
            algbw=rate,
            busbw=rate * factor if rate is not None and factor is not None else None,
            p2p_wait_s=record.waited_us / 1e6 if op in ev.P2P else None,
            is_async=bool(record.flags & ev.ASYNC),
            failed=bool(record.flags & ev.FAILED),
            timing=ev.TIMING[record.timing] if record.timing < len(ev.TIMING) else "unknown",
            aligned=not record.flags & ev.UNALIGNED,
            **ev.nccl_choice(record.timing, record.aux)._asdict(),
            shared_kernel=record.timing == ev.BY_NCCL and bool(record.aux & ev.SHARED_KERNEL),
            last_channel=ends.last,
            channels_apart_s=ends.apart_s,
        )

    def _with_part(self, operation: Operation, ring: RingRow, record: ev.Record) -> Operation:
        """Return the operation of a record with the part of the model that it carries."""
        part = self.parts.of(ring, record)
        return operation if part is None else replace(operation, part=part)

    def filter(self, same: Mapping[str, str | int | None], least_s: float | None) -> Filter:
        """Return a condition that all operations meet which have these values and last so long; others may meet it, too.

        Args:
            same: ``op``, ``group``, ``group_id``, ``seq``, as fields of an operation; ``None``: any.
        """
        op, seq = same.get("op"), same.get("seq")
        names = (("label", same.get("group")), ("group_id", same.get("group_id")))
        groups = [(name, value) for name, value in names if value is not None]
        known = not any(value == getattr(UNKNOWN_GROUP, name) for name, value in groups)
        return Filter(
            ops=None if op in (None, "unknown") else {ring: self._codes(ring, op) for ring in self._ids},
            groups=self._numbers(groups) if groups and known else None,
            # No operation has number -1, or one that SQLite cannot read.
            seq=None if not isinstance(seq, int) else seq if 0 <= seq < 1 << 32 else -1,
            # A little less, because seconds are rounded.
            least_ns=int(min(least_s, 4e9) * (1 - 1e-12) * 1e9) if least_s is not None and least_s > 0 else 0,
        )

    def _codes(self, ring: int, op: str | int | None) -> set[int]:
        named = {code for (of, code), name in self.names.ops.items() if of == ring and name == op}
        return named | ({ev.OP_CODE[op]} if isinstance(op, str) and op in ev.OP_CODE else set())

    def _numbers(self, same: list[tuple[str, str | int]]) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        for (ring, small_id), group in self.names.groups.items():
            if all(getattr(group, name) == value for name, value in same):
                found.setdefault(ring, set()).add(small_id)
        return found

    def newest_first(
        self,
        from_ns: int,
        until_ns: int,
        before: Cursor | None,
        wanted: Callable[[Operation], bool],
        *,
        go_on: Callable[[], object] = lambda: None,
        where: Filter = ANY,
    ) -> Iterator[Operation]:
        """Yield operations that ended in ``[from_ns, until_ns)``, newest first, only those after ``before`` in this order.

        Args:
            go_on: called before each chunk; an exception ends the search.
            where: all operations in ``wanted`` meet it; chunks without any that does are not read.
        """
        for ring, record in self.records(from_ns, until_ns, before, go_on=go_on, where=where):
            operation = self.operation(ring, record)
            if wanted(operation):
                yield self._with_part(operation, ring, record)

    def records(
        self,
        from_ns: int,
        until_ns: int,
        before: Cursor | None = None,
        *,
        go_on: Callable[[], object] = lambda: None,
        where: Filter = ANY,
    ) -> Iterator[tuple[RingRow, ev.Record]]:
        """Yield the records of ``newest_first`` with their rings; those that do not meet ``where`` are left out.

        Chunks of several ranks overlap in time, so they are merged.
        """
        last = yield from self._pass(from_ns, until_ns, before, go_on=go_on, where=where)
        while last is not None:
            last = yield from self._pass(from_ns, until_ns, last, go_on=go_on, where=where)

    def _pass(
        self,
        from_ns: int,
        until_ns: int,
        before: Cursor | None,
        *,
        go_on: Callable[[], object],
        where: Filter,
    ) -> Generator[tuple[RingRow, ev.Record], None, Cursor | None]:
        """Yield records like ``records``, but only down to a place; return it, or ``None`` if there are no more.

        One pass may not be enough, because chunks with wrong ends in the far future overlap all others.
        """
        until_ns, last = until_ns if before is None else min(until_ns, before[0] + 1), None
        # Records, because operations take more memory, and not all are wanted.
        heap: list[_Placed] = []
        for chunk in self._chunks(from_ns, until_ns, where):
            go_on()
            # No later chunk has a record newer than this one's end.
            while heap and -heap[0][0] > chunk.until_ns:
                yield self._newest(heap)
            ring = self._rings[chunk.ring]
            for record in records_of(chunk):
                if where is not ANY and not where.matches(ring.id, record):
                    continue
                place = (record.end_ns + ring.wall_offset_ns, ring.id, record.stamp)
                if self._in_pieces and place[0] > chunk.until_ns:
                    continue
                if (
                    from_ns <= place[0] < until_ns
                    and (before is None or place < before)
                    and (last is None or place > last)
                ):
                    heapq.heappush(heap, (-place[0], -place[1], -place[2], record))
            if len(heap) > MOST_WAITING:
                heap = sorted(heap)[: MOST_WAITING // 2]
                end, of, stamp, _ = heap[-1]
                last = -end, -of, -stamp
        while heap:
            yield self._newest(heap)
        return last

    def _chunks(self, from_ns: int, until_ns: int, where: Filter) -> Iterator[Chunk]:
        if self._in_pieces:
            return self._history.chunks_in_pieces(from_ns, until_ns, self._ids)
        return self._history.chunks(from_ns, until_ns, self._ids, where)

    def _newest(self, heap: list[_Placed]) -> tuple[RingRow, ev.Record]:
        """Remove the newest record from the heap; return it with its ring."""
        _, ring, _, record = heapq.heappop(heap)
        return self._rings[-ring], record

    def collective(self, group_id: str, seq: int) -> list[Operation]:
        """Return the operations of one collective, by rank; of the latest run if several have the group."""
        found: dict[tuple[str, int], Operation] = {}
        for chunk, small_id in self._history.chunks_with(group_id, seq):
            ring = self._rings.get(chunk.ring)
            if ring is None:
                continue
            for record in records_of(chunk):
                if record.group == small_id and record.seq == seq and record.op not in _P2P_CODES:
                    operation = self._with_part(self.operation(ring, record), ring, record)
                    at = operation.job_id, operation.rank
                    if at not in found or found[at].end_at < operation.end_at:
                        found[at] = operation
        if not found:
            return []
        newest = max(found.values(), key=lambda operation: operation.end_at)
        # No rank finishes a symmetric operation before all begin it; an earlier end belongs to an earlier run.
        of_run = [operation for (job, _), operation in found.items() if job == newest.job_id]
        together = [o for o in of_run if o.op not in ev.SYMMETRIC or o.end_at >= newest.launch_at]
        return sorted(together, key=lambda operation: operation.rank)


_P2P_CODES = frozenset(ev.OP_CODE[op] for op in ev.P2P)


def records_of(chunk: Chunk) -> Iterator[ev.Record]:
    """Yield the operations of a chunk, without step marks and operations that were only counted."""
    records = (ev.Record._make(fields) for fields in ev.RECORD.iter_unpack(chunk.records))
    return (record for record in records if record.op != ev.STEP_MARK and record.timing != ev.COUNTED)
