"""What the history of a node has for the timeline of a job: the operations and steps of its latest run, on one clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from commwatch.collectors.wire import events as ev
from commwatch.core.node_counters import CounterSample
from commwatch.history.history import History, StoredStep
from commwatch.history.operations import Cursor, Reader
from commwatch.history.rows import latest_run
from commwatch.report.chrome_trace import TraceOperation, TraceStep, compares

#: Most collectives by which the clocks of nodes are compared.
_MOST_ENDS = 4096


class Source:
    """Operations and steps of a run on one clock: Unix time, by the clock of one of the rings.

    The ranks of a node share one monotonic clock. The Unix time of its begin, which each ring has, differs by what the clock was set meanwhile.

    Args:
        until_ns: end of the part that is wanted, in Unix time in ns: the run is the latest that began before it. ``None``: there is none.
    """

    def __init__(self, history: History, job_id: str, until_ns: int | None = None) -> None:
        history.freeze()
        begun = (ring for ring in history.rings(job_id) if until_ns is None or ring.started_ns < until_ns)
        self._history, self._rings = history, latest_run(begun)
        rings = self._rings.values()
        self._reader = Reader(history, self._rings)
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

    def begin_ns(self, last_s: float | None, since_ns: int = 0) -> int:
        """Return where the last ``last_s`` s of the run begin (``None``: all of it), but not before ``since_ns``."""
        return since_ns if last_s is None else max(since_ns, self.until_ns - int(last_s * 1e9))

    def operations(
        self, from_ns: int, until_ns: int, before: Cursor | None = None
    ) -> Iterator[tuple[Cursor, TraceOperation]]:
        """Yield the operations that ended in the window and come after ``before``, latest end first, with their places."""
        names, dtypes = self._reader.names, self._reader.dtypes
        for ring, record in self._reader.records(from_ns, until_ns, before):
            offset = self._offset[ring.id]
            yield (
                (record.end_ns + ring.wall_offset_ns, ring.id, record.stamp),
                TraceOperation(
                    rank=ring.rank,
                    op=names.op(ring.id, record.op),
                    group=names.group(ring.id, record.group),
                    seq=record.seq,
                    peer=record.peer,
                    tag=record.tag,
                    size=None if record.flags & ev.NO_SIZE else record.size_bytes,
                    dtype=dtypes.get((ring.id, record.dtype)),
                    launch_ns=record.launch_ns + offset,
                    start_ns=record.start_ns + offset,
                    end_ns=record.end_ns + offset,
                    flags=record.flags,
                    timing=record.timing,
                ),
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

    def shared_ends(self, from_ns: int) -> dict[tuple[str, int], int]:
        """Return ends of symmetric collectives of groups with ranks on other nodes, by group and number, from ``from_ns`` on.

        If there are many, only those with numbers that a power of two divides: another node, with another power, has the same ones.
        """
        ends: dict[tuple[str, int], int] = {}
        apart = 1
        for _, one in self.operations(from_ns, self.until_ns):
            if (
                one.seq % apart
                or one.op not in ev.SYMMETRIC
                or one.flags & (ev.FAILED | ev.UNTIMED)
                or not compares(one)
            ):
                continue
            here = None if one.group.ranks is None else sum(rank in self.ranks for rank in one.group.ranks)
            if here is not None and here == one.group.size:
                continue
            at = one.group.group_id, one.seq
            ends[at] = max(ends.get(at, one.end_ns), one.end_ns)
            while len(ends) > _MOST_ENDS:
                apart *= 2
                ends = {at: end_ns for at, end_ns in ends.items() if not at[1] % apart}
        return ends


def _step(rank: int, step: StoredStep, shift_ns: int) -> TraceStep:
    times = step.start_ns + shift_ns, step.end_ns + shift_ns
    return TraceStep(rank, step.seq, *times, step.comm_ns, step.exposed_ns, step.p2p_wait_ns, step.long)
