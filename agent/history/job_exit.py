"""With which exit code a job ended: ``commwatch run`` leaves word in the run directory, the agent writes it down."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import NamedTuple

from commwatch.collectors.wire import others
from commwatch.collectors.wire.identity import make_private_dir, write_whole

_FOLDER = "exits"
_MOST_BYTES = 4096


class Exit(NamedTuple):
    """The end of a job's launcher."""

    job: str
    #: 128 + n: signal n ended it.
    code: int
    #: Unix time.
    at: float


def leave(run_dir: Path, job: str, code: int) -> Path:
    """Leave word of an end that has just come; the file goes once it is in the history. Raises ``OSError``."""
    mode = make_private_dir(run_dir / _FOLDER, os.environ)
    path = run_dir / _FOLDER / f"{os.getpid()}.json"
    write_whole(path, json.dumps(Exit(job, code, time.time())), mode)
    return path


class Exits:
    """Takes in what was left, each once; what is damaged is removed like the rest."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / _FOLDER
        self._taken: set[tuple[str, int]] = set()

    def take(self) -> list[Exit]:
        """The ends that are new."""
        found = self._entries()
        new = found - self._taken
        self._taken = found
        return [made for name, _ in new if (made := _read(self._folder / name)) is not None]

    def remove(self) -> None:
        """What has been taken is in the history."""
        for name, _ in self._taken & self._entries() if self._taken else ():
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()

    def _entries(self) -> set[tuple[str, int]]:
        """Name and inode of what lies there."""
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
