"""Exports a job's timeline as a Chrome trace, which Perfetto shows; in bounded memory."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from heapq import merge
from itertools import chain, islice
from pathlib import Path
from typing import IO, NamedTuple

from commwatch import __version__
from commwatch_agent.history.history import History
from commwatch_agent.model.clocks import FIRST, Clock, compare
from commwatch_agent.model.node_counters import CounterSample
from commwatch_agent.model.views import TraceOperation
from commwatch_agent.report.chrome_trace import ChromeTrace, Event, TraceMark, TraceStep
from commwatch_agent.report.profile_trace import PlacedProfile, ProfileSlices, ProfileTrace
from commwatch_agent.report.timeline_source import Source


class Exported(NamedTuple):
    """What a trace has."""

    operations: int
    steps: int
    arrows: int
    marks: int
    #: There were more operations than the limit.
    cut: bool
    #: For each profile how well its clock fits (``ProfileSlices.notes``).
    profiles: Mapping[str, Mapping[str, object]]


class Window(NamedTuple):
    """A part of a job.

    Args:
        last_s: the seconds at its end; ``None``: all of it.
        most: most operations, the latest; ``None``: all.
        since_ns: what ended from this Unix time on, by the clock of each node.
        until_ns: what ended before this Unix time; ``None``: to the end.
    """

    last_s: float | None
    most: int | None = None
    since_ns: int = 0
    until_ns: int | None = None


class NodeTrace(NamedTuple):
    """The timeline of the latest run of a job on one node. Times are Unix time in ns, by the node's clock."""

    #: Each with the host's name.
    ranks: Mapping[int, str]
    restart: int
    #: Begin of the run; and the end of its last operation or step, plus 1.
    origin_ns: int
    until_ns: int
    #: Ends of some collectives of groups with ranks on other nodes, by group and number.
    ends: Mapping[tuple[str, int], int]
    #: Latest end first.
    operations: Iterable[TraceOperation]
    #: Steps; those in ``arriving`` come while operations are read.
    steps: Iterable[TraceStep]
    arriving: deque[TraceStep]
    marks: Iterable[TraceMark]
    samples: Iterable[CounterSample]
    #: Earlier operations may be missing.
    complete_ns: int = 0
    profiles: Iterable[PlacedProfile] = ()


def export(path: Path, job_id: str, window: Window, marks: Iterable[TraceMark], out: IO[str]) -> Exported:
    """Write the trace of a job's latest run on the node of a history.

    Args:
        path: the history.
        marks: by Unix time in ns; those outside the window are left out.
    """
    with own_trace(path, job_id, window, marks, alone=True) as node:
        return write([node], job_id, window, {}, out)


@contextmanager
def own_trace(
    path: Path,
    job_id: str,
    window: Window,
    marks: Iterable[TraceMark],
    *,
    alone: bool,
    profiles: Iterable[ProfileTrace] = (),
) -> Iterator[NodeTrace]:
    """Yield the timeline of a job on the node of a history; arguments as for ``export``. ``alone``: there are no other nodes.

    Args:
        profiles: kept traces of the job; those of other times are left out.
    """
    with History(path) as history:
        source = Source(history, job_id, window.until_ns, in_pieces=True)
        from_ns = source.begin_ns(window.last_s, window.since_ns)
        yield NodeTrace(
            ranks=source.ranks,
            restart=source.restart,
            origin_ns=source.origin_ns,
            until_ns=source.until_ns,
            ends={} if alone else source.shared_ends(from_ns),
            operations=(one for _, one in source.operations(from_ns, source.until_ns)),
            steps=source.steps(from_ns, source.until_ns),
            arriving=deque(),
            marks=marks,
            samples=source.samples(from_ns),
            profiles=source.placed(profiles, from_ns),
        )


def write(
    nodes: Sequence[NodeTrace], job_id: str, window: Window, about: Mapping[str, object], out: IO[str]
) -> Exported:
    """Write the trace of the nodes of a job, by the clock of the first of them. Nodes that only have an earlier run are left out.

    Args:
        about: more of the trace's metadata.
    """
    latest = max(node.restart for node in nodes)
    nodes = [node for node in nodes if node.restart == latest]
    clocks = compare([node.ends for node in nodes])
    placed = list(_placed(nodes, clocks, window))
    origin_ns = min(of.clock.of_first(of.node.origin_ns) for of in placed)
    trace = ChromeTrace(origin_ns, {rank: host for node in nodes for rank, host in node.ranks.items()})
    limit, profiles = _Limit(window.most), ProfileSlices(origin_ns)
    operations = merge(*map(_operations, placed), key=lambda one: -one.end_ns)
    _write(
        out,
        chain(
            trace.processes(),
            _with_arriving(trace, placed, limit.of(operations)),
            trace.of_steps(step for of in placed for step in _steps(of, of.node.steps)),
            trace.of_marks(_once(mark for of in placed for mark in _marks(of, origin_ns, window.until_ns))),
            *(
                trace.of_samples(number, _host(of.node), (each for each in _samples(of) if each.at_ns >= origin_ns))
                for number, of in enumerate(placed)
            ),
            chain.from_iterable(profiles.of(profile, of.clock) for of in placed for profile in of.node.profiles),
        ),
        {
            "job": job_id,
            "made by": f"commwatch {__version__}",
            "Unix time of 0, in ns": origin_ns,
            **({"clocks": _clocks(nodes, clocks)} if len(nodes) > 1 else {}),
            "profiles": profiles.notes,
            **about,
        },
    )
    cut = limit.cut or any(of.cut for of in placed)
    return Exported(trace.operations, trace.steps, trace.arrows, trace.marks, cut, profiles.notes)


class _Placed(NamedTuple):
    """A node, and what is written of it. Times are by the clock of the first node; by its own, if that cannot be compared."""

    node: NodeTrace
    clock: Clock
    #: Operations and steps are those that ended from the first time on; marks and measurements those between the others.
    from_ns: int
    begin_ns: int
    until_ns: int
    #: Operations that the window should have may be missing.
    cut: bool


def _placed(nodes: Sequence[NodeTrace], clocks: Sequence[Clock | None], window: Window) -> Iterator[_Placed]:
    """Yield the nodes with the window: the same for all nodes whose clocks can be compared, and that of its own clock for each of the others."""
    compared = [(node, clock) for node, clock in zip(nodes, clocks, strict=True) if clock is not None]
    for node, clock in zip(nodes, clocks, strict=True):
        together = [(node, FIRST)] if clock is None else compared
        until_ns = max(its.of_first(each.until_ns) for each, its in together)
        complete_ns = max(its.of_first(each.complete_ns) if each.complete_ns else 0 for each, its in together)
        begin_ns = window.since_ns
        if window.last_s is not None:
            begin_ns = max(begin_ns, until_ns - int(window.last_s * 1e9))
        # On one node, the window was applied when its history was read.
        from_ns = max(begin_ns, complete_ns) if len(nodes) > 1 else complete_ns
        yield _Placed(node, clock or FIRST, from_ns, max(begin_ns, from_ns), until_ns, complete_ns > begin_ns)


def _operations(of: _Placed) -> Iterator[TraceOperation]:
    """Yield the operations of a node in the window, by the clock of the first."""
    for one in of.node.operations:
        placed = one
        if of.clock is not FIRST:
            launch_ns, start_ns, end_ns = map(of.clock.of_first, (one.launch_ns, one.start_ns, one.end_ns))
            placed = one._replace(launch_ns=launch_ns, start_ns=start_ns, end_ns=end_ns)
        if placed.end_ns < of.from_ns:
            return
        yield placed


def _steps(of: _Placed, steps: Iterable[TraceStep]) -> Iterator[TraceStep]:
    """Yield the steps of a node that ended in the window, by the clock of the first."""
    for step in steps:
        start_ns, end_ns = map(of.clock.of_first, (step.start_ns, step.end_ns))
        if end_ns >= of.from_ns:
            yield step._replace(start_ns=start_ns, end_ns=end_ns)


def _marks(of: _Placed, origin_ns: int, until_ns: int | None) -> Iterator[TraceMark]:
    """Yield the marks of a node in the window, by the clock of the first. Ranks that hang end no operation, so marks may come after all of these."""
    begin_ns = max(of.begin_ns, origin_ns)
    for mark in of.node.marks:
        at_ns = of.clock.of_first(mark.at_ns)
        end_ns = None if mark.end_ns is None else of.clock.of_first(mark.end_ns)
        if begin_ns <= (at_ns if end_ns is None else end_ns) and (until_ns is None or at_ns < until_ns):
            yield mark._replace(at_ns=at_ns if end_ns is None else max(at_ns, begin_ns), end_ns=end_ns)


def _once(marks: Iterable[TraceMark]) -> Iterator[TraceMark]:
    """Yield the marks of all nodes without those that an earlier node has; an incident of which one node knows the ranks is shown at these."""
    found = {(mark.args.get("id", mark.at_ns), mark.name, mark.rank): mark for mark in reversed(list(marks))}
    known = {mark.args["id"] for mark in found.values() if "id" in mark.args and mark.rank is not None}
    yield from (mark for mark in found.values() if mark.rank is not None or mark.args.get("id") not in known)


def _samples(of: _Placed) -> Iterator[CounterSample]:
    """Yield the measurements of a node in the window, by the clock of the first."""
    placed = (sample._replace(at_ns=of.clock.of_first(sample.at_ns)) for sample in of.node.samples)
    yield from (sample for sample in placed if sample.at_ns >= of.begin_ns)


def _host(node: NodeTrace) -> str:
    return ", ".join(sorted(set(node.ranks.values())))


def _with_arriving(
    trace: ChromeTrace, placed: Sequence[_Placed], operations: Iterable[TraceOperation]
) -> Iterator[Event]:
    """Yield the events of operations, and of the steps that come with them, so that these do not pile up."""

    def steps() -> Iterator[TraceStep]:
        for of in placed:
            while of.node.arriving:
                yield from _steps(of, [of.node.arriving.popleft()])

    for event in trace.of_operations(operations):
        yield event
        if any(of.node.arriving for of in placed):
            yield from trace.of_steps(steps())
    yield from trace.of_steps(steps())


def _clocks(nodes: Sequence[NodeTrace], clocks: Sequence[Clock | None]) -> dict[str, object]:
    """Return how the clock of each host was compared with that of the first, for people who read the trace."""
    found: dict[str, object] = {}
    for node, clock in zip(nodes, clocks, strict=True):
        if clock is FIRST:
            says: object = "all times are by this clock"
        elif clock is None:
            says = (
                "not compared: too few collectives of groups with ranks on other nodes; times are by this host's clock"
            )
        else:
            says = {
                "ahead_ms": clock.offset_ns / 1e6,
                "drift_ppm": clock.drift * 1e6,
                "uncertainty_us": clock.uncertainty_ns / 1e3,
            }
        ranks = ", ".join(map(str, sorted(node.ranks)))
        found[f"{_host(node)}, ranks {ranks}"] = says
    return found


class _Limit:
    """Passes on so many values, and notes whether there were more."""

    def __init__(self, most: int | None) -> None:
        self._most, self.cut = most, False

    def of(self, values: Iterator[TraceOperation]) -> Iterator[TraceOperation]:
        yield from islice(values, self._most)
        self.cut = next(values, None) is not None


def _write(out: IO[str], events: Iterable[Event], about: Mapping[str, object]) -> None:
    """Write a trace in the JSON object format, one event a line; ``about`` is complete when all events have come."""
    encode = json.JSONEncoder(separators=(",", ":"), default=float).encode  # profiles have decimal numbers
    out.write('{"displayTimeUnit":"ms","traceEvents":[')
    separator = "\n"
    for event in events:
        out.write(separator)
        out.write(encode(event))
        separator = ",\n"
    out.write(f'\n],"otherData":{encode(about)}}}\n')
