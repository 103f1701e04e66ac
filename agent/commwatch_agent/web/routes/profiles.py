"""Routes that request a profile, and return its progress and result. No other route of the API has a side effect."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request
from pydantic import BaseModel, ConfigDict, Field

from commwatch.wire.profile_files import MOST_SECONDS, MOST_STEPS
from commwatch_agent.questions.answer import ApiError
from commwatch_agent.sources.profiles import Profile, Profiles
from commwatch_agent.web.problems import ERRORS, PROBLEM
from commwatch_agent.web.routes.params import ServicesOf, sound_parameters

router = APIRouter(prefix="/api/v1", responses=ERRORS, dependencies=[Depends(sound_parameters)])
_CONFLICT = {"description": "The job is not running, or a profile of it is in progress.", **PROBLEM}
_NOT_JSON = {"description": "The body is not declared to be JSON.", **PROBLEM}


class Wanted(BaseModel):
    """A request for a profile."""

    model_config = ConfigDict(extra="forbid", strict=True)

    job: str
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 3
    ranks: Annotated[
        list[Annotated[int, Field(ge=0)]] | None, Field(min_length=1, description="Default: all of this node.")
    ] = None
    timeout_s: Annotated[
        float,
        Field(gt=0, le=MOST_SECONDS, description="Seconds after which no rank begins, and a running profile stops."),
    ] = 120.0


async def _profiles(services: ServicesOf) -> Profiles:
    return services.profiles


ProfilesOf = Annotated[Profiles, Depends(_profiles)]


def _declared_json(request: Request) -> None:
    """Require ``application/json``: a page of another origin cannot send that type without a CORS preflight."""
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared != "application/json":
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"content-type={declared or 'none'}: send JSON with content-type application/json",
        )


@router.post(
    "/profiles",
    status_code=HTTPStatus.ACCEPTED,
    responses={409: _CONFLICT, 415: _NOT_JSON},
    dependencies=[Depends(_declared_json)],
)
def ask(profiles: ProfilesOf, wanted: Wanted) -> Profile:
    """Run torch.profiler for a few steps in the trainers of a job on this node."""
    try:
        return profiles.ask(wanted.job, wanted.steps, wanted.ranks, wanted.timeout_s)
    except OSError as error:
        detail = f"the request cannot be written: {error.strerror or error} ({error.filename})"
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, detail) from None


@router.get("/profiles/{profile_id}")
def profile(profiles: ProfilesOf, profile_id: Annotated[str, Path(description="As returned by POST.")]) -> Profile:
    """Progress and result of a profile, rank by rank, with what the probe recorded of its steps."""
    found = profiles.get(profile_id)
    if found is None:
        raise ApiError(HTTPStatus.NOT_FOUND, f"no profile '{profile_id}' here")
    return found
