"""Queries about a job on all its nodes: an agent's own history, and what the agents of the other nodes answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from heapq import merge
from itertools import islice

from commwatch.wire.events import MAX_PLAUSIBLE
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.analysis.verdicts import merged_groups
from commwatch_agent.job.merging import merged_ranks
from commwatch_agent.model.cells import CELL_SUMS, DURATION_BOUNDS_NS, Cell, Counted
from commwatch_agent.model.views import GroupView, RankView, StepView

#: Bounds of a sketch's bins, and of the number in one, as it is packed.
_MOST_BINS, _MOST_IN_BIN = 1 << 15, 1 << 32


@dataclass(frozen=True)
class CellView:
    """Sums over the operations of one rank, group, op and size class, in a form that another agent can add up.

    The fields are those of ``cells.Counted`` and ``cells.Cell``: times in ns, ``size`` the upper end of the size class in bytes.
    """

    job_id: str
    rank: int
    group: str
    group_id: str
    group_size: int
    op: str
    size: int | None
    backend: str | None
    count: int
    bytes: int
    timed_bytes: float
    bus_bytes: float
    busy_ns: int
    duration_ns: int
    joined: int
    wait_ns: int
    p2p_wait_ns: int
    failed: int
    untimed: int
    #: Sketch of the durations: numbers of bins, and of the operations in each.
    bins: list[int]
    in_bins: list[int]
    #: Histogram of the durations.
    durations: list[int]
    #: Whether the operations came before the rank's first step mark.
    startup: bool = False

    def __post_init__(self) -> None:
        if len(self.bins) != len(self.in_bins) or len(self.durations) != len(DURATION_BOUNDS_NS) + 1:
            raise ValueError("columns of different lengths")
        sums = (getattr(self, name) for name in CELL_SUMS)
        if not (
            all(0 <= number < MAX_PLAUSIBLE for number in (*sums, *self.durations, self.size or 0))
            and all(0 <= number < _MOST_BINS for number in self.bins)
            and all(0 <= count < _MOST_IN_BIN for count in self.in_bins)
        ):
            raise ValueError("numbers out of range")


@dataclass(frozen=True)
class Cells:
    """Sums over a window; ``since`` and ``until`` bound the rollups used, in Unix seconds, as in a summary."""

    since: float | None
    until: float | None
    cells: list[CellView]


_NAMES = (*(field.name for field in fields(CellView)[:8]), "startup")


def view_of(one: Counted) -> CellView:
    """Return a cell in the form for other agents."""
    cell = one.cell
    bins = dict(cell.bins.items())
    names = {name: getattr(one, name) for name in _NAMES}
    sums = {name: getattr(cell, name) for name in CELL_SUMS}
    return CellView(**names, **sums, bins=list(bins), in_bins=list(bins.values()), durations=cell.durations)


def counted_of(view: CellView, node: int) -> Counted:
    """Return a cell that another agent has sent; ``node``: as in ``Counted``."""
    cell = Cell()
    for name in CELL_SUMS:
        setattr(cell, name, getattr(view, name))
    cell.bins, cell.durations = dict(zip(view.bins, view.in_bins, strict=True)), list(view.durations)
    return Counted(cell=cell, node=node, **{name: getattr(view, name) for name in _NAMES})


@dataclass(frozen=True)
class NodePart:
    """What the agent of another node answered; what was not requested is empty."""

    ranks: tuple[RankView, ...] = ()
    groups: tuple[GroupView, ...] = ()
    steps: tuple[StepView, ...] = ()
    cells: Cells | None = None


class JobQueries(QueryService):
    """A ``QueryService`` whose answers cover all nodes of a job.

    Args:
        own: the service of this node.
        others: the parts of the other nodes, for the same job and window as the query.
    """

    def __init__(self, own: QueryService, others: list[NodePart]) -> None:
        super().__init__(own.path, references=own.references)
        self._own, self._others = own, others

    def ranks(self, job: str | None) -> list[RankView]:
        """Return the ranks, sorted by job and number."""
        return merged_ranks([*self._own.ranks(job), *(view for part in self._others for view in part.ranks)])

    def groups(self, job: str | None) -> list[GroupView]:
        """Return the groups, sorted by job."""
        every = merged_groups([*self._own.groups(job), *(view for part in self._others for view in part.groups)])
        return sorted(every, key=lambda view: (view.job_id, -view.size, view.name))

    def steps(self, from_ns: int, until_ns: int, job: str | None, rank: int | None, limit: int) -> list[StepView]:
        """Return the steps that ended in the window, newest first, by the clocks of their nodes."""
        parts = [self._own.steps(from_ns, until_ns, job, rank, limit), *(part.steps for part in self._others)]
        return list(islice(merge(*parts, key=lambda step: -step.end_at), limit))

    def cells(
        self,
        from_ns: int,
        until_ns: int,
        job: str | None,
        note: Callable[[int, int, Counted], object] = lambda begin, length, one: None,
    ) -> tuple[tuple[float | None, float | None], list[Counted]]:
        own, cells = self._own.cells(from_ns, until_ns, job, note)
        spans = [own, *((part.cells.since, part.cells.until) for part in self._others if part.cells is not None)]
        others = [
            counted_of(view, node)
            for node, part in enumerate(self._others, 1)
            for view in (() if part.cells is None else part.cells.cells)
        ]
        begins, ends = ([each for each in edge if each is not None] for edge in zip(*spans, strict=True))
        return (min(begins, default=None), max(ends, default=None)), [*cells, *others]
