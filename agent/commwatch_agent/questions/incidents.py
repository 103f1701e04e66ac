"""Questions about what is wrong: incidents, their pages, verdicts, alerts, and the conditions in a job on several nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from math import inf

from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.analysis.verdict import Verdict
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
from commwatch_agent.incidents.stored import incidents_of, of_run
from commwatch_agent.incidents.verdict_views import merged_verdicts
from commwatch_agent.job import rank_parts
from commwatch_agent.job.merging import Heard, Nodes, Seen
from commwatch_agent.job.message_parts import MessageParts, message_parts
from commwatch_agent.job.queries import JobQueries, NodePart
from commwatch_agent.job.rank_parts import RankParts
from commwatch_agent.job.replica_parts import RankChecks, rank_checks
from commwatch_agent.model.api_views import AlertsView, AlertView
from commwatch_agent.model.views import GroupView, RankView
from commwatch_agent.questions.answer import ApiError, Scoped, Text
from commwatch_agent.questions.heard import read
from commwatch_agent.report import incident_page as pages


def incidents(
    agent: QueryService,
    job: str | None,
    *,
    wanted: IncidentFilter,
    own: list[IncidentView],
    limit: int,
    heard: Heard | None = None,
) -> Scoped[list[IncidentView]]:
    """Return incidents of a job, or of all jobs and of the node, each once.

    Args:
        own: those in memory, which may be newer than those in the history.
        limit: most ended ones.
        heard: what the agents of the job's other nodes know.
    """
    found, nodes = read(heard, list[IncidentView])
    here = _incidents_here(agent, job, wanted, own, limit)
    if nodes is None:
        return Scoped(None, here)
    there = [[replace(each, job_id=job) for each in views] for (views,) in found]
    return Scoped(nodes, latest_of(merged([here, *there]), limit))


def _incidents_here(
    agent: QueryService, job: str | None, wanted: IncidentFilter, own: list[IncidentView], limit: int
) -> list[IncidentView]:
    if job is None:
        with History(agent.path) as history:
            known = list(incidents_of(history.incidents(states=("open", "ended"))))
    else:
        known = of_run(agent.path, agent.stored(job))
    found = [view_of(each) for each in known if wanted.holds(each)]
    every = {each.id: each for each in [*found, *(view for view in own if wanted.holds(view))]}
    shown = [each if job is None else replace(each, job_id=job) for each in every.values()]
    return latest_of(shown, limit)


def incident(agent: QueryService, *, incident_id: str, own: IncidentDetails | None) -> IncidentDetails:
    """Return one incident; ``own``: as it is in memory. Raises ``ApiError`` (404) if there is none of that id."""
    if own is not None:
        return own
    with History(agent.path) as history:
        rows = history.incidents(incident_id=incident_id)
    for each in incidents_of(rows):
        return details_of(each)
    raise no_incident(incident_id)


def no_incident(incident_id: str) -> ApiError:
    """Return the error for an incident that is not known."""
    return ApiError(HTTPStatus.NOT_FOUND, f"no incident {incident_id}; /api/v1/incidents lists the incidents")


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
        raise no_incident(incident_id)
    (best,) = merged([each] for each in every)
    shown = replace(best, job_id=every[0].job_id)
    views = {each.id: view_of(each) for each in known.values()}
    consequences = in_order(each for each in views.values() if each.consequence_of == incident_id)
    page = pages.incident_page(
        shown, shown.evidence, views.get(best.consequence_of or ""), consequences, links.get(best.kind, ())
    )
    return Text(page.encode(errors="replace"), "text/html; charset=utf-8", {})


@dataclass(frozen=True)
class Parts:
    """What an agent has in memory of its ranks in groups that also have ranks on other nodes; joined with their parts, it shows late ranks."""

    #: Collectives reported per group, at most: the latest. Fewer than requested where there are many groups and ranks.
    limit: int
    parts: list[RankParts]
    #: The latest checks of replicated parameters that have ranks on other nodes.
    replicas: list[RankChecks] = field(default_factory=list)
    #: Verdicts that need this agent's own records.
    reported: list[Verdict] = field(default_factory=list)
    #: How long ranks that send messages to other nodes waited lately.
    messages: list[MessageParts] = field(default_factory=list)


def parts(agent: QueryService, job: str | None, limit: int, reported: list[Verdict]) -> Parts:
    """Return what this agent has in memory of a job, or of all jobs; ``reported`` as in ``Parts``."""
    with agent.live(job) as (live, now_ns):
        jobs = list(live)
        limit, columns = rank_parts.parts(jobs, now_ns, limit)
        messages = message_parts(jobs, columns, limit, now_ns)
        return Parts(limit, columns, rank_checks(jobs, now_ns), reported, messages)


def verdicts(agent: QueryService, job: str, *, own: list[Verdict], heard: Heard) -> Scoped[list[Verdict]]:
    """Return what is wrong right now, as the agents of the job's nodes have concluded; ``own``: this agent."""
    found, nodes = read(heard, list[Verdict], list[RankView])
    seen = [*agent.ranks(job), *(view for _, views in found for view in views)]
    return Scoped(nodes, merged_verdicts([own, *(there for there, _ in found)], job, (view.rank for view in seen)))


def conditions(agent: QueryService, job: str, *, own: Parts, heard: Heard, known: KnownJob, now: float) -> WholeJob:
    """Return the conditions that hold right now; ``known``: the job on this node, ``now``: Unix time in s."""
    seen, nodes = _seen(agent, job, own, heard)
    ended = is_ended(seen.ranks, known.world_size)
    evidence = Evidence(now, {job: known._replace(ended=ended)}, with_waits(seen), seen.ranks, seen.groups)
    found = list(of_ranks(evidence))
    if nodes.silent:
        who = "; ".join(f"{url}: {why}" for url, why in sorted(nodes.silent.items()))
        item = EvidenceItem("peers", now, f"agents that do not answer: {who}", {"silent": sorted(nodes.silent)})
        found = [replace(each, evidence=(*each.evidence, item)) for each in found]
    return WholeJob(found, ended)


def _seen(agent: QueryService, job: str, own: Parts, heard: Heard) -> tuple[Seen, Nodes]:
    found, nodes = read(heard, list[RankView], list[GroupView], Parts)
    every = JobQueries(agent, [NodePart(ranks=tuple(views)) for views, *_ in found])
    seen = Seen(
        every.ranks(job),
        [*agent.groups(job), *(group for _, groups, _ in found for group in groups)],
        [*own.reported, *(verdict for *_, answer in found for verdict in answer.reported)],
        [*own.parts, *(part for *_, answer in found for part in answer.parts)],
        [*own.replicas, *(part for *_, answer in found for part in answer.replicas)],
        [*own.messages, *(part for *_, answer in found for part in answer.messages)],
    )
    return seen, nodes


def alerts(agent: QueryService, *, own: AlertsView, limit: int, heard: Heard) -> Scoped[AlertsView]:
    """Return the alerts of all agents; one that several agents have raised counts once, since the first of them."""
    found, nodes = read(heard, AlertsView)
    every = [own, *(view for (view,) in found)]
    active = _once(alert for view in every for alert in view.active)
    past = _once(alert for view in every for alert in view.past)
    past.sort(key=lambda alert: -(alert.resolved_at or 0.0))
    return Scoped(nodes, AlertsView(active[:limit], past[:limit]))


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
