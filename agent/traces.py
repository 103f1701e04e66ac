"""Taking over what trainers leave: their files are read with care, their traces in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_MOST_BYTES = 65_536


@contextmanager
def _plain(path: Path) -> Iterator[IO[bytes]]:
    """Open a file of a trainer: no link and no pipe, for what such a thing names must not be read with our rights."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(0, "not a file", str(path))
        yield file


def read(path: Path) -> str | None:
    """The beginning of what a rank has left, if it has."""
    try:
        with _plain(path) as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return None


def take(left: Path, kept: Path) -> None:
    """Move a trace to where it is kept; raises ``OSError``."""
    hidden = kept.with_name(f".{kept.name}")
    try:
        with _plain(left) as source, open(hidden, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        hidden.replace(kept)
    finally:
        hidden.unlink(missing_ok=True)
    left.unlink(missing_ok=True)


def overlap(trace: Path, from_ns: int, until_ns: int, patience_s: float) -> dict[str, Any]:
    """What ``commwatch.trace`` says of a stretch of a trace (its ``Overlap``), or ``error``."""
    command = [sys.executable, "-m", "commwatch.trace", str(trace), str(from_ns), str(until_ns)]
    try:  # from / because the folder we were started in may hold modules named like ours
        done = subprocess.run(command, cwd="/", capture_output=True, timeout=patience_s, check=True)
        answer: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"error": f"reading the trace took more than {patience_s:.0f} s"}
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        return {"error": f"the trace cannot be read: {error}"}
    return answer
