"""The route of predictions for a job with changes."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from commwatch_agent.job.merging import JobWide
from commwatch_agent.model.durations import LAST
from commwatch_agent.questions import whatif as questions
from commwatch_agent.questions.answer import ApiError
from commwatch_agent.questions.report_sources import WITHIN_S
from commwatch_agent.report.recorded_steps import FEW_PARTS
from commwatch_agent.web.problems import ERRORS
from commwatch_agent.web.routes.params import (
    JobFilter,
    OthersOf,
    QueriesOf,
    Scope,
    WorkerOf,
    answered,
    seconds_of_end,
    some_job,
    sound_parameters,
)
from commwatch_agent.whatif.answers import Study
from commwatch_agent.whatif.questions import Question

router = APIRouter(prefix="/api/v1", responses=ERRORS, dependencies=[Depends(sound_parameters)])


def question(
    *,
    link: Annotated[
        str | None, Query(description="2x: twice the bandwidth; or a link of the catalogue, or a measured reference.")
    ] = None,
    latency: Annotated[str | None, Query(description="0.5x: half the latency of the link.")] = None,
    group: Annotated[str | None, Query(description="Only this group (its label) is on that link.")] = None,
    no_late: Annotated[bool, Query(description="No rank is late.")] = False,
    no_late_rank: Annotated[tuple[int, ...], Query(description="These ranks are not late.")] = (),
    compute: Annotated[
        tuple[str, ...], Query(description="0.5x: compute takes half the time; 3=0.5x: of rank 3.")
    ] = (),
    buckets: Annotated[str | None, Query(description="Size of DDP's buckets, such as 25MiB.")] = None,
    compress: Annotated[
        str | None, Query(description="fp16, bf16, int8, or the part of the bytes that is left.")
    ] = None,
    compress_cost: Annotated[
        float, Query(description="Seconds for packing 1 GB of gradients, and for unpacking it.")
    ] = 0.0,
    accumulate: Annotated[int | None, Query(description="Micro-steps for each exchange of gradients.")] = None,
    ranks: Annotated[int | None, Query(description="Number of ranks; each keeps its work.")] = None,
    shard: Annotated[bool, Query(description="FSDP in place of DDP.")] = False,
    replicate: Annotated[bool, Query(description="DDP in place of FSDP.")] = False,
) -> Question:
    """Return the changes in the query."""
    return Question(
        link, latency, group, no_late, tuple(no_late_rank), tuple(compute), buckets, compress, compress_cost, accumulate, ranks,
        shard, replicate,
    )  # fmt: skip


@router.get("/whatif", response_model=Study | JobWide[Study])
def whatif(
    agent: QueriesOf,
    worker: WorkerOf,
    others: OthersOf,
    asked: Annotated[Question, Depends(question)],
    *,
    job: JobFilter = None,
    runs: Annotated[
        tuple[str, ...],
        Query(
            alias="with",
            description="Another run of the same training, with another number of ranks; only with scope=node.",
        ),
    ] = (),
    last: Annotated[
        str, Query(description="How much of the job's end is replayed, such as 90s, 5m or 2h; all: the whole job.")
    ] = LAST,
    scope: Scope = "node",
) -> Response:
    """A prediction for a job (the latest by default) with changes that apply together; without any, answers to the usual questions."""
    last_s = seconds_of_end(last)
    named = some_job(agent, job, scope)
    heard = None
    if scope == "node":
        for each in runs:
            some_job(agent, each, scope)
    elif runs:
        raise ApiError(
            HTTPStatus.BAD_REQUEST, "with: only with scope=node; for all nodes use `commwatch whatif --with`"
        )
    else:
        most = FEW_PARTS // (others.number + 1)
        heard = others.ask(f"timeline_part?job,last={last},limit={most}", within_s=WITHIN_S)
    return answered(worker.text(questions.whatif, named, last_s=last_s, question=asked, runs=runs, heard=heard))
