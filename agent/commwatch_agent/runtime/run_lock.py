"""What an agent claims at its start: the lock of its run directory, a place for its alerts, its limit of open files."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from commwatch.wire import crossing
from commwatch.wire.announcement import FILE, LOCK, answering, operators
from commwatch.wire.concurrency import wait_until
from commwatch.wire.errors import CommwatchError
from commwatch.wire.identity import make_private_dir, shared_group
from commwatch_agent.config import FOLDERS, Config
from commwatch_agent.config_checks import ConfigError

#: Limit of open files that the agent requests.
_MOST_FILES = 8192
#: How long a client that checks for an agent may hold the lock.
_LOCK_S = 0.3


def raised_limit() -> int:
    """Raise the limit of open files, up to ``_MOST_FILES`` and the hard limit; return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, _MOST_FILES) if hard != resource.RLIM_INFINITY else _MOST_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def lock_directory(config: Config) -> int:
    """Create the run directory and lock it for this agent; return the lock's file descriptor.

    Raises:
        CannotStart: the directory is taken, or cannot be used.
        ConfigError: this user cannot write to it, or there is no group of the name in ``COMMWATCH_GROUP``.
    """
    check_group(os.environ)
    try:
        mode = make_private_dir(config.dir, os.environ)
        make_private_dir(config.rings, os.environ)
        _keep_others_off(config.dir)
        fd = crossing.lock_file(config.dir / LOCK, mode)
    except OSError as error:
        check_folders(config, ("dir",))
        raise CannotStart(
            f"cannot use run directory {config.dir}: {error.strerror or error}; choose another with --dir"
        ) from None
    if not wait_until(lambda: _locked(fd), _LOCK_S):  # a client that checks for an agent holds it for a moment
        os.close(fd)
        other = answering(config.dir, operators(config.dir))
        raise CannotStart(
            f"an agent already watches {config.dir}{f' ({other.url})' if other else ''}; choose another directory with --dir"
        ) from None
    try:
        (config.dir / FILE).unlink(missing_ok=True)  # of an agent that was killed
    except OSError as error:
        os.close(fd)
        raise CannotStart(
            f"cannot remove {config.dir / FILE} of an earlier agent: {error.strerror}; remove it"
        ) from None
    return fd


def _keep_others_off(directory: Path) -> None:
    """Let only its owner remove or replace a file of a run directory that is shared with a group: its lock and announcement among them."""
    about = directory.stat()
    if about.st_uid == os.geteuid() and about.st_mode & stat.S_IWGRP and not about.st_mode & stat.S_ISVTX:
        directory.chmod(stat.S_IMODE(about.st_mode) | stat.S_ISVTX)


def place_of_alerts(config: Config) -> tuple[Config, int]:
    """Lock a place for this agent's alerts: the state directory or, if another agent has locked it, the run directory.

    Returns:
        The settings with that place as their state directory, and the lock's file descriptor.

    Raises:
        CannotStart: both are locked, or a lock file cannot be opened.
    """
    for place in (config.state, config.dir):
        lock = place / f"alerts-{config.node_name}.lock"
        try:
            fd = crossing.lock_file(lock, 0o600)
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


def check_group(env: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` if there is no group of the name in ``COMMWATCH_GROUP``."""
    try:
        shared_group(env)
    except OSError as error:
        raise ConfigError(
            f"{error} on this machine; name one of `getent group`, the same for trainers and agent"
        ) from None


def check_folders(config: Config, names: Iterable[str] = FOLDERS) -> None:
    """Check, without a change, that this user can write to the folders of these settings, or create them.

    Raises:
        ConfigError: one of them cannot be written.
    """
    for name in names:
        folder: Path = getattr(config, name)
        there = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
        if not there.is_dir():
            raise ConfigError(f"{name} {folder}: {there} is not a directory")
        if (kernels := _kernels(there)) is not None:
            raise ConfigError(
                f"{name} {folder}: nothing can be stored in {kernels}, which is the kernel's; choose another directory"
            )
        if not os.access(there, os.W_OK | os.X_OK):
            reason = (
                "it is on a read-only file system" if os.statvfs(there).f_flag & os.ST_RDONLY else "permission denied"
            )
            raise ConfigError(f"{name} {folder}: this user (uid {os.getuid()}) cannot write to {there}: {reason}")


def _kernels(folder: Path) -> str | None:
    """Return which folder of the kernel has this one; permissions, at least root's, do not show that it stores nothing."""
    device = folder.stat().st_dev
    return next(
        (each for each in ("/proc", "/sys") if os.path.ismount(each) and Path(each).stat().st_dev == device), None
    )


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class CannotStart(CommwatchError):
    """The agent cannot start; the message has the reason and the remedy."""

    names_command = False


def bind_remedy(error: OSError) -> str:
    """Return what to do about an address that cannot be bound: take another port, or another host."""
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        return "choose another port with --port (0: any free one)"
    return "name an address of this machine with --host"
