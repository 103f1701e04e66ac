"""Errors of the API as problem details (RFC 9457): one sentence that names what is wrong, and what would be right."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException

from commwatch.wire.errors import CommwatchError
from commwatch_agent.history.opening import StoreError


@dataclass(frozen=True)
class ProblemDetails:
    """What went wrong (RFC 9457)."""

    type: str
    title: str
    status: int
    #: Names what was wrong, and what would be right.
    detail: str


#: Content of an error response, for the API's description.
PROBLEM: dict[str, Any] = {
    "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}
}
#: Errors that any route under /api/v1 may return.
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "A parameter is wrong; the detail names it.", **PROBLEM},
    401: {"description": "The token is missing or wrong.", **PROBLEM},
    403: {"description": "The request comes from a page of another origin.", **PROBLEM},
    404: {"description": "There is no such resource; the detail names it.", **PROBLEM},
    413: {"description": "The body is too large.", **PROBLEM},
    421: {"description": "The host header is not a name of this agent.", **PROBLEM},
    422: {"description": "A parameter is not of its type; the detail names it.", **PROBLEM},
    429: {"description": "This client has too many requests in progress.", **PROBLEM},
    500: {"description": "A fault of commwatch, which the agent's log has in full.", **PROBLEM},
    503: {
        "description": "The history cannot be read, a request cannot be written, or there are too many requests at once.",
        **PROBLEM,
    },
}


#: Temporary errors, and the header with the seconds after which to retry.
_BUSY, _SOON = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}), {"Retry-After": "1"}


def answer(status: int, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error response; for temporary errors with ``Retry-After``."""
    all_headers = {**(_SOON if status in _BUSY else {}), **(headers or {})}
    return Response(body_of(status, detail), status, all_headers, "application/problem+json")


def fault() -> Response:
    """Return the answer to a request that failed by a fault of commwatch."""
    return answer(HTTPStatus.INTERNAL_SERVER_ERROR, "a fault of commwatch, which its log has in full; please report it")


def body_of(status: int, detail: str) -> bytes:
    """Return the body of an error response."""
    problem = ProblemDetails("about:blank", HTTPStatus(status).phrase, int(status), detail)
    return json.dumps(asdict(problem)).encode()


def answer_problems(app: FastAPI) -> None:
    """Make ``app`` return every error as problem details, and add their schema to its description."""
    _add_schema(app, ProblemDetails)

    @app.exception_handler(CommwatchError)
    async def ours(_: Request, error: CommwatchError) -> Response:
        return answer(error.status, str(error))

    @app.exception_handler(StoreError)
    @app.exception_handler(sqlite3.Error)
    async def unreadable(_: Request, error: Exception) -> Response:
        return answer(StoreError.status, f"the history cannot be read: {error}")

    @app.exception_handler(Exception)
    async def unexpected(_: Request, __: Exception) -> Response:
        return fault()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        detail = (
            f"no resource at {request.url.path}; /docs lists all routes"
            if error.status_code == HTTPStatus.NOT_FOUND
            else str(error.detail)
        )
        response = answer(error.status_code, detail)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        what = "; ".join(
            f"{'.'.join(str(part) for part in e['loc'][1:])}={e.get('input')}: {e['msg']}" for e in error.errors()
        )
        return answer(HTTPStatus.UNPROCESSABLE_ENTITY, what)


def _add_schema(app: FastAPI, model: type) -> None:
    """Add a model that only error responses use to the schemas of the API's description."""
    build, described = app.openapi, TypeAdapter(model).json_schema()

    def openapi() -> dict[str, Any]:
        schema = build()
        schema["components"]["schemas"][model.__name__] = described
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
