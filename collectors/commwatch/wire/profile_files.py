"""Files with which the agent requests a profile and ranks return it.

All are in ``<run directory>/profiling``. The agent writes the request. A rank that accepts it first writes a claim, so that
the rank does not repeat the request after a restart, and at the end its result, with the trace if there is one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from commwatch.wire import crossing
from commwatch.wire.crossing import Trust
from commwatch.wire.identity import make_private_dir, ring_prefix

#: Most steps in a request, and its longest lifetime in seconds.
MOST_STEPS = 50
MOST_SECONDS = 3600
#: A request lists its ranks, at most those of one node.
_MOST_REQUEST_BYTES = 65_536
#: Suffixes of a rank's files.
CLAIM, RESULT, TRACE = "claim", "json", "pt.trace.json.gz"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Request:
    """A request for a profile of some ranks of a job."""

    id: str
    job: str
    steps: int
    ranks: list[int]
    #: Unix time in s after which no rank starts, and a rank that still profiles stops at its next step mark.
    until: float
    #: Name of the run, as it is shown, and ``place_of`` its processes: two runs of a job may run at the same time.
    run: str
    processes: list[str]


@dataclass(frozen=True)
class Claim:
    """The process in which a rank accepted a request."""

    pid: int


@dataclass(frozen=True)
class Result:
    """The outcome on one rank; ``from_seq`` and ``until_seq`` are the numbers of the marks where its steps begin and end."""

    id: str
    rank: int
    steps: int
    from_seq: int
    until_seq: int
    #: Unix time of these two marks in ns, by the clock of the trace.
    from_ns: int
    until_ns: int
    #: Why there is no trace; ``None`` if there is one.
    error: str | None


def place_of(host: str, pid: int) -> str:
    """Return host and pid of a process as a request has them."""
    return f"{host}:{pid}"


def directory(run_dir: Path) -> Path:
    """Return the directory of requests and results."""
    return run_dir / "profiling"


def request_path(run_dir: Path, job: str) -> Path:
    """Return the path of the current request to a job."""
    return directory(run_dir) / f"{ring_prefix(job)}.request.json"


def of_rank(directory: Path, request_id: str, rank: int, what: str) -> Path:
    """Return the path of a rank's file for a request; ``what`` is its suffix."""
    return directory / f"{request_id}.rank{rank}.{what}"


def write(path: Path, content: Any, env: Mapping[str, str]) -> None:
    """Write ``content`` (a dataclass) as JSON, atomically.

    Raises:
        OSError: no permission, or no space.
    """
    crossing.write(path, json.dumps(asdict(content)), make_private_dir(path.parent, env))


def read_request(path: Path, trust: Trust) -> Request:
    """Read the request from a file in the shared run directory.

    Args:
        trust: who may request a profile.

    Raises:
        ValueError: it is not a valid request.
        OSError: it cannot be read, or its owner is not trusted.
    """
    return request_from(crossing.read(path, _MOST_REQUEST_BYTES, trust).decode())


def request_from(text: str) -> Request:
    """Parse a request; raise ``ValueError`` if it is invalid."""
    request = _made(Request, text)
    numbers = [request.steps, *request.ranks] if isinstance(request.ranks, list) else [None]
    sound = all(type(number) is int for number in numbers) and isinstance(request.until, (int, float))
    sound = sound and isinstance(request.processes, list) and all(isinstance(each, str) for each in request.processes)
    if (
        not sound
        or not isinstance(request.job, str)
        or not isinstance(request.run, str)
        or not _is_id(request.id)
        or not 1 <= request.steps <= MOST_STEPS
    ):
        raise ValueError("not a request for a profile")
    return request


def result_from(text: str) -> Result:
    """Parse a result; raise ``ValueError`` if it is invalid."""
    result = _made(Result, text)
    numbers = (result.rank, result.steps, result.from_seq, result.until_seq, result.from_ns, result.until_ns)
    if any(type(number) is not int for number in numbers) or not isinstance(result.error, (str, type(None))):
        raise ValueError("not the result of a profile")
    return result


def claim_from(text: str) -> Claim:
    """Parse a claim; raise ``ValueError`` if it is invalid."""
    return _made(Claim, text)


def _made(kind: type[_T], text: str) -> _T:
    try:
        return kind(**json.loads(text))
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 64 and value.isalnum()
