"""API queries about a job on all its nodes: they put the answers of other agents and this agent's own together.

They run in the worker process, as the answers of many agents take long to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from commwatch_agent.analysis.ended_operations import RankParts
from commwatch_agent.analysis.pipelines import Pipeline, over_nodes
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.analysis.time_buckets import Lengths, Slot, SlotSums, slots_of
from commwatch_agent.analysis.timeline import MOST_RANKS, NodeBars, Timeline, timeline
from commwatch_agent.analysis.verdicts import Verdict
from commwatch_agent.core.api_views import AlertsView, AlertView, Summary
from commwatch_agent.core.views import GroupView, JobFigures, JobView, RankView, StepView
from commwatch_agent.history.history import History
from commwatch_agent.incidents.answers import (
    IncidentDetails,
    IncidentFilter,
    IncidentView,
    details_of,
    in_order,
    latest_of,
    merged,
    view_of,
)
from commwatch_agent.incidents.conclude import of_ranks
from commwatch_agent.incidents.evidence import Evidence, KnownJob, WholeJob, is_ended
from commwatch_agent.incidents.incident import EvidenceItem, Incident
from commwatch_agent.incidents.judging import with_waits
from commwatch_agent.incidents.stored import incidents_of
from commwatch_agent.incidents.verdict_views import merged_verdicts
from commwatch_agent.nodes.merging import Heard, JobWide, Nodes, Seen, merged_jobs
from commwatch_agent.nodes.queries import Cells, JobQueries, NodePart
from commwatch_agent.nodes.replica_parts import RankChecks
from commwatch_agent.questions import history_queries
from commwatch_agent.questions.history_queries import Efficiencies, Text
from commwatch_agent.report import incident_page as pages
from commwatch_agent.report.job_figures import FiguresPart, figures_of_nodes, figures_parts

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_T = TypeVar("_T")


@dataclass(frozen=True)
class Parts:
    """Collectives of groups that also have ranks on other nodes; joined with the parts of those, they show late ranks."""

    #: Collectives reported per group, at most: the latest. Fewer than requested where there are many groups and ranks.
    limit: int
    parts: list[RankParts]
    #: The latest checks of replicated parameters that have ranks on other nodes.
    replicas: list[RankChecks] = field(default_factory=list)
    #: Verdicts that need this agent's own records.
    reported: list[Verdict] = field(default_factory=list)


def jobs(agent: QueryService, *, most: int | None, heard: Heard) -> JobWide[list[JobView]]:
    """Return all jobs, the latest started first; ``most``: only so many."""
    found, nodes = read(heard, list[JobView])
    return JobWide(nodes, merged_jobs([*agent.jobs(), *(job for (views,) in found for job in views)])[:most])


def figures_of_all(agent: QueryService, *, most: int, durations: int, heard: Heard) -> JobWide[list[JobFigures]]:
    """Return all jobs with their headline figures, the latest started first; arguments as the other agents were asked."""
    found, nodes = read(heard, list[FiguresPart])
    own = figures_parts(agent, most, durations)
    return JobWide(nodes, figures_of_nodes([*own, *(part for (parts,) in found for part in parts)], most))


def ranks(agent: QueryService, job: str, *, heard: Heard) -> JobWide[list[RankView]]:
    """Return the ranks, sorted by number."""
    found, nodes = read(heard, list[RankView])
    return JobWide(nodes, JobQueries(agent, [NodePart(ranks=tuple(views)) for (views,) in found]).ranks(job))


def groups(agent: QueryService, job: str, *, heard: Heard) -> JobWide[list[GroupView]]:
    """Return the groups."""
    found, nodes = read(heard, list[GroupView])
    return JobWide(nodes, JobQueries(agent, [NodePart(groups=tuple(views)) for (views,) in found]).groups(job))


def steps(
    agent: QueryService, from_ns: int, until_ns: int, job: str, *, rank: int | None, limit: int, heard: Heard
) -> JobWide[list[StepView]]:
    """Return training steps, newest first."""
    found, nodes = read(heard, list[StepView])
    every = JobQueries(agent, [NodePart(steps=tuple(views)) for (views,) in found])
    return JobWide(nodes, every.steps(from_ns, until_ns, job, rank, limit))


def summary(
    agent: QueryService,
    from_ns: int,
    until_ns: int,
    job: str,
    *,
    by: list[str],
    same: dict[str, str | int | None],
    heard: Heard,
) -> JobWide[Summary]:
    """Return operations grouped by the dimensions ``by``; arguments as for ``QueryService.summary``."""
    every, nodes = _with_cells(agent, heard)
    return JobWide(nodes, history_queries.summary(every, from_ns, until_ns, job, by=by, same=same))


def efficiency(agent: QueryService, from_ns: int, until_ns: int, job: str, *, heard: Heard) -> JobWide[Efficiencies]:
    """Return operations by group and size with their expected durations."""
    every, nodes = _with_cells(agent, heard)
    return JobWide(nodes, history_queries.efficiency(every, from_ns, until_ns, job))


@dataclass(frozen=True)
class Own:
    """What this agent has in memory of a job."""

    #: Verdicts that need its own records.
    reported: list[Verdict]
    #: Its collectives of groups that also have ranks on other nodes.
    parts: list[RankParts]
    #: Its checks of replicas that also have ranks on other nodes.
    replicas: list[RankChecks]


def verdicts(agent: QueryService, job: str, *, own: list[Verdict], heard: Heard) -> JobWide[list[Verdict]]:
    """Return what is wrong right now, as the agents of the job's nodes have concluded; ``own``: this agent."""
    found, nodes = read(heard, list[Verdict], list[RankView])
    seen = [*agent.ranks(job), *(view for _, views in found for view in views)]
    return JobWide(nodes, merged_verdicts([own, *(there for there, _ in found)], job, (view.rank for view in seen)))


def conditions(
    agent: QueryService, job: str, *, own: Own, heard: Heard, known: KnownJob, now: float
) -> JobWide[WholeJob]:
    """Return the conditions that hold right now; ``known``: the job on this node, ``now``: Unix time in s."""
    seen, nodes = _seen(agent, job, own, heard)
    ended = is_ended(seen.ranks, known.world_size)
    evidence = Evidence(now, {job: known._replace(ended=ended)}, with_waits(seen), seen.ranks, seen.groups)
    found = list(of_ranks(evidence))
    if nodes.silent:
        who = "; ".join(f"{url}: {why}" for url, why in sorted(nodes.silent.items()))
        item = EvidenceItem("peers", now, f"agents that do not answer: {who}", {"silent": sorted(nodes.silent)})
        found = [replace(each, evidence=(*each.evidence, item)) for each in found]
    return JobWide(nodes, WholeJob(found, ended))


def _seen(agent: QueryService, job: str, own: Own, heard: Heard) -> tuple[Seen, Nodes]:
    found, nodes = read(heard, list[RankView], list[GroupView], Parts)
    every = JobQueries(agent, [NodePart(ranks=tuple(views)) for views, *_ in found])
    seen = Seen(
        every.ranks(job),
        [*agent.groups(job), *(group for _, groups, _ in found for group in groups)],
        [*own.reported, *(verdict for *_, answer in found for verdict in answer.reported)],
        [*own.parts, *(part for *_, answer in found for part in answer.parts)],
        [*own.replicas, *(part for *_, answer in found for part in answer.replicas)],
    )
    return seen, nodes


def pipelines(agent: QueryService, *, own: list[Pipeline], heard: Heard) -> JobWide[list[Pipeline]]:
    """Return the pipelines; ``own``: their parts on this node."""
    found, nodes = read(heard, list[Pipeline])
    return JobWide(nodes, over_nodes([*own, *(each for (parts,) in found for each in parts)]))


def alerts(agent: QueryService, *, own: AlertsView, limit: int, heard: Heard) -> JobWide[AlertsView]:
    """Return the alerts of all agents; one that several agents have raised counts once, since the first of them."""
    found, nodes = read(heard, AlertsView)
    every = [own, *(view for (view,) in found)]
    active = _once(alert for view in every for alert in view.active)
    past = _once(alert for view in every for alert in view.past)
    past.sort(key=lambda alert: -(alert.resolved_at or 0.0))
    return JobWide(nodes, AlertsView(active[:limit], past[:limit]))


def incidents(
    agent: QueryService, job: str, *, wanted: IncidentFilter, own: list[IncidentView], limit: int, heard: Heard
) -> JobWide[list[IncidentView]]:
    """Return the incidents of a job that the agents of its nodes know, each once; arguments as for one node."""
    found, nodes = read(heard, list[IncidentView])
    here = history_queries.incidents(agent, job=job, wanted=wanted, own=own, limit=limit)
    there = [[replace(each, job_id=job) for each in views] for (views,) in found]
    return JobWide(nodes, latest_of(merged([here, *there]), limit))


def incident_page(
    agent: QueryService,
    *,
    incident_id: str,
    own: list[Incident],
    heard: Heard,
    links: Mapping[str, list[tuple[str, str]]],
) -> Text:
    """Return the page of an incident, with the evidence of all agents that know it.

    Args:
        own: it, its cause and its consequences, as far as they are in memory.
        links: names and addresses of what else there is, by kind of incident.

    Raises:
        ApiError: (404) no agent knows it.
    """
    with History(agent.path) as history:
        stored = list(incidents_of(history.incidents(incident_id=incident_id)))
        known = {each.id: each for each in [*stored, *own]}
        this = known.get(incident_id)
        if this is not None:  # what explains incidents of a run is of the run, or of the node
            runs = {this.run, ""} if this.run else None
            known = {each.id: each for each in incidents_of(history.incidents(runs=runs))} | known
    found, _ = read(heard, IncidentDetails)
    every = [*([] if this is None else [details_of(this)]), *(each for (each,) in found)]
    if not every:
        raise history_queries.no_incident(incident_id)
    (best,) = merged([each] for each in every)
    shown = replace(best, job_id=every[0].job_id)
    views = {each.id: view_of(each) for each in known.values()}
    consequences = in_order(each for each in views.values() if each.consequence_of == incident_id)
    page = pages.incident_page(
        shown, shown.evidence, views.get(best.consequence_of or ""), consequences, links.get(best.kind, ())
    )
    return Text(page.encode(errors="replace"), "text/html; charset=utf-8", {})


def slots(agent: QueryService, *, heard: Heard) -> list[SlotSums]:
    """Return the sums of the other nodes' buckets of 10 s."""
    found, _ = read(heard, list[SlotSums])
    return [each for (sums,) in found for each in sums]


@dataclass(frozen=True)
class Past:
    """What the live page shows of a time range."""

    #: Lengths in s of the slots with shares, and of those with bus bandwidth. Where they differ, a slot has one or the other.
    length_s: float
    busbw_length_s: float
    slots: list[Slot]
    #: The latest operations that ended in the range; ``None``: none is stored.
    timeline: Timeline | None


def past(agent: QueryService, from_ns: int, until_ns: int, job: str, *, of: Lengths, heard: Heard) -> JobWide[Past]:
    """Return what the live page shows of a time range."""
    found, nodes = read(heard, list[SlotSums], NodeBars)
    sums = history_queries.slots(agent, from_ns, until_ns, job, of=of)
    own = history_queries.bars(agent, from_ns, until_ns, job)
    every = slots_of([*sums, *(each for (of_node, _) in found for each in of_node)], of)
    bars = [own, *(part for _, part in found)]
    few = sum(len(part.ranks) for part in bars) <= MOST_RANKS
    data = Past(of.steps_ns / 1e9, of.busbw_ns / 1e9, every, timeline(bars if few else [own]))
    return JobWide(nodes, data)


def _once(alerts: Iterable[AlertView]) -> list[AlertView]:
    """Return alerts, the oldest first, and of those with the same name and labels that overlap only the first."""
    found: list[AlertView] = []
    until: dict[tuple[object, ...], float] = {}
    for alert in sorted(alerts, key=lambda alert: alert.active_at):
        of_node = None if "job_id" in alert.labels else alert.id
        at = alert.name, tuple(sorted(alert.labels.items())), of_node
        if alert.active_at >= until.get(at, -inf):
            found.append(alert)
        until[at] = max(until.get(at, -inf), inf if alert.resolved_at is None else alert.resolved_at)
    return found


def _with_cells(agent: QueryService, heard: Heard) -> tuple[JobQueries, Nodes]:
    found, nodes = read(heard, Cells)
    return JobQueries(agent, [NodePart(cells=cells) for (cells,) in found]), nodes


def read(heard: Heard, *kinds: Any) -> tuple[list[list[Any]], Nodes]:
    """Return the answers of each agent as objects of ``kinds``; agents with other answers count as silent."""
    from pydantic import ValidationError

    found, silent = [], dict(heard.silent)
    for url, answers in heard.answers.items():
        try:
            found.append([_adapter(kind).validate_json(text) for kind, text in zip(kinds, answers, strict=True)])
        except ValidationError as error:
            what = error.errors(include_url=False)[0]
            silent[url] = (
                f"does not answer as an agent of this version: {'.'.join(map(str, what['loc']))}: {what['msg']}"
            )
    return found, Nodes(1 + len(found), silent)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    # Here, because the process needs pydantic only for these questions.
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


#: Functions by name; each is called with the agent and the arguments of the question.
JOB_QUESTIONS: Mapping[str, Callable[..., Any]] = {
    f"job_{each.__name__}": each
    for each in (
        jobs,
        figures_of_all,
        ranks,
        groups,
        steps,
        summary,
        efficiency,
        verdicts,
        conditions,
        pipelines,
        alerts,
        incidents,
        incident_page,
        slots,
        past,
    )
}
