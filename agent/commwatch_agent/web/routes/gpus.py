"""Route of the GPUs: utilisation of each, and the communication of the ranks on it."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from commwatch_agent.questions.answer import job_exists
from commwatch_agent.sources.gpus import GpuViews
from commwatch_agent.web.problems import ERRORS
from commwatch_agent.web.routes.params import JobFilter, QueriesOf, ServicesOf, sound_parameters

router = APIRouter(prefix="/api/v1", responses=ERRORS, dependencies=[Depends(sound_parameters)])


@router.get("/gpus")
def gpus(agent: QueriesOf, services: ServicesOf, job: JobFilter = None) -> GpuViews:
    """The GPUs of this node: latest readings, latest Xids, and the ranks on each (only those of `job`, if given)."""
    job_exists(agent, job)
    with agent.live(job) as (jobs, now_ns):
        return services.gpus.view(jobs, now_ns)
