"""Exit codes of jobs: ``commwatch run`` writes them to the run directory, the agent reads them for the history."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from commwatch.wire import crossing
from commwatch.wire.identity import make_private_dir

_FOLDER = "exits"
#: Bytes of a file, and files that are read at a time.
_MOST_BYTES, _MOST_FILES = 4096, 256


class Exit(NamedTuple):
    """The end of a job's launcher."""

    job: str
    #: 128 + n if signal n ended it.
    code: int
    #: Unix time.
    at: float
    #: As the variable ``COMMWATCH_RUN`` has it; empty: not known.
    run: str = ""


def leave(run_dir: Path, job: str, code: int, run: str = "") -> Path:
    """Write the exit code of a run that ended now; return the file, which the agent will remove. Raises ``OSError``."""
    mode = make_private_dir(run_dir / _FOLDER, os.environ)
    path = run_dir / _FOLDER / f"{os.getpid()}.json"
    crossing.write(path, json.dumps(Exit(job, code, time.time(), run)), mode)
    return path


class Exits:
    """Reads the exit files, each once; damaged files are removed, too."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = crossing.KeptFolder(run_dir)
        self._taken: set[tuple[str, int, int]] = set()

    def take(self, owners: Callable[[str], Collection[int]] = lambda job: ()) -> list[Exit]:
        """Return the exits in new files.

        Args:
            owners: returns the users who wrote a job's rings, as far as they are known: only they and root can say how it ended.
        """
        try:
            with closing(self._run_dir.folder().folder(_FOLDER)) as where:
                found = _entries(where)
                new, self._taken = found - self._taken, found
                return [made for name, *_ in new if (made := _read(where, name, owners)) is not None]
        except OSError:
            self._taken = set()
            return []

    def remove(self) -> None:
        """Remove the files that ``take`` has read; call it once they are in the history."""
        if self._taken:
            with suppress(OSError), closing(self._run_dir.folder().folder(_FOLDER)) as where:
                for name, *_ in self._taken & _entries(where):
                    with suppress(OSError):
                        where.remove(name)


def _entries(where: crossing.Folder) -> set[tuple[str, int, int]]:
    """Return name, inode and time of change of some exit files; others come once these are removed."""
    found = set()
    for name in where.names("*.json", _MOST_FILES)[1]:
        with suppress(OSError):
            about = where.look(name)
            found.add((name, about.st_ino, about.st_mtime_ns))
    return found


def _read(where: crossing.Folder, name: str, owners: Callable[[str], Collection[int]]) -> Exit | None:
    try:
        text, uid = where.read(name, _MOST_BYTES, crossing.trainers())
        job, code, at, *rest = json.loads(text)  # an earlier version leaves no run
        job, run = (str(name).encode(errors="replace").decode() for name in (job, rest[0] if rest else ""))
        if uid not in {0, *(owners(job) or (uid,))}:
            return None
        return (
            Exit(job, int(code), min(float(at), time.time()), run)
            if 0 <= int(code) < 256 and 0 <= float(at) < 1e11
            else None
        )
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        return None
