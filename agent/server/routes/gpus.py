"""The route of the GPUs: utilisation of each card beside the communication of the ranks on it."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from commwatch.server.problems import ERRORS
from commwatch.server.questions import job_exists
from commwatch.server.routes.params import JobFilter, QueriesOf, ServicesOf, sound_parameters
from commwatch.watchers.gpus import GpuViews

router = APIRouter(prefix="/api/v1", responses=ERRORS, dependencies=[Depends(sound_parameters)])


@router.get("/gpus")
def gpus(agent: QueriesOf, services: ServicesOf, job: JobFilter = None) -> GpuViews:
    """The cards of this node with what was read of them last, their latest Xids, and the ranks on them (of one job, if asked)."""
    job_exists(agent, job)
    with agent.live(job) as (jobs, now_ns):
        return services.gpus.view(jobs, now_ns)
