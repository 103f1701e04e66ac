"""The route of the other witnesses: what NCCL Inspector and NCCL's RAS say, beside the probe and never mixed with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends

from commwatch.core.witness_views import InspectorView, RasView
from commwatch.server.problems import ERRORS
from commwatch.server.questions import job_exists
from commwatch.server.routes.params import AgentOf, JobFilter, of_app, sound_parameters
from commwatch.watchers.inspector import Inspector
from commwatch.watchers.ras import Ras

router = APIRouter(prefix="/api/v1", responses=ERRORS, dependencies=[Depends(sound_parameters)])


@dataclass(frozen=True)
class Witnesses:
    """Who else tells an agent of the jobs."""

    inspector: Inspector
    ras: Ras


@dataclass(frozen=True)
class WitnessesView:
    """What they say."""

    inspector: InspectorView
    ras: RasView


WitnessesOf = Annotated[Witnesses, Depends(of_app("witnesses", Witnesses))]


@router.get("/witnesses")
def witnesses(agent: AgentOf, witnesses: WitnessesOf, job: JobFilter = None) -> WitnessesView:
    """What NCCL Inspector timed on the GPU, and what NCCL's RAS counted over all nodes; and whether they are off, or down."""
    job_exists(agent, job)
    return WitnessesView(witnesses.inspector.view(job), witnesses.ras.view(job))
