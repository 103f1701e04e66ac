"""Routes of reports and advice on a job."""

from __future__ import annotations

import shlex
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Response

from commwatch_agent.job.job_report import MOST_STEPS, ReportPart
from commwatch_agent.job.merging import JobWide
from commwatch_agent.job.wait_parts import MOST_COLLECTIVES, WaitPart
from commwatch_agent.model.api_views import Advice
from commwatch_agent.model.durations import LAST
from commwatch_agent.questions import reports
from commwatch_agent.questions.answer import job_exists, text_of
from commwatch_agent.questions.report_sources import asked_of_others, own_facts
from commwatch_agent.report.report import Report
from commwatch_agent.web.problems import ERRORS
from commwatch_agent.web.routes.params import (
    JobFilter,
    QueriesOf,
    Scope,
    ServicesOf,
    WorkerOf,
    answered,
    job_or_latest,
    seconds_of_end,
    some_job,
    sound_parameters,
)

router = APIRouter(prefix="/api/v1", responses=ERRORS, dependencies=[Depends(sound_parameters)])
Last = Annotated[
    str, Query(description="How much of the job's end the advice covers, such as 90s, 5m or 2h; all: the whole job.")
]


@router.get("/advice", response_model=list[Advice] | JobWide[list[Advice]])
def job_advice(
    agent: QueriesOf,
    worker: WorkerOf,
    services: ServicesOf,
    *,
    job: JobFilter = None,
    last: Last = LAST,
    scope: Scope = "node",
) -> Response:
    """What to try in a job (the latest by default), the expected gain, and the numbers behind the advice."""
    last_s = seconds_of_end(last)
    named = job_or_latest(agent, job, scope)
    if named is None:
        return answered(text_of([]))
    own = own_facts(services, named)
    asked = asked_of_others(services, named, last_s, live=True) if scope == "job" else None
    return answered(worker.text(reports.advice, named, own=own, last_s=last_s, asked=asked))


@router.get("/report", response_model=Report, responses={200: {"content": {"text/html": {}}}})
def report(
    agent: QueriesOf,
    worker: WorkerOf,
    services: ServicesOf,
    *,
    job: JobFilter = None,
    last: Last = LAST,
    scope: Scope = "node",
    format: Annotated[Literal["json", "html"], Query()] = "json",  # noqa: A002 - the name in the URL
) -> Response:
    """The report on a job (the latest by default), as `commwatch report` prints it; `html`: one self-contained page."""
    last_s = seconds_of_end(last)
    named = some_job(agent, job, scope)
    asked = asked_of_others(services, named, last_s) if scope == "job" else None
    command = f"commwatch report{'' if last == LAST else f' --last {last}'} {shlex.quote(named)}"
    question = reports.report_page if format == "html" else reports.report
    own = own_facts(services, named)
    return answered(worker.text(question, named, own=own, last_s=last_s, command=command, asked=asked))


@router.get("/report_part", response_model=ReportPart)
def report_part(
    agent: QueriesOf,
    worker: WorkerOf,
    services: ServicesOf,
    job: Annotated[str, Query(description="Job id.")],
    steps: Annotated[int, Query(ge=1, le=MOST_STEPS, description="Maximum number of steps: the latest.")] = MOST_STEPS,
) -> Response:
    """What this node contributes to the report of another agent: ranks, groups, latest steps, waits, host and NCCL's logs."""
    job_exists(agent, job)
    return answered(worker.text(reports.report_part, job, own=own_facts(services, job), steps=steps))


@router.get("/wait_part", response_model=WaitPart)
def wait_part(
    agent: QueriesOf,
    worker: WorkerOf,
    job: Annotated[str, Query(description="Job id.")],
    most: Annotated[
        int, Query(ge=1, le=MOST_COLLECTIVES, description="Maximum number of collectives: the latest.")
    ] = MOST_COLLECTIVES,
) -> Response:
    """The latest collectives of groups that also have ranks on other nodes, for the waits in another agent's report; `report_part` has the rest."""
    job_exists(agent, job)
    return answered(worker.text(reports.wait_part, job, most=most))
