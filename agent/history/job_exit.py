"""Exit codes of jobs: ``commwatch run`` writes them to the run directory, the agent reads them for the history."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import NamedTuple

from commwatch.collectors.wire import others
from commwatch.collectors.wire.identity import make_private_dir, write_atomically

_FOLDER = "exits"
_MOST_BYTES = 4096


class Exit(NamedTuple):
    """The end of a job's launcher."""

    job: str
    #: 128 + n if signal n ended it.
    code: int
    #: Unix time.
    at: float


def leave(run_dir: Path, job: str, code: int) -> Path:
    """Write the exit code of a job that ended now; return the file, which the agent will remove. Raises ``OSError``."""
    mode = make_private_dir(run_dir / _FOLDER, os.environ)
    path = run_dir / _FOLDER / f"{os.getpid()}.json"
    write_atomically(path, json.dumps(Exit(job, code, time.time())), mode)
    return path


class Exits:
    """Reads the exit files, each once; damaged files are removed, too."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / _FOLDER
        self._taken: set[tuple[str, int]] = set()

    def take(self) -> list[Exit]:
        """Return the exits in new files."""
        found = self._entries()
        new = found - self._taken
        self._taken = found
        return [made for name, _ in new if (made := _read(self._folder / name)) is not None]

    def remove(self) -> None:
        """Remove the files that ``take`` has read; call it once they are in the history."""
        for name, _ in self._taken & self._entries() if self._taken else ():
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()

    def _entries(self) -> set[tuple[str, int]]:
        """Return name and inode of each exit file."""
        try:
            return {(entry.name, entry.inode()) for entry in os.scandir(self._folder) if entry.name.endswith(".json")}
        except OSError:
            return set()


def _read(path: Path) -> Exit | None:
    try:
        job, code, at = json.loads(others.read(path, _MOST_BYTES))
        job = str(job).encode(errors="replace").decode()
        return Exit(job, int(code), float(at)) if 0 <= int(code) < 256 and 0 <= float(at) < 1e11 else None
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        return None
