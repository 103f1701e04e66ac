"""The routes of the query API that conclude: what is wrong, how good it could be, what to try."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from commwatch.pipelines import Pipeline
from commwatch.problems import ERRORS
from commwatch.query import AgentOf, JobFilter, job_exists, known_parameters
from commwatch.verdicts import Verdict, disagreement, lateness, verdicts

router = APIRouter(prefix="/api/v1", responses=ERRORS, dependencies=[Depends(known_parameters)])


@router.get("/verdicts")
def job_verdicts(agent: AgentOf, job: JobFilter = None) -> list[Verdict]:
    """What is wrong right now, the longest first: hangs, stalls, ranks that disagree, stragglers. Empty: nothing is."""
    job_exists(agent, job)
    views = agent.groups(job)
    groups = {(group.job_id, group.group_id): group for group in views}
    late = [
        lateness(late, groups[job_id, group_id])
        for job_id, group_id, late in agent.stragglers(job)
        if (job_id, group_id) in groups
    ]
    odd = [
        disagreement(what, groups[what.job_id, what.group_id])
        for what in agent.disagreements(job)
        if (what.job_id, what.group_id) in groups
    ]
    return verdicts(agent.ranks(job), views) + [verdict for verdict in odd if verdict is not None] + late


@router.get("/pipelines")
def job_pipelines(agent: AgentOf, job: JobFilter = None) -> list[Pipeline]:
    """Pipelines of the jobs of this node: how long their stages wait for messages, in which direction, and the bubble."""
    job_exists(agent, job)
    return agent.pipelines(job)
