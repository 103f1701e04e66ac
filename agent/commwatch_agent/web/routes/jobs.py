"""Routes of the agent, its jobs, operations, steps, ranks, groups, host and NCCL logs."""

from __future__ import annotations

import os
import time
from http import HTTPStatus
from socket import gethostname
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Query
from fastapi.responses import Response

from commwatch import __version__
from commwatch_agent.analysis.nccl_operations import nccl_operations
from commwatch_agent.analysis.summary import DIMENSIONS
from commwatch_agent.analysis.time_buckets import Lengths, SlotSums, lengths
from commwatch_agent.history.operations import Cursor, place_of
from commwatch_agent.history.rows import COARSE_NS, COARSEN_AFTER_NS
from commwatch_agent.job.merging import JobWide
from commwatch_agent.job.queries import Cells
from commwatch_agent.model.api_views import About, Summary
from commwatch_agent.model.host_views import HostView
from commwatch_agent.model.nccl_views import NcclMessage, NcclOperations, Topology
from commwatch_agent.model.views import GroupView, JobFigures, JobView, RankView, StepView
from commwatch_agent.questions import jobs as questions
from commwatch_agent.questions import operations
from commwatch_agent.questions.answer import ApiError, job_exists, text_of
from commwatch_agent.questions.jobs import Past
from commwatch_agent.questions.operations import Collective, Operations, Wanted
from commwatch_agent.questions.report_sources import WITHIN_S
from commwatch_agent.report.job_figures import MOST_DURATIONS, FiguresPart, job_figures, most_durations
from commwatch_agent.report.job_figures import figures_parts as job_figures_parts
from commwatch_agent.runtime.peers import PeerView
from commwatch_agent.web.problems import ERRORS
from commwatch_agent.web.routes.params import (
    MOST_ROWS,
    JobFilter,
    Limit,
    OthersOf,
    QueriesOf,
    Scope,
    ServicesOf,
    Span,
    WorkerOf,
    answered,
    now_of,
    sound_parameters,
    the_job,
)
from commwatch_collectors.nccl.classes import CLASSES, OTHER

router = APIRouter(prefix="/api/v1", responses=ERRORS, dependencies=[Depends(sound_parameters)])


@router.get("/about")
def about(services: ServicesOf) -> About:
    """The agent itself: version, history file, current trouble, the client that last scraped its metrics, and its pushes over OTLP."""
    path = str(services.queries.path)
    state = (services.ready(), *services.scraped, time.time())
    return About(
        __version__,
        os.getpid(),
        path,
        *state,
        gethostname(),
        services.id,
        services.pushes(),
        services.queries.live_runs(),
    )


@router.get("/peers")
def peers(services: ServicesOf) -> list[PeerView]:
    """The agents of other nodes that the setting `peers` names, and whether they answer."""
    return services.peers.views()


@router.get(
    "/jobs", response_model=list[JobFigures] | list[JobView] | JobWide[list[JobFigures]] | JobWide[list[JobView]]
)
def jobs(
    agent: QueriesOf,
    worker: WorkerOf,
    others: OthersOf,
    *,
    scope: Scope = "node",
    figures: Annotated[
        bool, Query(description="Add duration, steps and shares, as `commwatch jobs` shows them.")
    ] = False,
    limit: Annotated[int | None, Query(ge=1, le=MOST_ROWS, description="Maximum number of jobs; default: all.")] = None,
) -> Response:
    """The jobs of this node, newest first; with `scope=job` those of all agents."""
    if scope == "job" and figures:
        most = limit or MOST_ROWS
        durations = most_durations(min(most, len(agent.jobs())), others.number)
        heard = others.ask(f"figures_parts?most={most},durations={durations}", within_s=WITHIN_S)
        return answered(worker.text(questions.figures_of_all, most=most, durations=durations, heard=heard))
    if scope == "job":
        return answered(worker.text(questions.jobs, most=limit, heard=others.ask("jobs?limit")))
    return answered(worker.text(job_figures, limit) if figures else text_of(questions.jobs(agent, most=limit)))


@router.get("/figures_parts", response_model=list[FiguresPart])
def figures_parts(
    worker: WorkerOf,
    most: Annotated[int, Query(ge=1, le=MOST_ROWS, description="Maximum number of jobs: the latest.")] = MOST_ROWS,
    durations: Annotated[
        int, Query(ge=1, le=MOST_DURATIONS, description="Maximum number of step durations of one job.")
    ] = MOST_DURATIONS,
) -> Response:
    """What the figures of jobs need of this node, for the answer of another agent to `jobs?figures=true&scope=job`."""
    return answered(worker.text(job_figures_parts, most, durations))


@router.get("/summary", response_model=Summary | JobWide[Summary])
def summary(
    worker: WorkerOf,
    span: Span,
    others: OthersOf,
    *,
    scope: Scope = "node",
    job: JobFilter = None,
    by: Annotated[str, Query(description=f"Comma-separated, of {', '.join(DIMENSIONS)}.")] = "group,op",
    group: str | None = None,
    op: str | None = None,
    rank: int | None = None,
    size: Annotated[int | None, Query(ge=1, description="Size class: its upper end in bytes, a power of two.")] = None,
) -> Response:
    """Operations by group and op, or by other dimensions: counts, bytes, percentiles, bandwidths, waits."""
    dimensions = [part.strip() for part in by.split(",") if part.strip()]
    for dimension in dimensions:
        if dimension not in DIMENSIONS:
            raise ApiError(
                HTTPStatus.BAD_REQUEST, f"by={dimension}: unknown dimension; choose from {', '.join(DIMENSIONS)}"
            )
    same = {"group": group, "op": op, "rank": rank, "size": size}
    heard = others.of_scope(scope, job, "cells?job,since,until")
    return answered(
        worker.text(operations.summary, span.from_ns, span.until_ns, job, by=dimensions, same=same, heard=heard)
    )


@router.get("/cells", response_model=Cells)
def cells(worker: WorkerOf, span: Span, job: Annotated[str, Query(description="Job id.")]) -> Response:
    """Sums of a job by rank, group, op and size, with sketches of durations, for the answer of another agent to `scope=job`."""
    return answered(worker.text(operations.cells, span.from_ns, span.until_ns, job))


_Length = Annotated[int, Query(ge=10, le=86_400, multiple_of=10, description="Length of a slot, in seconds.")]


@router.get("/slots", response_model=list[SlotSums])
def slots(
    worker: WorkerOf,
    span: Span,
    job: Annotated[str, Query(description="Job id.")],
    length: _Length = 10,
    busbw_length: _Length = 10,
) -> Response:
    """Sums of a job by slots: its steps, and the bytes and time of its operations, for the live page of another agent."""
    of = Lengths(length * 10**9, busbw_length * 10**9)
    return answered(worker.text(questions.slots, span.from_ns, span.until_ns, job, of=of))


@router.get("/past", response_model=JobWide[Past])
def past(
    worker: WorkerOf, agent: QueriesOf, span: Span, others: OthersOf, job: Annotated[str, Query(description="Job id.")]
) -> Response:
    """What the live page shows of a time range, of all nodes of a job: shares and bus bandwidth in at most 360 slots, and the latest operations."""
    now_ns = int(now_of(agent, job, job) * 1e9)
    of = lengths(span.from_ns, min(span.until_ns, now_ns + 10**9), now_ns - COARSEN_AFTER_NS, COARSE_NS)
    each = f"length={of.steps_ns // 10**9},busbw_length={of.busbw_ns // 10**9}"
    heard = others.ask(f"slots?job,since,until,{each}", "bars?job,since,until")
    return answered(worker.text(questions.past, span.from_ns, span.until_ns, job, of=of, heard=heard))


@router.get("/ops", response_model=Operations, responses={200: {"content": {"text/csv": {}}}})
def ops(
    worker: WorkerOf,
    span: Span,
    *,
    job: JobFilter = None,
    group: str | None = None,
    group_id: str | None = None,
    op: str | None = None,
    rank: int | None = None,
    seq: Annotated[int | None, Query(ge=0)] = None,
    min_seconds: Annotated[float | None, Query(ge=0, description="Only operations of at least this duration.")] = None,
    limit: Limit = 100,
    cursor: Annotated[str | None, Query(description="As returned with the previous page.")] = None,
    format: Annotated[Literal["json", "csv"], Query()] = "json",  # noqa: A002 - the name in the URL
) -> Response:
    """Single operations, newest first."""
    before: Cursor | None = None
    if cursor is not None:
        try:
            before = place_of(cursor)
        except ValueError:
            raise ApiError(
                HTTPStatus.BAD_REQUEST, f"cursor={cursor}: not a cursor of this API; begin again without it"
            ) from None
    same = {"group": group, "group_id": group_id, "op": op, "rank": rank, "seq": seq}
    wanted = Wanted(span.from_ns, span.until_ns, job, same, min_seconds, before, limit)
    return answered(worker.text(operations.operations_csv if format == "csv" else operations.operations, wanted))


@router.get("/collectives/{group_id}/{seq}", response_model=Collective)
def collective(
    worker: WorkerOf, group_id: str, seq: Annotated[int, Path(ge=0, lt=1 << 32)], job: JobFilter = None
) -> Response:
    """The ranks of one collective side by side; without `job`, of the run that had it last."""
    return answered(worker.text(operations.collective, group_id, seq, job))


@router.get("/steps", response_model=list[StepView] | JobWide[list[StepView]])
def steps(
    worker: WorkerOf,
    span: Span,
    others: OthersOf,
    *,
    scope: Scope = "node",
    job: JobFilter = None,
    rank: int | None = None,
    limit: Limit = 100,
) -> Response:
    """Training steps, newest first."""
    heard = others.of_scope(scope, job, "steps?job,since,until,rank,limit")
    return answered(worker.text(questions.steps, span.from_ns, span.until_ns, job, rank=rank, limit=limit, heard=heard))


@router.get("/ranks", response_model=list[RankView] | JobWide[list[RankView]])
def ranks(
    agent: QueriesOf, worker: WorkerOf, others: OthersOf, job: JobFilter = None, scope: Scope = "node"
) -> Response:
    """The ranks of this node: state, last collective, operations in flight and for how long."""
    job_exists(agent, job)
    if scope == "job":
        return answered(worker.text(questions.ranks, the_job(job), heard=others.ask("ranks?job")))
    return answered(text_of(questions.ranks(agent, job)))


@router.get("/groups", response_model=list[GroupView] | JobWide[list[GroupView]])
def groups(
    agent: QueriesOf, worker: WorkerOf, others: OthersOf, job: JobFilter = None, scope: Scope = "node"
) -> Response:
    """The process groups that ranks of this node have used."""
    job_exists(agent, job)
    if scope == "job":
        return answered(worker.text(questions.groups, the_job(job), heard=others.ask("groups?job")))
    return answered(text_of(questions.groups(agent, job)))


@router.get("/host")
def host(agent: QueriesOf, services: ServicesOf, job: JobFilter = None) -> HostView:
    """This node: CPU, memory, network devices, GPUs near them, problems, and device traffic beside that of collectives."""
    job_exists(agent, job)
    return services.host.view(job)


@router.get("/topology")
def topology(agent: QueriesOf, services: ServicesOf, job: JobFilter = None) -> list[Topology]:
    """Contents of the NCCL logs of running jobs: hosts, communicators, transports, choices, findings."""
    if job is not None and not services.logs.knows(job):
        job_exists(agent, job)
    return services.logs.topology(job)


@router.get("/nccl/operations")
def operations_of_nccl(agent: QueriesOf, job: JobFilter = None) -> list[NcclOperations]:
    """Operations by what NCCL chose for them, with NCCL's own times, as far as its profiler plugin reports them."""
    job_exists(agent, job)
    with agent.live(job) as (jobs, _):
        return nccl_operations(jobs)


@router.get("/nccl/messages")
def nccl_messages(
    agent: QueriesOf,
    services: ServicesOf,
    span: Span,
    *,
    job: JobFilter = None,
    message_class: Annotated[
        str | None, Query(alias="class", description=f"One of {', '.join((*CLASSES, OTHER))}.")
    ] = None,
    limit: Limit = 100,
) -> list[NcclMessage]:
    """Warnings in the NCCL logs of running jobs, newest first."""
    if message_class not in (None, *CLASSES, OTHER):
        raise ApiError(
            HTTPStatus.BAD_REQUEST, f"class={message_class}: no such class; choose from {', '.join((*CLASSES, OTHER))}"
        )
    if job is not None and not services.logs.knows(job):
        job_exists(agent, job)
    return services.logs.messages(job, message_class, span.from_ns / 1e9, span.until_ns / 1e9, limit)
