"""API queries for reports and advice on a job, on this node or on all its nodes; they run in the worker process.

The other agents are asked four times: for their ranks, groups and steps; then for the operations in the windows that follow from all steps;
for their collectives in groups that span nodes; and for their latest operations and steps, which are replayed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from http import HTTPStatus
from typing import NamedTuple

from commwatch_agent.analysis.advice_input import last_steps, network_of, steps_since
from commwatch_agent.analysis.host_rates import answer as host_view
from commwatch_agent.analysis.network_advice import Network
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.incidents.answers import IncidentDetails, merged, whys_of
from commwatch_agent.incidents.stored import details_of_run
from commwatch_agent.job.job_report import (
    MOST_STEPS,
    NodeData,
    ReportPart,
    ReportQueries,
    findings_of,
    network_of_all,
    rows_of,
)
from commwatch_agent.job.job_waits import JobWaits, joined_waits
from commwatch_agent.job.merging import Heard, Nodes
from commwatch_agent.job.queries import Cells
from commwatch_agent.job.topologies import merged_topology
from commwatch_agent.job.wait_parts import MOST_COLLECTIVES, WaitPart
from commwatch_agent.model.api_views import Advice
from commwatch_agent.model.host_views import HostView
from commwatch_agent.model.nccl_views import Topology
from commwatch_agent.model.views import JobView, RankView
from commwatch_agent.questions.answer import ApiError, Scoped, Text, as_file, job_exists
from commwatch_agent.questions.heard import read
from commwatch_agent.questions.operations import Operations
from commwatch_agent.report.job_advice import Recorded, lately, of_last_life
from commwatch_agent.report.parts import ReportParts
from commwatch_agent.report.recorded_steps import ADVICE_PARTS, FEW_PARTS, known_steps, study_of
from commwatch_agent.report.report import Report, build
from commwatch_agent.report.timeline_parts import TimelinePart, trace_of
from commwatch_agent.report.what_happened import happened, last_at, late_within
from commwatch_agent.sources.nccl_archive import kept
from commwatch_agent.whatif.model import Model


class NodeFacts(NamedTuple):
    """What this agent knows beside its history: as in ``ReportPart``."""

    host: HostView
    late: dict[int, float] | None
    topology: Topology | None
    #: Those in memory, which may be newer than those in the history.
    incidents: list[IncidentDetails]


@dataclass(frozen=True)
class NodeReport(ReportPart):
    """A node's part of a report, with its incidents of the run."""

    incidents: list[IncidentDetails]


@dataclass(frozen=True)
class Asked:
    """The answers of the other agents."""

    #: Most steps that each agent was asked for; and the begins of the windows of operations, in ns of Unix time.
    most_steps: int = MOST_STEPS
    windows: tuple[int, ...] = ()
    parts: Heard = field(default_factory=lambda: Heard({}, {}))
    #: To each of ``windows``, and the latest operations.
    operations: Heard = field(default_factory=lambda: Heard({}, {}))
    #: Most collectives that each agent was asked for, and the answers of those that have any.
    most_collectives: int = MOST_COLLECTIVES
    waits: Heard = field(default_factory=lambda: Heard({}, {}))
    #: The latest part of the timelines; and most operations of all nodes together that are replayed.
    timelines: Heard = field(default_factory=lambda: Heard({}, {}))
    most_parts: int = FEW_PARTS


def report_part(agent: QueryService, job: str, *, own: NodeFacts, steps: int) -> NodeReport:
    """Return what a report of another agent needs of this node; ``steps``: at most so many."""
    return NodeReport(
        job=_job(agent, job),
        begun_at=agent.begun_at(job),
        ranks=agent.ranks(job),
        groups=agent.groups(job),
        steps=rows_of(*agent.latest_steps(0, job, steps)),
        step_totals=agent.step_totals(job),
        waits=agent.totals(job, []).waits,
        host=own.host,
        late=own.late,
        topology=own.topology,
        incidents=_incidents(agent, job, own, ReportParts()),
    )


def _incidents(agent: QueryService, job: str, own: NodeFacts, parts: ReportParts) -> list[IncidentDetails]:
    """Return the incidents of a run on this node."""
    stored: list[IncidentDetails] = []
    stored = parts.part("what happened", lambda: details_of_run(agent.path, agent.stored(job)), stored)
    known = {each.id: each for each in stored}
    return list((known | {each.id: each for each in own.incidents if each.id in known}).values())


def report_windows(agent: QueryService, job: str, *, last_s: float | None, asked: Asked) -> list[int]:
    """Return where the windows of operations begin that a report needs, in ns of Unix time."""
    found, _ = read(asked.parts, ReportPart)
    every = ReportQueries(agent, job, [NodeData(part, {}, ()) for (part,) in found], asked.most_steps)
    return sorted({0, steps_since(every, job).since_ns, last_steps(every, job, last_s).since_ns})


def advice(
    agent: QueryService, job: str, *, own: NodeFacts, last_s: float | None, asked: Asked | None
) -> Scoped[list[Advice]]:
    """Return advice from the last ``last_s`` s of a job, ``None``: from all of it; none of a job that is not known.

    Args:
        asked: ``None``: the advice is on this node.
    """
    if asked is None:
        known, findings = agent.job(job), [] if own.topology is None else own.topology.findings
        network, recorded = network_of(own.host, agent.ranks(job)), Asked(most_parts=ADVICE_PARTS)
        others, late_now, nodes, every = list[NodeData](), own.late, None, agent
    else:
        others, nodes = _others(asked)
        every = ReportQueries(agent, job, others, asked.most_steps, _waits(agent, job, asked))
        known, recorded = _job(every, job), asked
        network = _network(own, agent.ranks(job), others)
        late_now = _late([own.late, *(each.part.late for each in others)])
        findings = findings_of([own.topology, *(each.part.topology for each in others)])
    if known is None:
        return Scoped(nodes, [])
    steps, found = _recorded(agent, known, last_s, recorded), happened(_of_nodes(agent, job, own, others))
    until, incidents = max(known.last_seen_at, last_at(found)), [each for one in found for each in one.every]

    def late(since: float) -> dict[int, float] | None:
        # Of a job that no agent watches now, as one that has ended, the report's late ranks.
        return late_now if late_now is not None else late_within(incidents, since, until) or None

    whys = whys_of(incidents)
    findings = of_last_life(findings, incidents, every.ranks(job))
    advised = lately(every, known, findings, last_s, network=network, late=late, whys=whys, recorded=steps)
    return Scoped(nodes, advised)


def _of_nodes(
    agent: QueryService, job: str, own: NodeFacts, others: list[NodeData], parts: ReportParts | None = None
) -> list[IncidentDetails]:
    """Return the incidents of a run on all nodes, each once."""
    theirs = (each.part.incidents for each in others if isinstance(each.part, NodeReport))
    return merged([_incidents(agent, job, own, parts or ReportParts()), *theirs])


def _network(own: NodeFacts, ranks: list[RankView], others: list[NodeData]) -> Network:
    """Return the facts about the networks of all nodes; ``ranks``: of this one."""
    return network_of_all(network_of(own.host, ranks), ", ".join(sorted({rank.host for rank in ranks})), others)


def of_history(agent: QueryService, job: str) -> NodeFacts:
    """Return what is known of a job beside its history where no agent watches it: what its NCCL logs had is kept."""
    return NodeFacts(host_view(None, None), None, kept(agent.path, agent.stored(job)), [])


def report(
    agent: QueryService, job: str, *, own: NodeFacts, last_s: float | None, command: str, asked: Asked | None = None
) -> Report:
    """Return the report on a job.

    Args:
        command: shows it again.
        asked: ``None``: the report is on this node.
    """
    return _built(agent, job, own, last_s, command, asked).report


def report_page(
    agent: QueryService, job: str, *, own: NodeFacts, last_s: float | None, command: str, asked: Asked | None = None
) -> Text:
    """Return the report on a job as a page; arguments as for ``report``."""
    from commwatch_agent.report import charts, report_page

    built = _built(agent, job, own, last_s, command, asked)
    topology = built.parts.part("topology", partial(merged_topology, built.topologies), None)
    material = built.parts.part("charts", partial(charts.gather, built.every, job), charts.NOTHING)
    study = built.parts.part("what-if", lambda: study_of(job, built.recorded(), built.report.core_wait_share), None)
    page = report_page.html(built.report, material, topology, study)
    return as_file(page.encode(), "text/html", "report", job, "html")


class _Built(NamedTuple):
    """A report, and what a page of it shows besides."""

    report: Report
    every: QueryService
    topologies: list[Topology | None]
    recorded: Recorded
    parts: ReportParts


def _built(  # noqa: PLR0917 - as the functions above have them
    agent: QueryService, job: str, own: NodeFacts, last_s: float | None, command: str, asked: Asked | None
) -> _Built:
    job_exists(agent, job)
    every, others, nodes, parts = agent, list[NodeData](), None, ReportParts()
    if asked is not None:
        others, nodes = _others(asked)
        waits = parts.part("waits across nodes", partial(_waits, agent, job, asked), JobWaits(()))
        every = ReportQueries(agent, job, others, asked.most_steps, waits)
    topologies = [own.topology, *(each.part.topology for each in others)]
    incidents = _of_nodes(agent, job, own, others, parts)
    recorded = _recorded(agent, _job(every, job), last_s, asked or Asked())
    found = build(
        every,
        job,
        agent.path,
        command,
        findings_of(topologies),
        incidents=incidents,
        watched=own.late is not None,
        last_s=last_s,
        nodes=nodes,
        recorded=recorded,
        parts=parts,
    )
    assert found is not None
    return _Built(found, every, topologies, recorded, parts)


def _recorded(agent: QueryService, job: JobView, last_s: float | None, asked: Asked) -> Recorded:
    """Return a function that returns the recorded steps of all nodes that have sent theirs."""

    @cache
    def steps() -> Model | None:
        found, _ = read(asked.timelines, TimelinePart)
        return known_steps(agent.path, job, last_s, [trace_of(part) for (part,) in found], asked.most_parts)

    return steps


def _job(agent: QueryService, job: str) -> JobView:
    found = agent.job(job)
    if found is None:
        raise ApiError(HTTPStatus.NOT_FOUND, f"no job '{job}' in the history; /api/v1/jobs lists the jobs")
    return found


def wait_part(agent: QueryService, job: str, *, most: int) -> WaitPart:
    """Return the collectives of groups that span nodes; ``most``: at most so many."""
    from commwatch_agent.job import wait_source  # brings in numpy

    return wait_source.wait_part(agent.path, job, most)


def _waits(agent: QueryService, job: str, asked: Asked) -> JobWaits:
    """Return the waits in groups that span nodes; those of groups with ranks on agents without an answer are not known."""
    found, _ = read(asked.waits, WaitPart)
    if not found:
        return JobWaits(())
    return JobWaits(joined_waits([wait_part(agent, job, most=asked.most_collectives), *(part for (part,) in found)]))


def _late(of_nodes: Iterable[dict[int, float] | None]) -> dict[int, float] | None:
    """Return the current stragglers of all nodes by rank, as in ``ReportPart``."""
    known = [late for late in of_nodes if late is not None]
    return {rank: share for late in known for rank, share in late.items()} if known else None


def _others(asked: Asked) -> tuple[list[NodeData], Nodes]:
    """Return the data of the agents that have answered both times."""
    parts, operations = asked.parts, asked.operations
    silent = parts.silent | operations.silent
    both = {
        url: [*answers, *operations.answers[url]] for url, answers in parts.answers.items() if url in operations.answers
    }
    found, nodes = read(Heard(both, silent), NodeReport, *(Cells for _ in asked.windows), Operations)
    return [
        NodeData(part, dict(zip(asked.windows, cells, strict=True)), latest.operations)
        for part, *cells, latest in found
    ], nodes
