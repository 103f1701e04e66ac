"""Route of a job's report as an HTML file."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, Depends
from fastapi.responses import HTMLResponse, Response

from commwatch.server.history_queries import ApiError, job_exists
from commwatch.server.problems import ERRORS
from commwatch.server.routes.params import JobFilter, QueriesOf, ServicesOf, WorkerOf, answered, sound_parameters
from commwatch.watchers.nccl_archive import kept

router = APIRouter(prefix="/api/v1", responses=ERRORS, dependencies=[Depends(sound_parameters)])


@router.get("/report", response_class=HTMLResponse)
def report(agent: QueriesOf, worker: WorkerOf, services: ServicesOf, job: JobFilter = None) -> Response:
    """The report of a job (the latest by default) on this node as one HTML file, as `commwatch report --html` writes it."""
    job_exists(agent, job)
    named = job or next((each.job_id for each in agent.jobs()), None)
    if named is None:
        raise ApiError(HTTPStatus.NOT_FOUND, "no job in the history yet")
    topology = next(iter(services.logs.topology(named)), None) or kept(agent.path.parent, named)
    return answered(worker.text("report", job=named, topology=topology))
