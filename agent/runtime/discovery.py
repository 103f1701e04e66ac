"""Where the agent of a run directory answers, as it says itself, and whom to believe that.

A run directory may be shared by a group whose members can put files into it and move those of others. So an announcement carries the
mark that stands in the lock file which the agent holds: one that was moved back from an earlier life has another.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commwatch.collectors.wire import others

FILE, LOCK = "agent.json", "agent.lock"
_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class Announcement:
    """What an agent tells about itself in its run directory."""

    url: str
    history: str
    pid: int
    #: Whose agent it is.
    uid: int


def announce(directory: Path, lock_fd: int, about: Mapping[str, Any]) -> None:
    """Leave word where the agent that holds the lock answers; raises ``OSError``."""
    mark = secrets.token_hex(16)
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, mark.encode(), 0)
    hidden = directory / f".{FILE}.{os.getpid()}"
    with os.fdopen(others.create(hidden, 0o644), "w") as file:
        json.dump({**about, "mark": mark}, file)
    hidden.rename(directory / FILE)


def answering(directory: Path, owners: Container[int] | None = None) -> Announcement | None:
    """The agent that watches ``directory``, if one does.

    Args:
        owners: uids that are believed; ``None``: whoever holds the lock.
    """
    try:
        lock = others.open_plain(directory / LOCK)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _believed(directory, lock, owners)
    except OSError:
        return None
    finally:
        os.close(lock)
    return None


def _believed(directory: Path, lock: int, owners: Container[int] | None) -> Announcement | None:
    try:
        file = others.open_plain(directory / FILE)
    except OSError:
        return None
    try:
        uid = os.fstat(file).st_uid
        if uid != os.fstat(lock).st_uid or (owners is not None and uid not in owners):
            return None
        about = json.loads(os.read(file, _MOST_BYTES))
        if about["mark"] != os.pread(lock, 64, 0).decode():
            return None
        return Announcement(str(about["url"]), str(about["history"]), int(about["pid"]), uid)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    finally:
        os.close(file)
