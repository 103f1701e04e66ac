"""The routes of the query API that conclude: what is wrong, how good it could be, what to try."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Query

from commwatch import joined, sight
from commwatch.advice import Advice
from commwatch.efficiency import Efficiency, Line
from commwatch.joined import RankParts
from commwatch.joins import MOST_PENDING
from commwatch.pipelines import Pipeline, pipelines
from commwatch.problems import ERRORS
from commwatch.query import AgentOf, HostOf, JobFilter, LogsOf, Span, job_exists, known_parameters
from commwatch.report import build
from commwatch.verdicts import Verdict, verdicts
from commwatch.witness_api import WitnessesOf

router = APIRouter(prefix="/api/v1", responses=ERRORS, dependencies=[Depends(known_parameters)])


@dataclass(frozen=True)
class Parts:
    """Collectives of groups that have ranks on other nodes, too. Put together with theirs they tell who is late."""

    #: Most collectives of a group that are told: the latest. Where there are many groups and ranks, fewer than were asked for.
    limit: int
    parts: list[RankParts]


@router.get("/verdicts")
def job_verdicts(agent: AgentOf, witnesses: WitnessesOf, job: JobFilter = None) -> list[Verdict]:
    """What is wrong right now, the longest first: hangs, stalls, ranks that disagree, stragglers; then what NCCL's RAS says.

    Empty: nothing is.
    """
    job_exists(agent, job)
    groups = agent.groups(job)
    with agent.live(job) as (jobs, now_ns):
        told = sight.told(jobs, groups, now_ns)
    return verdicts(agent.ranks(job), groups) + told + witnesses.ras.verdicts(job)


@router.get("/parts")
def parts(
    agent: AgentOf,
    job: JobFilter = None,
    limit: Annotated[int, Query(ge=1, le=MOST_PENDING, description="Most collectives of a group.")] = MOST_PENDING,
) -> Parts:
    """The latest symmetric operations of groups that have ranks on other nodes, too: `commwatch diagnose` joins them."""
    job_exists(agent, job)
    with agent.live(job) as (jobs, now_ns):
        return Parts(*joined.parts(jobs, now_ns, limit))


@dataclass(frozen=True)
class Efficiencies:
    """Operations beside what they should take, and the job's own curves."""

    operations: list[Efficiency]
    #: T = a(n)·α + b(n)·S/bandwidth through the fastest operations; none where the sizes are too few or too alike.
    fits: list[Line]


@router.get("/efficiency")
def efficiency(agent: AgentOf, span: Span, job: JobFilter = None) -> Efficiencies:
    """Operations by group and size beside what they should take, with the reference, and what limits them."""
    job_exists(agent, job)
    return Efficiencies(*agent.efficiency(span.from_ns, span.until_ns, job))


@router.get("/pipelines")
def job_pipelines(agent: AgentOf, job: JobFilter = None) -> list[Pipeline]:
    """Pipelines of the jobs of this node: how long their stages wait for messages, in which direction, and the bubble."""
    job_exists(agent, job)
    with agent.live(job) as (jobs, _):
        return pipelines(jobs)


@router.get("/advice")
def job_advice(agent: AgentOf, logs: LogsOf, host: HostOf, job: JobFilter = None) -> list[Advice]:
    """What to try in a job (the latest by default), what it should bring, and the numbers that led to it."""
    job_exists(agent, job)
    known = [each.job_id for each in agent.jobs()]
    if not known:
        return []
    findings = [finding for view in logs.topology(job or known[0]) for finding in view.findings]
    report = build(agent, job or known[0], agent.path, "", findings, host.view(job or known[0]))
    return [] if report is None else report.advice
