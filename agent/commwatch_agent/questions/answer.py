"""What an answer is: values with the nodes that they cover, or a text as it is sent; and why there is none. Imports no web server."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Generic, NamedTuple, TypeVar

from commwatch.wire.errors import CommwatchError
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.job.merging import Nodes

_T = TypeVar("_T")


class ApiError(CommwatchError):
    """An error of the caller, or the reason why there is no answer; the text is the detail of the problem details."""

    def __init__(self, status: HTTPStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Text(NamedTuple):
    """An answer as it is sent."""

    body: bytes
    media_type: str
    headers: Mapping[str, str]


def as_file(body: bytes, media_type: str, kind: str, job: str, suffix: str) -> Text:
    """Return an answer that browsers save as a file; ``kind``, the job and ``suffix`` make its name."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", job)[:80]
    return Text(body, media_type, {"Content-Disposition": f'attachment; filename="{kind}-{name}.{suffix}"'})


@dataclass(frozen=True)
class Scoped(Generic[_T]):
    """The answer to a question with a scope: this node, or all nodes of a job."""

    #: The nodes that it covers; ``None``: this one.
    nodes: Nodes | None
    data: _T


def job_exists(agent: QueryService, job: str | None) -> None:
    """Raise ``ApiError`` (404) if the history has no such job."""
    if job is not None and not agent.has_job(job):
        raise ApiError(HTTPStatus.NOT_FOUND, f"no job '{job}' in the history; /api/v1/jobs lists the jobs")


def text_of(answer: object) -> Text:
    """Return an answer as JSON, unless it is a ``Text`` already; numbers that are not finite become ``null``.

    Of a ``Scoped`` answer about this node only the data is sent.
    """
    if isinstance(answer, Text):
        return answer
    if isinstance(answer, Scoped) and answer.nodes is None:
        answer = answer.data
    try:
        text = json.dumps(answer, default=vars, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(answer), separators=(",", ":"))
    return Text(text.encode(), "application/json", {})


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return _finite(vars(value)) if hasattr(value, "__dict__") else value
