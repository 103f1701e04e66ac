"""What an agent has for itself alone: its run directory, a place for its alerts, and as many open files as it may."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
from dataclasses import replace

from commwatch.collectors.wire.identity import make_private_dir
from commwatch.config import Config
from commwatch.runtime.concurrency import wait_until
from commwatch.runtime.discovery import answering

#: Files this agent wants to be able to have open.
_MOST_FILES = 8192
#: How long somebody may hold the lock who only asks whether an agent is there.
_LOCK_S = 0.3


def raised_limit() -> int:
    """Files that this process may have open, once it may have as many as it is allowed to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, _MOST_FILES) if hard != resource.RLIM_INFINITY else _MOST_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def lock_directory(config: Config) -> int:
    """Make the run directory and take it for this agent alone; returns what locks it. Raises ``CannotStart``."""
    try:
        mode = make_private_dir(config.dir, os.environ)
        make_private_dir(config.rings, os.environ)
        # Members of a group may have put a link in its place: what it leads to would be written to.
        fd = os.open(config.dir / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    except OSError as error:
        raise CannotStart(
            f"cannot use run directory {config.dir}: {error.strerror or error}; choose another with --dir"
        ) from None
    if not wait_until(lambda: _locked(fd), _LOCK_S):  # somebody who asks whether we are here holds it for a moment
        os.close(fd)
        other = answering(config.dir)
        raise CannotStart(
            f"an agent already watches {config.dir}{f' ({other.url})' if other else ''}; choose another directory with --dir"
        ) from None
    (config.dir / "agent.json").unlink(missing_ok=True)  # of an agent that was killed
    return fd


def place_of_alerts(config: Config) -> tuple[Config, int]:
    """Where this agent keeps its alerts: in the state directory, or, where another agent of this host does, beside its rings.

    Returns:
        The settings with that place as their state directory, and what locks it.

    Raises:
        CannotStart: both are taken.
    """
    for place in (config.state, config.dir):
        lock = place / f"alerts-{socket.gethostname()}.lock"
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise CannotStart(
                f"cannot use {lock}: {error.strerror}; remove it, or choose another place with --state"
            ) from None
        if _locked(fd):
            return replace(config, state=place), fd
        os.close(fd)
    raise CannotStart(
        f"another agent keeps its alerts in {config.state} and {config.dir}; choose another place with --state"
    )


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class CannotStart(Exception):
    """The agent cannot run here; the message says why and what to do."""


def bind_remedy(error: OSError) -> str:
    """Return what to do about an address that cannot be bound: take another port, or another host."""
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        return "choose another port with --port (0: any free one)"
    return "name an address of this machine with --host"
