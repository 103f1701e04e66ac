"""The timeline of a job on one node in parts that are sent to another node, in pages of limited size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from commwatch_agent.history.history import History
from commwatch_agent.history.operations import place_of
from commwatch_agent.model.cells import GroupInfo
from commwatch_agent.model.node_counters import CounterSample
from commwatch_agent.model.views import TraceOperation
from commwatch_agent.report.chrome_trace import TraceMark, TraceStep
from commwatch_agent.report.timeline_export import NodeTrace
from commwatch_agent.report.timeline_source import Source

#: 2.8 hours.
_MOST_SAMPLES = 2_000


class Row(NamedTuple):
    """A ``TraceOperation``; ``op``, ``group``, ``dtype`` and ``part`` are indexes of the part's lists."""

    rank: int
    op: int
    group: int
    seq: int
    peer: int
    tag: int
    size: int | None
    dtype: int
    launch_ns: int
    start_ns: int
    end_ns: int
    flags: int
    timing: int
    part: int


class End(NamedTuple):
    """When a collective ended."""

    group_id: str
    seq: int
    end_ns: int


@dataclass(frozen=True)
class TimelinePart:
    """A page of the timeline of a job's latest run on one node, latest end first. Times are Unix time in ns, by the node's clock."""

    #: Each with the host's name.
    ranks: dict[int, str]
    restart: int
    #: Begin of the run, begin of the window, and end of the run's last operation or step, plus 1.
    origin_ns: int
    from_ns: int
    until_ns: int
    groups: list[GroupInfo]
    ops: list[str]
    dtypes: list[str | None]
    parts: list[str | None]
    operations: list[Row]
    #: Those that ended in the time of this page's operations.
    steps: list[TraceStep]
    #: As in ``NodeTrace``, and marks; in the first page.
    ends: list[End]
    marks: list[TraceMark]
    #: The latest measurements of the node, at most ``_MOST_SAMPLES``; in the first page.
    samples: list[CounterSample]
    #: To be sent for the next page; ``None``: there is none.
    cursor: str | None

    def __post_init__(self) -> None:
        every = (
            (self.groups, [row.group for row in self.operations]),
            (self.ops, [row.op for row in self.operations]),
            (self.dtypes, [row.dtype for row in self.operations]),
            (self.parts, [row.part for row in self.operations]),
        )
        if any(not 0 <= index < len(names) for names, indexes in every for index in indexes):
            raise ValueError("an index without a name")


class Page(NamedTuple):
    """Which page of which part of a job's history is wanted.

    Args:
        last_s: the seconds at the end of the job; ``None``: all of it.
        from_ns: as in the first page; ``None``: this is the first.
        cursor: from the page before; ``None``: this is the first.
        most: most operations.
        since_ns: as in ``timeline_export.Window``, and so is ``until_ns``.
    """

    last_s: float | None
    from_ns: int | None
    cursor: str | None
    most: int
    since_ns: int = 0
    until_ns: int | None = None


def part_of(path: Path, job_id: str, page: Page, marks: Iterable[TraceMark]) -> TimelinePart:
    """Return a page of the timeline; raise ``ValueError`` for a cursor that no page has."""
    before = None if page.cursor is None else place_of(page.cursor)
    with History(path) as history:
        source = Source(history, job_id, page.until_ns)
        from_ns = source.begin_ns(page.last_s, page.since_ns) if page.from_ns is None else page.from_ns
        until_ns = source.until_ns if before is None else before[0]
        found = list(islice(source.operations(from_ns, source.until_ns, before), page.most + 1))
        more = len(found) > page.most
        del found[page.most :]
        least_ns = found[-1][0][0] if more else from_ns
        steps = list(source.steps(least_ns, until_ns)) if least_ns < until_ns else []
        ends = source.shared_ends(from_ns) if before is None else {}
        samples = deque(source.samples(from_ns) if before is None else (), _MOST_SAMPLES)
    groups, ops = dict[GroupInfo, int](), dict[str, int]()
    dtypes, parts = dict[str | None, int](), dict[str | None, int]()
    rows = [
        Row(
            one.rank, ops.setdefault(one.op, len(ops)), groups.setdefault(one.group, len(groups)), one.seq, one.peer,
            one.tag, one.size, dtypes.setdefault(one.dtype, len(dtypes)), one.launch_ns, one.start_ns, one.end_ns,
            one.flags, one.timing, parts.setdefault(one.part, len(parts)),
        )
        for _, one in found
    ]  # fmt: skip
    return TimelinePart(
        ranks=dict(source.ranks),
        restart=source.restart,
        origin_ns=source.origin_ns,
        from_ns=from_ns,
        until_ns=source.until_ns,
        groups=list(groups),
        ops=list(ops),
        dtypes=list(dtypes),
        parts=list(parts),
        operations=rows,
        steps=steps,
        ends=[End(*at, end_ns) for at, end_ns in ends.items()],
        marks=[] if before is not None else list(marks),
        samples=list(samples),
        cursor="-".join(map(str, found[-1][0])) if more else None,
    )


def trace_of(first: TimelinePart, more: Callable[[TimelinePart], TimelinePart] | None = None) -> NodeTrace:
    """Return the timeline of another node.

    Args:
        first: the first page; its operations are removed from it while they are read.
        more: returns the page after a page; ``None``: the first page is all that there will be.
    """
    arriving = deque[TraceStep]()

    def operations() -> Iterator[TraceOperation]:
        page = first
        while True:
            yield from _operations(page)
            if page.cursor is None or more is None:
                return
            page = more(page)
            arriving.extend(page.steps)

    return NodeTrace(
        ranks=first.ranks,
        restart=first.restart,
        origin_ns=first.origin_ns,
        until_ns=first.until_ns,
        ends={(end.group_id, end.seq): end.end_ns for end in first.ends},
        operations=operations(),
        steps=first.steps,
        arriving=arriving,
        marks=first.marks,
        samples=first.samples,
        complete_ns=first.operations[-1].end_ns if more is None and first.cursor is not None else 0,
    )


def _operations(page: TimelinePart) -> Iterator[TraceOperation]:
    """Yield the operations of a page, and remove them from it: the first page is kept as long as the trace."""
    page.operations.reverse()
    while page.operations:
        row = page.operations.pop()
        names = {"op": page.ops[row.op], "dtype": page.dtypes[row.dtype], "part": page.parts[row.part]}
        yield TraceOperation(**{**row._asdict(), "group": page.groups[row.group], **names})
