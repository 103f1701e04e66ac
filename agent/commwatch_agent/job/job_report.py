"""What a report or advice on all nodes of a job needs: the parts of the nodes, and the queries over all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from typing import NamedTuple

from commwatch.wire.events import MAX_PLAUSIBLE
from commwatch_agent.analysis.advice_input import network_of
from commwatch_agent.analysis.network_advice import Network
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.history.operations import Cursor, Operation
from commwatch_agent.job.job_waits import JobWaits
from commwatch_agent.job.merging import merged_jobs
from commwatch_agent.job.queries import Cells, JobQueries, NodePart
from commwatch_agent.job.rank_parts import MOST_S
from commwatch_agent.model.cells import Counted
from commwatch_agent.model.host_views import HostView
from commwatch_agent.model.nccl_views import Topology
from commwatch_agent.model.views import GroupView, JobView, RankView, StepTotals, StepView, WaitView
from commwatch_collectors.nccl.checks.rules import RULES
from commwatch_collectors.nccl.views import SEVERITIES, Finding

#: How far errors are from their causes, by name.
_DEPTHS = {rule.name: rule.depth for rule in RULES if rule.severity == "error"}
#: Most steps of all nodes together, the latest, and most operations; each node sends at most its share of them.
MOST_STEPS, MOST_OPERATIONS = 60_000, 10_000


class StepRow(NamedTuple):
    """A step as in ``StepView``, without what follows from the rest; ``shares``: of the groups in ``StepRows.groups``."""

    rank: int
    seq: int
    start_at: float
    end_at: float
    duration_s: float
    comm_s: float | None
    exposed_s: float | None
    p2p_wait_s: float | None
    long: bool
    shares: list[float | None]


@dataclass(frozen=True)
class StepRows:
    """The latest steps of a node's ranks, newest first; ``more``: there may be earlier ones. ``groups``: labels."""

    groups: list[str]
    rows: list[StepRow]
    more: bool

    def __post_init__(self) -> None:
        if any(len(row.shares) != len(self.groups) for row in self.rows):
            raise ValueError("rows of different lengths")
        parts = ((row.comm_s or 0, row.exposed_s or 0, row.p2p_wait_s or 0) for row in self.rows)
        known = all(0 <= part < MOST_S for of_row in parts for part in of_row)
        if not (known and all(0 < row.duration_s < MOST_S for row in self.rows)):
            raise ValueError("times out of range")


def rows_of(steps: Sequence[StepView], more: bool) -> StepRows:
    """Return steps in the form for other agents."""
    groups = sorted({label for step in steps for label in step.group_shares})
    names = StepRow._fields[:-1]
    rows = [
        StepRow._make([*(getattr(step, name) for name in names), [step.group_shares.get(label) for label in groups]])
        for step in steps
    ]
    return StepRows(groups, rows, more)


def steps_of(job_id: str, sent: StepRows) -> list[StepView]:
    """Return the steps that another agent has sent."""
    return [_step(job_id, sent.groups, row) for row in sent.rows]


def _step(job_id: str, groups: Sequence[str], row: StepRow) -> StepView:
    comm, exposed = (None if part is None else part / row.duration_s for part in (row.comm_s, row.exposed_s))
    shares = {label: share for label, share in zip(groups, row.shares, strict=True) if share is not None}
    kept = {name: value for name, value in row._asdict().items() if name != "shares"}
    return StepView(job_id=job_id, **kept, comm_share=comm, exposed_share=exposed, group_shares=shares)


@dataclass(frozen=True)
class ReportPart:
    """What a report on a job needs of one node, beside its operations."""

    job: JobView
    #: As ``QueryService.begun_at`` returns it.
    begun_at: float
    ranks: list[RankView]
    groups: list[GroupView]
    steps: StepRows
    #: Of all its steps, as ``QueryService.step_totals`` returns them.
    step_totals: list[StepTotals]
    waits: list[WaitView]
    #: The current stragglers by rank, with the share of time (0 to 1) that the others wait for each; ``None``: not known.
    late: dict[int, float] | None
    host: HostView
    #: From NCCL's logs; ``None``: there are none.
    topology: Topology | None

    def __post_init__(self) -> None:
        if not all(
            0 <= of.exposed_known <= of.steps < MAX_PLAUSIBLE and 0 <= of.exposed < MAX_PLAUSIBLE
            for of in self.step_totals
        ):
            raise ValueError("numbers out of range")


class NodeData(NamedTuple):
    """The answers of the agent of another node."""

    part: ReportPart
    #: By the begin of the window, in ns of Unix time.
    cells: Mapping[int, Cells]
    #: Newest first.
    operations: Sequence[Operation]


class ReportQueries(JobQueries):
    """A ``QueryService`` for reports and advice on one job whose answers cover all its nodes.

    Args:
        own: the service of this node.
        job_id: the job; there are no answers about others.
        others: the data of the other nodes.
        most_steps: most steps of each node.
        waits: of groups that span nodes.
    """

    def __init__(
        self, own: QueryService, job_id: str, others: Sequence[NodeData], most_steps: int, waits: JobWaits | None = None
    ) -> None:
        super().__init__(own, [NodePart(tuple(each.part.ranks), tuple(each.part.groups)) for each in others])
        self._data, self._most, self._waits = others, most_steps, waits or JobWaits(())
        #: For each of the other nodes, its steps newest first, and whether there may be earlier ones.
        self._sent = [(steps_of(job_id, each.part.steps), each.part.steps.more) for each in others]

    def jobs(self) -> list[JobView]:
        """Return the job, as one of all nodes, and the others as this node knows them."""
        return merged_jobs([*self._own.jobs(), *(each.part.job for each in self._data)])

    def job(self, job: str) -> JobView | None:
        own = self._own.job(job)
        return None if own is None else merged_jobs([own, *(each.part.job for each in self._data)])[0]

    def begun_at(self, job: str) -> float:
        return max(self._own.begun_at(job), *(each.part.begun_at for each in self._data), 0.0)

    def latest_steps(self, from_ns: int, job: str, most: int) -> tuple[list[StepView], bool]:
        """Return the latest steps, by the clocks of their nodes, as far back as all nodes have sent theirs."""
        own, more = self._own.latest_steps(from_ns, job, min(most, self._most))
        known = [(own, more), *self._sent]
        complete_at = max((steps[-1].end_at for steps, more in known if more and steps), default=0.0)
        least_at = max(complete_at, from_ns / 1e9)
        found = [
            step
            for step in merge(*(steps for steps, _ in known), key=lambda step: -step.end_at)
            if step.end_at >= least_at
        ]
        return found[:most], len(found) >= most or complete_at > from_ns / 1e9

    def step_totals(self, job: str) -> list[StepTotals]:
        return [*self._own.step_totals(job), *(of for each in self._data for of in each.part.step_totals)]

    def cells(
        self,
        from_ns: int,
        until_ns: int,
        job: str | None,
        note: Callable[[int, int, Counted], object] = lambda begin, length, one: None,
    ) -> tuple[tuple[float | None, float | None], list[Counted]]:
        """Return the sums of a window that the other agents have answered for; it ends now."""
        parts = [NodePart(cells=each.cells[from_ns]) for each in self._data]
        covered, cells = JobQueries(self._own, parts).cells(from_ns, until_ns, job, note)
        self._waits.add_to(cells, from_ns)
        return covered, cells

    def waits_over_time(self, own: list[WaitView], cells: list[Counted]) -> list[WaitView]:
        return self._waits.over_time([*own, *(wait for each in self._data for wait in each.part.waits)], cells)

    def operations(
        self,
        from_ns: int,
        until_ns: int,
        before: Cursor | None,
        wanted: Callable[[Operation], bool],
        limit: int,
        **where: object,
    ) -> list[Operation]:
        """Return operations of the latest of each node, newest first, by the clocks of their nodes."""
        own = self._own.operations(from_ns, until_ns, before, wanted, limit, **where)  # type: ignore[arg-type]
        others = [
            [one for one in each.operations if one.end_at * 1e9 >= from_ns and wanted(one)] for each in self._data
        ]
        return list(merge(own, *others, key=lambda one: -one.end_at))[:limit]


def network_of_all(own: Network, own_host: str, others: Sequence[NodeData]) -> Network:
    """Return the facts about the networks of all nodes; complaints name the host."""
    named = [(own_host, own)]
    for each in others:
        hosts = sorted({rank.host for rank in each.part.ranks})
        named.append((", ".join(hosts), network_of(each.part.host, each.part.ranks)))
    places = [place for _, network in named for place in network.places]
    complaints = [
        replace(complaint, device=f"{complaint.device} of {host}")
        for host, network in named
        for complaint in network.complaints
    ]
    return Network(places, complaints)


def findings_of(topologies: Sequence[Topology | None]) -> list[Finding]:
    """Return the findings in the logs of all nodes, the worst first, and of errors those that explain others. Nodes may read one file."""
    found = (finding for topology in topologies if topology is not None for finding in topology.findings)
    once = {(each.name, each.severity, each.says, *each.evidence): each for each in found}
    return sorted(once.values(), key=lambda each: (SEVERITIES.index(each.severity), _DEPTHS.get(each.name, 0)))
