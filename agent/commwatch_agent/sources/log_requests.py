"""Requests to follow the NCCL logs of a job, which ``commwatch run`` leaves in the run directory."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from commwatch.wire import crossing
from commwatch.wire.identity import make_private_dir

#: Bytes of a request, its patterns, and requests of one user; further ones are left out.
_MOST_BYTES, _MOST_PATTERNS, _MOST_REQUESTS = 1 << 16, 16, 256


@dataclass(frozen=True)
class LogRequest:
    """A file that ``commwatch run`` writes to the run directory: follow these logs for that job."""

    job: str
    patterns: list[str]
    since: float
    #: The process that made the request, which is void once that has ended.
    pid: int
    #: As the variable ``COMMWATCH_RUN`` has it.
    run: str = ""

    def write(self, run_dir: Path) -> Path:
        """Write the request for the agent of ``run_dir`` and return its path; raise ``OSError`` if that fails."""
        directory = run_dir / "logs"
        mode = make_private_dir(directory, os.environ)
        path = directory / f"{self.pid}.json"
        crossing.write(path, json.dumps(asdict(self)), mode)
        return path


def requests(run_dir: Path) -> list[tuple[LogRequest, int]]:
    """Return the requests of live processes, with the uid of the user who made each; remove those of ended ones, and skip damaged ones."""
    found: list[tuple[LogRequest, int]] = []
    number: Counter[int] = Counter()
    with contextlib.suppress(OSError), crossing.folder(run_dir / "logs") as where:
        for name in where.names("*.json")[1]:
            with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
                if number[where.look(name).st_uid] >= _MOST_REQUESTS:
                    continue
                text, uid = where.read(name, _MOST_BYTES, crossing.trainers())
                request = LogRequest(**json.loads(text))
                if not _is_sound(request) or number[uid] >= _MOST_REQUESTS:
                    continue
                if Path(f"/proc/{request.pid}").exists():
                    number[uid] += 1
                    found.append((request, uid))
                else:
                    where.remove(name)
    return found


def _is_sound(request: LogRequest) -> bool:
    kinds = (
        (request.job, str),
        (request.patterns, list),
        (request.since, (int, float)),
        (request.pid, int),
        (request.run, str),
    )
    if not all(isinstance(value, kind) for value, kind in kinds) or not all(
        isinstance(p, str) and p.startswith("/") and "\0" not in p for p in request.patterns
    ):
        return False
    if len(request.patterns) > _MOST_PATTERNS:
        return False
    return not any("\ud800" <= char <= "\udfff" for char in request.job)  # cannot be sent or stored
