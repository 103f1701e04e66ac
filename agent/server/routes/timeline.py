"""Route of a job's timeline as a file for Perfetto."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response

from commwatch.server.history_queries import ApiError
from commwatch.server.problems import ERRORS
from commwatch.server.routes.params import (
    JobFilter,
    QueriesOf,
    ServicesOf,
    WorkerOf,
    answered,
    job_or_latest,
    seconds_of_end,
    sound_parameters,
)

router = APIRouter(prefix="/api/v1", responses=ERRORS, dependencies=[Depends(sound_parameters)])


@router.get("/timeline", response_class=Response, responses={200: {"content": {"application/gzip": {}}}})
def timeline(
    agent: QueriesOf,
    worker: WorkerOf,
    services: ServicesOf,
    job: JobFilter = None,
    last: Annotated[
        str, Query(description="How much of the job's end it covers, such as 30s, 5m or 2h; all: the whole job.")
    ] = "30s",
) -> Response:
    """The operations of a job (the latest by default) as a compressed Chrome trace for Perfetto: at most the latest 50,000."""
    last_s = seconds_of_end(last)
    named = job_or_latest(agent, job)
    if named is None:
        raise ApiError(HTTPStatus.NOT_FOUND, "no job in the history yet")
    return answered(worker.text("timeline", job=named, last_s=last_s, marks=services.evidence.marks(named)))
