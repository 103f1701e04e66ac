"""Where agent and trainers meet about a profile: a request in the run directory, and what each rank leaves beside it.

All lie in ``<run directory>/profiling``. The agent writes the request; a rank that takes it up leaves first a claim, which
keeps another life of that rank from doing it again, and at last its result, with the trace where there is one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from commwatch.collectors.wire import others
from commwatch.collectors.wire.identity import make_private_dir, ring_prefix, write_whole

#: Steps that can be asked for, and seconds that a request may stand.
MOST_STEPS = 50
MOST_SECONDS = 3600
#: A request names its ranks, and no more of them than a node has.
_MOST_REQUEST_BYTES = 65_536
#: What the names of a rank's files end with.
CLAIM, RESULT, TRACE = "claim", "json", "pt.trace.json.gz"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Request:
    """Somebody asks for a profile of some ranks of a job."""

    id: str
    job: str
    steps: int
    ranks: list[int]
    #: Unix time after which nobody starts any more, and who still profiles stops at the next step mark.
    until: float


@dataclass(frozen=True)
class Claim:
    """A rank has taken up a request, in this process."""

    pid: int


@dataclass(frozen=True)
class Result:
    """What a rank has done; ``from_seq`` and ``until_seq`` are the numbers of the marks where its steps begin and end."""

    id: str
    rank: int
    steps: int
    from_seq: int
    until_seq: int
    #: Unix time of these two marks, by the clock of the trace.
    from_ns: int
    until_ns: int
    #: Why there is no trace; ``None``: there is one.
    error: str | None


def directory(run_dir: Path) -> Path:
    """Where they meet."""
    return run_dir / "profiling"


def request_path(run_dir: Path, job: str) -> Path:
    """Where the request to a job stands while it does."""
    return directory(run_dir) / f"{ring_prefix(job)}.request.json"


def of_rank(directory: Path, request_id: str, rank: int, what: str) -> Path:
    """A file that a rank leaves about a request."""
    return directory / f"{request_id}.rank{rank}.{what}"


def write(path: Path, content: Any, env: Mapping[str, str]) -> None:
    """Leave ``content`` (a dataclass) as JSON, whole or not at all.

    Raises:
        OSError: no rights, no room.
    """
    write_whole(path, json.dumps(asdict(content)), make_private_dir(path.parent, env))


def read_request(path: Path) -> Request:
    """The request that stands in a file of somebody else's.

    Raises:
        ValueError: it is none.
        OSError: it cannot be read, or nobody may have written it there.
    """
    return request_from(others.read(path, _MOST_REQUEST_BYTES).decode())


def request_from(text: str) -> Request:
    """Read a request; raises ``ValueError`` where it is none."""
    request = _made(Request, text)
    numbers = [request.steps, *request.ranks] if isinstance(request.ranks, list) else [None]
    sound = all(type(number) is int for number in numbers) and isinstance(request.until, (int, float))
    if not sound or not isinstance(request.job, str) or not _is_id(request.id) or not 1 <= request.steps <= MOST_STEPS:
        raise ValueError("not a request for a profile")
    return request


def result_from(text: str) -> Result:
    """Read a result; raises ``ValueError`` where it is none."""
    result = _made(Result, text)
    numbers = (result.rank, result.steps, result.from_seq, result.until_seq, result.from_ns, result.until_ns)
    if any(type(number) is not int for number in numbers) or not isinstance(result.error, (str, type(None))):
        raise ValueError("not the result of a profile")
    return result


def claim_from(text: str) -> Claim:
    """Read a claim; raises ``ValueError`` where it is none."""
    return _made(Claim, text)


def _made(kind: type[_T], text: str) -> _T:
    try:
        return kind(**json.loads(text))
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 64 and value.isalnum()
