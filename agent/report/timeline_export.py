"""Exports a job's timeline from the history as a Chrome trace, which Perfetto shows; in bounded memory."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from commwatch import __version__
from commwatch.collectors.wire import events as ev
from commwatch.history.history import History, StoredStep
from commwatch.history.operations import Reader
from commwatch.history.rows import RingRow, latest_run
from commwatch.report.chrome_trace import ChromeTrace, Event, TraceMark, TraceOperation, TraceStep

#: Compression of the file: a higher one takes twice the time, and saves a tenth.
LEVEL = 4


class Exported(NamedTuple):
    """What a trace has."""

    operations: int
    steps: int
    arrows: int
    marks: int
    #: There were more operations than the limit.
    cut: bool


class Window(NamedTuple):
    """A part of a job.

    Args:
        last_s: the seconds at its end; ``None``: all of it.
        most: most operations, the latest; ``None``: all.
    """

    last_s: float | None
    most: int | None = None


def export(path: Path, job_id: str, window: Window, marks: Iterable[TraceMark], out: IO[str]) -> Exported:
    """Write the trace of a job's latest run.

    Args:
        path: the history.
        marks: by Unix time in ns; those outside the window are left out.
    """
    with History(path) as history:
        history.freeze()
        rings = latest_run(history.rings(job_id))
        until_ns = history.last_end_ns(list(rings)) + 1
        from_ns = 0 if window.last_s is None else until_ns - int(window.last_s * 1e9)
        source = _Source(history, rings)
        trace = ChromeTrace(
            source.origin_ns, {ring.rank: str(ring.identity.get("host", "")) for ring in rings.values()}
        )
        limit = _Limit(window.most)
        inside = (mark for mark in marks if max(from_ns, source.origin_ns) <= mark.at_ns < until_ns)
        _write(
            out,
            chain(
                trace.processes(),
                trace.of_operations(limit.of(source.operations(from_ns, until_ns))),
                trace.of_steps(source.steps(from_ns, until_ns)),
                trace.of_marks(inside),
            ),
            {"job": job_id, "made by": f"commwatch {__version__}", "Unix time of 0, in ns": source.origin_ns},
        )
    return Exported(trace.operations, trace.steps, trace.arrows, trace.marks, limit.cut)


class _Limit:
    """Passes on so many values, and notes whether there were more."""

    def __init__(self, most: int | None) -> None:
        self._most, self.cut = most, False

    def of(self, values: Iterator[TraceOperation]) -> Iterator[TraceOperation]:
        yield from islice(values, self._most)
        self.cut = next(values, None) is not None


class _Source:
    """Operations and steps of a run on one clock: Unix time, by the clock of one of the rings.

    The ranks of a node share one monotonic clock. The Unix time of its begin, which each ring has, differs by what the clock was set meanwhile.
    """

    def __init__(self, history: History, rings: Mapping[int, RingRow]) -> None:
        self._history, self._rings, self._reader = history, rings, Reader(history, rings)
        offsets: dict[Any, int] = {}
        for ring in rings.values():
            offsets.setdefault(ring.identity.get("boot_id"), ring.wall_offset_ns)
        self._offset = {ring.id: offsets[ring.identity.get("boot_id")] for ring in rings.values()}
        begins = [ring.started_ns - ring.wall_offset_ns + self._offset[ring.id] for ring in rings.values()]
        #: Begin of the run.
        self.origin_ns = min(begins, default=0)

    def operations(self, from_ns: int, until_ns: int) -> Iterator[TraceOperation]:
        """Yield the operations that ended in the window, latest end first."""
        names, dtypes = self._reader.names, self._reader.dtypes
        for ring, record in self._reader.records(from_ns, until_ns):
            offset = self._offset[ring.id]
            yield TraceOperation(
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
            )

    def steps(self, from_ns: int, until_ns: int) -> Iterator[TraceStep]:
        """Yield the steps that ended in the window."""
        for ring in self._rings.values():
            shift = self._offset[ring.id] - ring.wall_offset_ns
            for step in self._history.each_step(from_ns, until_ns, [ring.id]):
                yield _step(ring.rank, step, shift)


def _step(rank: int, step: StoredStep, shift_ns: int) -> TraceStep:
    times = step.start_ns + shift_ns, step.end_ns + shift_ns
    return TraceStep(rank, step.seq, *times, step.comm_ns, step.exposed_ns, step.p2p_wait_ns, step.long)


def _write(out: IO[str], events: Iterable[Event], about: Mapping[str, object]) -> None:
    """Write a trace in the JSON object format, one event a line."""
    encode = json.JSONEncoder(separators=(",", ":")).encode
    out.write(f'{{"displayTimeUnit":"ms","otherData":{encode(about)},"traceEvents":[')
    separator = "\n"
    for event in events:
        out.write(separator)
        out.write(encode(event))
        separator = ",\n"
    out.write("\n]}\n")


@contextmanager
def writing(path: Path) -> Iterator[IO[str]]:
    """Yield a text file that becomes ``path`` when it is complete, compressed if the name ends in ``.gz``; raise ``OSError``."""
    hidden = path.with_name(f".{path.name}.new")
    try:
        with (
            gzip.open(hidden, "wt", LEVEL, encoding="utf-8")
            if path.suffix == ".gz"
            else hidden.open("w", encoding="utf-8") as out
        ):
            yield out
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)
