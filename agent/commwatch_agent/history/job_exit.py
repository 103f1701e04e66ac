"""Exit codes of jobs, and signals to them: ``commwatch run`` writes them to the run directory, the agent reads them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from commwatch.wire import crossing
from commwatch.wire.identity import make_private_dir

_FOLDER = "exits"
#: Bytes of a file, and files that are read at a time.
_MOST_BYTES, _MOST_FILES = 4096, 256


class Stop(NamedTuple):
    """A signal that asked a job's launcher to end it."""

    number: int
    #: Unix time.
    at: float


class Exit(NamedTuple):
    """The end of a job's launcher, or a signal that asked it to end."""

    job: str
    #: 128 + n if signal n ended it; ``None``: it has not ended.
    code: int | None
    #: Unix time.
    at: float
    #: As the variable ``COMMWATCH_RUN`` has it; empty: not known.
    run: str = ""
    #: The first such signal; ``None``: there was none.
    stop: Stop | None = None


def leave(run_dir: Path, job: str, code: int | None, run: str = "", stop: Stop | None = None) -> Path:
    """Write the exit code of a run that ended now, or a signal to it; return the file, which the agent will remove. Raises ``OSError``."""
    mode = make_private_dir(run_dir / _FOLDER, os.environ)
    path = run_dir / _FOLDER / f"{os.getpid()}.json"
    crossing.write(path, json.dumps(Exit(job, code, time.time(), run, stop)), mode)
    return path


class Exits:
    """Reads the exit files, each once; damaged files are removed, too."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = crossing.KeptFolder(run_dir)
        self._taken: set[tuple[str, int, int]] = set()
        #: Signals that asked launchers to end, by job and run.
        self._stops: dict[tuple[str, str], Stop] = {}

    def take(self, owners: Callable[[str], Collection[int]] = lambda job: ()) -> list[Exit]:
        """Return the exits in new files; signals to launchers are kept for ``stop_of``.

        Args:
            owners: returns the users who wrote a job's rings, as far as they are known: only they and root can say how it ended.
        """
        try:
            with closing(self._run_dir.folder().folder(_FOLDER)) as where:
                found = _entries(where)
                new, self._taken = found - self._taken, found
                read = [made for name, *_ in new if (made := _read(where, name, owners)) is not None]
        except OSError:
            self._taken = set()
            return []
        for each in read:
            if each.stop is not None:
                self._stops[each.job, each.run] = each.stop
        while len(self._stops) > _MOST_FILES:
            del self._stops[next(iter(self._stops))]
        return [each for each in read if each.code is not None]

    def stop_of(self, identity: Mapping[str, object]) -> Stop | None:
        """Return the signal that asked the launcher of a rank to end its job; ``None``: none that is known.

        Args:
            identity: of the rank's ring.
        """
        return self._stops.get((str(identity["job"]), str(identity.get("run", ""))))

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
        job, code, at, *rest = json.loads(text)  # an earlier version leaves no run, and no signal
        job, run = (str(name).encode(errors="replace").decode() for name in (job, rest[0] if rest else ""))
        if uid not in {0, *(owners(job) or (uid,))}:
            return None
        number, stopped_at = rest[1] if rest[1:] and rest[1] else (0, at)
        is_valid = 0 <= int(code or 0) < 256 and all(0 <= float(each) < 1e11 for each in (at, stopped_at))
        stop = Stop(int(number), min(float(stopped_at), time.time())) if number else None
        ended_with = None if code is None else int(code)
        return Exit(job, ended_with, min(float(at), time.time()), run, stop) if is_valid else None
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        return None
