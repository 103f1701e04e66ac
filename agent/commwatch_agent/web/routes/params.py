"""Shared parts of the API's routes: times, windows, filters, and the services that answer."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from http import HTTPStatus
from typing import Annotated, Literal
from urllib.parse import parse_qsl, unquote_to_bytes, urlencode

from fastapi import Depends, Query, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.datastructures import QueryParams

from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.history.opening import StoreError
from commwatch_agent.job.merging import Heard
from commwatch_agent.model.durations import parse_age, parse_last
from commwatch_agent.questions.answer import ApiError, Text, job_exists
from commwatch_agent.questions.services import Services
from commwatch_agent.questions.worker import Worker
from commwatch_agent.runtime.peers import MOST_S, SELF, Peers

MOST_ROWS = 10_000
#: Characters of one value; the longest valid ones are lists of dimensions and names of jobs.
MOST_CHARACTERS = 4096


def parse_time(text: str, now_s: float) -> float:
    """Return Unix seconds from Unix seconds, ISO 8601, or an age such as ``15m``; raise ``ValueError`` otherwise."""
    with suppress(ValueError):
        return now_s - parse_age(text)
    if re.fullmatch(r"\d{1,12}(\.\d{1,9})?", text):
        return float(text)
    moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


@dataclass(frozen=True)
class Window:
    """The time range of a query, Unix time in ns."""

    from_ns: int
    until_ns: int


Since = Annotated[
    str | None, Query(description="Start: Unix seconds, ISO 8601, or an age such as 15m. Default: all that is kept.")
]
Until = Annotated[str | None, Query(description="End, in the same forms. Default: that of what is kept.")]
#: Unix seconds after which nothing is.
_MOST_S = 9e9


def window(since: str | None, until: str | None, now: float) -> Window:
    """Return the window of the query parameters ``since`` and ``until``; ``now``: Unix seconds from which ages count."""
    bounds = []
    for name, text, default in (("since", since, 0.0), ("until", until, _MOST_S)):
        try:
            value = default if text is None else parse_time(text, now)
        except (ValueError, OverflowError):
            raise ApiError(
                HTTPStatus.BAD_REQUEST, f"{name}={text}: give Unix seconds, an ISO 8601 time, or an age such as 15m"
            ) from None
        bounds.append(int(min(max(value, 0), _MOST_S) * 1e9))
    if bounds[0] > bounds[1]:
        raise ApiError(HTTPStatus.BAD_REQUEST, f"since={since} is later than until={until}")
    return Window(*bounds)


JobFilter = Annotated[str | None, Query(description="Job id; default: all jobs.")]
Limit = Annotated[int, Query(ge=1, le=MOST_ROWS, description="Maximum number of rows.")]


async def sound_parameters(request: Request) -> None:
    """Refuse invalid text, and unknown parameters: FastAPI ignores a misspelt filter, and the answer would hold all.

    Raises:
        ApiError: 400 for a parameter that the route does not have; 422 for bytes that are not UTF-8, half a surrogate pair, a NUL character, or a
            value that is too long, in the query, the path or the body. The detail names the parameter.
    """
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    known = query_names(route.dependant)
    for name in request.query_params:
        if name not in known:
            raise ApiError(HTTPStatus.BAD_REQUEST, f"{name}: no such parameter; known: {', '.join(known) or 'none'}")
    # Read only where the route takes a body: reading fails if the client has disconnected, which is no error otherwise.
    body = await request.body() if route.body_field is not None else b""
    for name, text in (*_in_url(request), *_in_body(body)):
        wrong = _unsound(text)
        if wrong is not None:
            raise ApiError(HTTPStatus.UNPROCESSABLE_ENTITY, f"{name}: {wrong}")


def query_names(dependant: Dependant) -> list[str]:
    """Return the query parameters of a route, and of what it depends on; the description of the API has them, too, but takes 6 MB to make."""
    names = [parameter.alias for parameter in dependant.query_params]
    for each in dependant.dependencies:
        names += query_names(each)
    return list(dict.fromkeys(names))


def _in_url(request: Request) -> Iterator[tuple[str, str]]:
    """Yield names and values of query and path; bytes that are not UTF-8 become lone surrogates."""
    query = request.scope["query_string"].decode("latin-1")
    yield from parse_qsl(query, keep_blank_values=True, errors="surrogateescape")
    full_value = unquote_to_bytes(request.scope["raw_path"]).decode("utf-8", "surrogateescape")
    for name, value in request.path_params.items():
        # Only the whole path is available as bytes; in the value, what is not UTF-8 is U+FFFD.
        yield name, full_value if "\ufffd" in value and _unsound(full_value) else value


def _in_body(body: bytes) -> Iterator[tuple[str, str]]:
    """Yield the texts of a JSON body, keys included, each under the name of its outermost key."""
    try:
        found = json.loads(body) if body else None
    except (ValueError, RecursionError):  # the route reports the error
        return
    waiting = [("body", found)] if not isinstance(found, dict) else [(key, {key: found[key]}) for key in found]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, str):
            yield name, value
        elif isinstance(value, dict):
            waiting += [(name, part) for item in value.items() for part in item]
        elif isinstance(value, list):
            waiting += [(name, part) for part in value]


def _unsound(text: str) -> str | None:
    if len(text) > MOST_CHARACTERS:
        return f"{len(text)} characters; at most {MOST_CHARACTERS} are accepted"
    if "\0" in text:
        return "it contains a NUL character"
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        return "it is not UTF-8"
    return None


async def services(request: Request) -> Services:
    """Return the agent's services, which ``application`` has stored."""
    found = request.app.state.services
    assert isinstance(found, Services)
    return found


ServicesOf = Annotated[Services, Depends(services)]


async def _queries(found: ServicesOf) -> QueryService:
    return found.queries


async def _worker(found: ServicesOf) -> Worker:
    return found.worker


QueriesOf = Annotated[QueryService, Depends(_queries)]


def now_of(agent: QueryService, job: str | None, *ages: str | None) -> float:
    """Return the Unix time now by the clock of a job's records, if one of the texts may be an age."""
    with suppress(StoreError, sqlite3.Error):  # the route reports the error
        return agent.now_s(job if any(ages) else None, time.time())
    return time.time()


def _span(request: Request, agent: QueriesOf, since: Since = None, until: Until = None) -> Window:
    """Query parameters ``since`` and ``until``."""
    return window(since, until, now_of(agent, request.query_params.get("job"), since, until))


Span = Annotated[Window, Depends(_span)]
WorkerOf = Annotated[Worker, Depends(_worker)]


Scope = Annotated[
    Literal["node", "job"],
    Query(description="job: the answer covers all nodes of the job, as far as the agents of the setting peers answer."),
]


class Others:
    """The agents of other nodes, for one request.

    Args:
        given: the parameters of the request, passed on as they are written, so that an age counts from the clock of each node.
    """

    def __init__(self, given: QueryParams, peers: Peers) -> None:
        self._given, self._peers = given, peers

    def ask(self, *questions: str, within_s: float = MOST_S) -> Heard:
        """Return the answers to questions such as ``steps?job,limit``: a route, and the names of parameters to pass on.

        A parameter with a value, as in ``parts?limit=64``, has that value.
        """
        return self._peers.ask(*map(self._path, questions), within_s=within_s)

    def of_scope(self, scope: str, job: str | None, *questions: str) -> Heard | None:
        """Return the answers if the question is about all nodes; ``None``: about this one. Raise ``ApiError`` as ``the_job``."""
        if scope == "node":
            return None
        the_job(job)
        return self.ask(*questions)

    @property
    def number(self) -> int:
        """Number of the other agents."""
        return sum(peer.state != SELF for peer in self._peers.views())

    def _path(self, question: str) -> str:
        route, _, names = question.partition("?")
        pairs = [name.partition("=") for name in names.split(",") if name]
        values = [
            (name, given) for name, _, value in pairs for given in ([value] if value else self._given.getlist(name))
        ]
        return f"{route}?{urlencode(values)}"


async def _others(request: Request, found: ServicesOf) -> Others:
    return Others(request.query_params, found.peers)


OthersOf = Annotated[Others, Depends(_others)]


def the_job(job: str | None) -> str:
    """Return the job of a question about all its nodes; raise ``ApiError`` (400) without one."""
    if job is None:
        raise ApiError(HTTPStatus.BAD_REQUEST, "scope=job: name the job, as job=NAME; /api/v1/jobs lists the jobs")
    return job


def job_or_latest(agent: QueryService, job: str | None, scope: str) -> str | None:
    """Return the job, by default the latest; ``None``: there is none. Raise ``ApiError`` as ``the_job``, and (404) for an unknown one."""
    job = the_job(job) if scope == "job" else job
    job_exists(agent, job)
    return job if job is not None else next((each.job_id for each in agent.jobs()), None)


def some_job(agent: QueryService, job: str | None, scope: str) -> str:
    """Return what ``job_or_latest`` returns; raise ``ApiError`` (404) if there is no job."""
    found = job_or_latest(agent, job, scope)
    if found is None:
        raise ApiError(HTTPStatus.NOT_FOUND, "no job in the history yet")
    return found


def seconds_of_end(last: str) -> float | None:
    """Return the parameter ``last`` in seconds, ``None`` for the whole job; raise ``ApiError`` (400) if it is not valid."""
    try:
        return parse_last(last)
    except ValueError as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, f"last={error}") from None


def answered(text: Text) -> Response:
    """Return the worker's answer as a response, unchanged."""
    return Response(text.body, headers=dict(text.headers), media_type=text.media_type)
