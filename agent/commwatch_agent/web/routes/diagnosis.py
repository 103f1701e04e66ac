"""Routes of the API with conclusions: verdicts, efficiency and pipelines."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from commwatch_agent.analysis.pipelines import Pipeline, pipelines
from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.incidents.incident import EvidenceItem
from commwatch_agent.ingest.collective_join import MOST_PENDING
from commwatch_agent.job.merging import JobWide
from commwatch_agent.questions import incidents, operations
from commwatch_agent.questions import jobs as questions
from commwatch_agent.questions.answer import job_exists, text_of
from commwatch_agent.questions.incidents import Parts
from commwatch_agent.questions.operations import Efficiencies
from commwatch_agent.web.problems import ERRORS
from commwatch_agent.web.routes.params import (
    JobFilter,
    OthersOf,
    QueriesOf,
    Scope,
    ServicesOf,
    Span,
    WorkerOf,
    answered,
    sound_parameters,
    the_job,
)

router = APIRouter(prefix="/api/v1", responses=ERRORS, dependencies=[Depends(sound_parameters)])


@router.get("/verdicts", response_model=list[Verdict] | JobWide[list[Verdict]])
def job_verdicts(
    agent: QueriesOf,
    services: ServicesOf,
    others: OthersOf,
    job: JobFilter = None,
    scope: Scope = "node",
) -> Response:
    """What is wrong right now, the longest first: the open incidents on hangs, stalls, ranks that disagree, stragglers, corrupt data.

    Empty if nothing is wrong.
    """
    job_exists(agent, job)
    if scope == "node":
        return answered(text_of(services.verdicts(job)))
    services.look_elsewhere(the_job(job))
    own, heard = services.verdicts(job), others.ask("verdicts?job", "ranks?job")
    return answered(services.worker.text(incidents.verdicts, the_job(job), own=own, heard=heard))


@router.get("/parts")
def parts(
    agent: QueriesOf,
    services: ServicesOf,
    job: JobFilter = None,
    limit: Annotated[
        int, Query(ge=1, le=MOST_PENDING, description="Maximum number of collectives of a group.")
    ] = MOST_PENDING,
) -> Parts:
    """Latest symmetric operations of groups that also have ranks on other nodes, and checks of their replicas; the agent of another node joins them."""
    job_exists(agent, job)
    return incidents.parts(agent, job, limit, services.ranks.of_records(job))


@router.get("/culprits")
def culprits(
    agent: QueriesOf,
    services: ServicesOf,
    job: Annotated[str, Query(description="Job id.")],
    rank: Annotated[list[int], Query(max_length=4, description="May be repeated.")],
) -> list[EvidenceItem]:
    """What ranks of this node do right now: the state of their processes, and their Python stacks; for the agents of other nodes."""
    job_exists(agent, job)
    return services.culprits.lent(job, rank)


@router.get("/efficiency", response_model=Efficiencies | JobWide[Efficiencies])
def efficiency(
    worker: WorkerOf, span: Span, others: OthersOf, job: JobFilter = None, scope: Scope = "node"
) -> Response:
    """Operations by group and size: measured and expected duration, the reference used, and what limits them."""
    heard = others.of_scope(scope, job, "cells?job,since,until")
    return answered(worker.text(operations.efficiency, span.from_ns, span.until_ns, job, heard=heard))


@router.get("/pipelines", response_model=list[Pipeline] | JobWide[list[Pipeline]])
def job_pipelines(
    agent: QueriesOf, worker: WorkerOf, others: OthersOf, job: JobFilter = None, scope: Scope = "node"
) -> Response:
    """Pipelines of the jobs on this node: how long stages wait for messages, in which direction, and the bubble."""
    job_exists(agent, job)
    with agent.live(job) as (jobs, _):
        own = pipelines(jobs)
    if scope == "node":
        return answered(text_of(own))
    the_job(job)
    return answered(worker.text(questions.pipelines, own=own, heard=others.ask("pipelines?job")))
