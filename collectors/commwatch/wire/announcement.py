"""Who is the agent of a run directory: its announcement in a file, and who may be believed.

A run directory may be shared by a group whose members can add files to it and move the files of others. So an announcement carries the
mark from the lock file that the agent holds: an old announcement that was moved back has another mark. It also names the agent's process:
another user can lock the file of an agent that has ended, but cannot be that process. Runs inside the trainer, too.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commwatch.wire import crossing
from commwatch.wire.crossing import Trust
from commwatch.wire.handlers import raised_by_handler
from commwatch.wire.identity import PEER_ADDRESS, has_ended, this_process

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
    #: The URL at which agents of other nodes reach it; empty: they do not.
    peer_url: str = ""


def announce(directory: Path, lock_fd: int, about: Mapping[str, Any]) -> None:
    """Write the announcement of the agent that holds the lock; raises ``OSError``."""
    mark = secrets.token_hex(16)
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, mark.encode(), 0)
    crossing.write(directory / FILE, json.dumps({**this_process(), **about, "mark": mark}), 0o644)


def answering(directory: Path, trust: Trust) -> Announcement | None:
    """Return the announcement of the agent that watches ``directory``; ``None`` if there is no agent.

    Args:
        trust: whose agents are believed. The lock file must have the announcement's owner.
    """
    try:
        with crossing.folder(directory) as where:
            lock = where.open_file(LOCK, trust)
            try:
                return _believed(where, lock, trust) if _is_locked(lock) else None
            finally:
                os.close(lock)
    except OSError as error:
        if raised_by_handler(error):
            raise
        return None


def _is_locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        if raised_by_handler(error):
            raise
        return True
    return False


def _believed(where: crossing.Folder, lock: int, trust: Trust) -> Announcement | None:
    text, uid = where.read(FILE, _MOST_BYTES, trust)
    try:
        about = json.loads(text)
        if uid != os.fstat(lock).st_uid or about["mark"] != os.pread(lock, 64, 0).decode() or has_ended(about):
            return None
        peer_url = str(about.get(PEER_ADDRESS) or "")
        return Announcement(str(about["url"]), str(about["history"]), int(about["pid"]), uid, peer_url)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if raised_by_handler(error):
            raise
        return None


def operators(directory: Path) -> Trust:
    """Return the trust in agents that act for this user: this user's, root's, and those of the owner whom only they can have given the run directory.

    A folder such as ``/run`` is only root's to fill. In ``/tmp`` and ``/dev/shm`` another user can have made the run directory first.
    """
    uids = {os.geteuid(), 0}
    try:
        above = crossing.look(directory.absolute().parent, crossing.operator(), kind=stat.S_IFDIR)
        if not above.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            uids.add(crossing.look(directory, crossing.ANYBODY, kind=stat.S_IFDIR).st_uid)
    except OSError as error:
        if raised_by_handler(error):
            raise
    return Trust(frozenset(uids))


def requesters(directory: Path) -> Trust:
    """Return the trust of a trainer in requests: its own user's, root's, and those of the agent that watches the run directory."""
    agent = answering(directory, crossing.ANYBODY)
    return Trust(frozenset({os.geteuid(), 0} | ({agent.uid} if agent is not None else set())))
