"""Route of the other witnesses, NCCL Inspector and NCCL's RAS: their data is never mixed with that of the probe."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from commwatch_agent.model.witness_views import WitnessesView
from commwatch_agent.questions.answer import job_exists
from commwatch_agent.web.problems import ERRORS
from commwatch_agent.web.routes.params import JobFilter, QueriesOf, ServicesOf, sound_parameters

router = APIRouter(prefix="/api/v1", responses=ERRORS, dependencies=[Depends(sound_parameters)])


@router.get("/witnesses")
def witnesses(agent: QueriesOf, services: ServicesOf, job: JobFilter = None) -> WitnessesView:
    """What NCCL Inspector timed on the GPU, what NCCL's RAS counted over all nodes, and the state of both."""
    job_exists(agent, job)
    return WitnessesView(services.inspector.view(job), services.ras.view(job))
