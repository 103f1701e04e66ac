"""What the history of a node has for the timeline of a job: the operations and steps of its latest run, on one clock."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from commwatch.wire import events as ev
from commwatch.wire.numbers import NUMBERS, hull
from commwatch_agent.history.history import GroupSpan, History, StoredStep
from commwatch_agent.history.operations import Cursor, Reader, records_of
from commwatch_agent.history.rows import RingRow, latest_run
from commwatch_agent.model.cells import GroupInfo
from commwatch_agent.model.node_counters import CounterSample
from commwatch_agent.model.views import TraceOperation
from commwatch_agent.report.chrome_trace import TraceStep, compares
from commwatch_agent.report.profile_trace import PlacedProfile, ProfileTrace

#: Most collectives by which the clocks of nodes are compared; most places in the history that they are read from, of all groups of a
#: rank together, and least of each group.
_MOST_ENDS, _MOST_PLACES, _LEAST_PLACES = 4096, 32, 8
#: Most difference of one duration, from times in seconds as doubles.
_SAME_NS = 2_000


class Source:
    """Operations and steps of a run on one clock: Unix time, by the clock of one of the rings.

    The ranks of a node share one monotonic clock. The Unix time of its begin, which each ring has, differs by what the clock was set meanwhile.

    Args:
        until_ns: end of the part that is wanted, in Unix time in ns: the run is the latest that began before it. ``None``: there is none.
        in_pieces: only what is known of the run is of one moment; no cursor stays open while an operation, step or measurement is used.
    """

    def __init__(self, history: History, job_id: str, until_ns: int | None = None, *, in_pieces: bool = False) -> None:
        history.freeze()
        begun = (ring for ring in history.rings(job_id) if until_ns is None or ring.started_ns < until_ns)
        self._history, self._rings, self._in_pieces = history, latest_run(begun), in_pieces
        rings = self._rings.values()
        self._reader = Reader(history, self._rings, in_pieces=in_pieces)
        offsets: dict[Any, int] = {}
        for ring in rings:
            offsets.setdefault(ring.identity.get("boot_id"), ring.wall_offset_ns)
        self._offset = {ring.id: offsets[ring.identity.get("boot_id")] for ring in rings}
        begins = [ring.started_ns - ring.wall_offset_ns + self._offset[ring.id] for ring in rings]
        #: Begin of the run; and the end of its last operation or step, plus 1, or of the part that is wanted.
        self.origin_ns = min(begins, default=0)
        last_ns = history.last_end_ns(list(self._rings)) + 1
        self.until_ns = last_ns if until_ns is None else min(last_ns, until_ns)
        #: Each with the host's name.
        self.ranks: Mapping[int, str] = {ring.rank: str(ring.identity.get("host", "")) for ring in rings}
        self.restart = max((ring.restart for ring in rings), default=0)
        if in_pieces:
            history.thaw()

    def begin_ns(self, last_s: float | None, since_ns: int = 0) -> int:
        """Return where the last ``last_s`` s of the run begin (``None``: all of it), but not before ``since_ns``."""
        return since_ns if last_s is None else max(since_ns, self.until_ns - int(last_s * 1e9))

    def operations(
        self, from_ns: int, until_ns: int, before: Cursor | None = None, rank: int | None = None
    ) -> Iterator[tuple[Cursor, TraceOperation]]:
        """Yield the operations, of one rank or of all, that ended in the window and come after ``before``, latest end first, with their places."""
        reader = self._reader
        if rank is not None:
            of_rank = {ring.id: ring for ring in self._rings.values() if ring.rank == rank}
            reader = Reader(self._history, of_rank, in_pieces=self._in_pieces)
        for ring, record in reader.records(from_ns, until_ns, before):
            one, part = self._operation(ring, record), reader.parts.of(ring, record)
            place = record.end_ns + ring.wall_offset_ns, ring.id, record.stamp
            yield place, one if part is None else one._replace(part=part)

    def _operation(self, ring: RingRow, record: ev.Record) -> TraceOperation:
        names, offset = self._reader.names, self._offset[ring.id]
        return TraceOperation(
            rank=ring.rank,
            op=names.op(ring.id, record.op),
            group=names.group(ring.id, record.group),
            seq=record.seq,
            peer=record.peer,
            tag=record.tag,
            size=None if record.flags & ev.NO_SIZE else record.size_bytes,
            dtype=self._reader.dtypes.get((ring.id, record.dtype)),
            launch_ns=record.launch_ns + offset,
            start_ns=record.start_ns + offset,
            end_ns=record.end_ns + offset,
            flags=record.flags,
            timing=record.timing,
        )

    def steps(self, from_ns: int, until_ns: int) -> Iterator[TraceStep]:
        """Yield the steps that ended in the window."""
        for ring in self._rings.values():
            shift = self._offset[ring.id] - ring.wall_offset_ns
            for step in self._history.each_step(from_ns, until_ns, [ring.id]):
                yield _step(ring.rank, step, shift)

    def samples(self, from_ns: int) -> Iterator[CounterSample]:
        """Yield the measurements of the node from ``from_ns`` to the end of the run."""
        return self._history.node_samples(max(from_ns, self.origin_ns), self.until_ns)

    def placed(self, profiles: Iterable[ProfileTrace], from_ns: int) -> Iterator[PlacedProfile]:
        """Yield those of the traces that have a step of this run after ``from_ns``, by its clock."""
        for trace in profiles:
            shift_ns = self._shift_ns(trace)
            window = trace.begin_ns + shift_ns, trace.end_ns + shift_ns
            if trace.rank in self.ranks and window[1] >= max(from_ns, self.origin_ns) and window[0] < self.until_ns:
                yield PlacedProfile(trace, shift_ns, self._ends(trace.rank, *window))

    def _shift_ns(self, trace: ProfileTrace) -> int:
        """Return by how much the clock was set between the begin of the run and a profile, in ns; 0 if the history has no such steps.

        The history has the same step marks. Those of another run have the same numbers, but are not as far apart.
        """
        for ring in self._rings.values():
            steps = self._history.extent_of_steps(ring.id, *trace.marks) if ring.rank == trace.rank else None
            if steps is not None and abs(steps[1] - steps[0] - (trace.end_ns - trace.begin_ns)) <= _SAME_NS:
                return steps[1] + self._offset[ring.id] - ring.wall_offset_ns - trace.end_ns
        return 0

    def _ends(self, rank: int, from_ns: int, until_ns: int) -> dict[str, array[int]]:
        """Return the ends of a rank's symmetric collectives in the window by operation, earliest first."""
        ends: dict[str, array[int]] = {}
        for _, one in self.operations(from_ns, until_ns, rank=rank):
            if one.op in ev.SYMMETRIC and not one.flags & (ev.FAILED | ev.UNTIMED):
                ends.setdefault(one.op, array("q")).append(one.end_ns)
        return {op: found[::-1] for op, found in ends.items()}

    def shared_ends(self, from_ns: int) -> dict[tuple[str, int], int]:
        """Return ends of symmetric collectives of groups with ranks on other nodes, by group and number, from ``from_ns`` on.

        If there are many, only those near numbers that a power of two divides, so that few chunks are read. Another node, perhaps with
        another power, has many of the same.
        """
        shared = {at: group.group_id for at, group in self._reader.names.groups.items() if self._is_shared(group)}
        ranges: dict[str, tuple[int, int]] = {}
        for span, group_id in self._spans(shared, from_ns):
            more = span.seq_from, span.seq_until
            ranges[group_id] = hull((ranges.get(group_id, more), more))
        places = max(_LEAST_PLACES, _MOST_PLACES // max(1, len(ranges)))
        near = max(1, _MOST_ENDS // (2 * places * max(1, len(ranges))))
        apart = {group_id: _apart((last - first) % NUMBERS, places) for group_id, (first, last) in ranges.items()}
        chunks: dict[int, dict[int, str]] = {}
        for span, group_id in self._spans(shared, from_ns):
            if -span.seq_from % apart[group_id] <= (span.seq_until - span.seq_from) % NUMBERS:
                chunks.setdefault(span.chunk, {})[span.small_id] = group_id
        ends: dict[tuple[str, int], int] = {}
        for number, groups in chunks.items():
            for one in self._in_chunk(number, groups, from_ns):
                at = one.group.group_id, one.seq
                if (one.seq + near) % apart[at[0]] < 2 * near:
                    ends[at] = max(ends.get(at, one.end_ns), one.end_ns)
        return ends

    def _is_shared(self, group: GroupInfo) -> bool:
        """Return whether a group may have ranks on other nodes."""
        return group.ranks is None or any(rank not in self.ranks for rank in group.ranks)

    def _spans(self, groups: Mapping[tuple[int, int], str], from_ns: int) -> Iterator[tuple[GroupSpan, str]]:
        """Yield the spans of groups, given by ring and number, with their ids."""
        for span in self._history.spans(from_ns, list(self._rings)):
            group_id = groups.get((span.ring, span.small_id))
            if group_id is not None:
                yield span, group_id

    def _in_chunk(self, number: int, groups: Collection[int], from_ns: int) -> Iterator[TraceOperation]:
        """Yield the symmetric operations of some groups in a chunk whose ends can be compared."""
        chunk = self._history.chunk(number)
        if chunk is None:
            return
        ring = self._rings[chunk.ring]
        for record in records_of(chunk):
            in_window = from_ns <= record.end_ns + ring.wall_offset_ns < self.until_ns
            if in_window and record.group in groups and not record.flags & (ev.FAILED | ev.UNTIMED):
                one = self._operation(ring, record)
                if one.op in ev.SYMMETRIC and compares(one):
                    yield one


def _apart(length: int, places: int) -> int:
    """Return the least power of two of which at most ``places`` multiples, or one more, lie in a range of this length."""
    return 1 << max(0, -(-length // places) - 1).bit_length()


def _step(rank: int, step: StoredStep, shift_ns: int) -> TraceStep:
    times = step.start_ns + shift_ns, step.end_ns + shift_ns
    return TraceStep(rank, step.seq, *times, step.comm_ns, step.exposed_ns, step.p2p_wait_ns, step.long)
