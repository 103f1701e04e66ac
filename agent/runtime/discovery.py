"""The address of a run directory's agent: announced in a file, and checked by its readers.

A run directory may be shared by a group whose members can add files to it and move the files of others. So an announcement carries the
mark from the lock file that the agent holds: an old announcement that was moved back has another mark.
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
    """Contents of an agent's announcement in its run directory."""

    url: str
    history: str
    pid: int
    #: Owner of the agent.
    uid: int


def announce(directory: Path, lock_fd: int, about: Mapping[str, Any]) -> None:
    """Write the announcement of the agent that holds the lock; raises ``OSError``."""
    mark = secrets.token_hex(16)
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, mark.encode(), 0)
    hidden = directory / f".{FILE}.{os.getpid()}"
    with os.fdopen(others.create(hidden, 0o644), "w") as file:
        json.dump({**about, "mark": mark}, file)
    hidden.rename(directory / FILE)


def answering(directory: Path, owners: Container[int] | None = None) -> Announcement | None:
    """Return the announcement of the agent that watches ``directory``; ``None`` if there is no agent.

    Args:
        owners: trusted uids; ``None``: any. The lock file must have the announcement's owner.
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
