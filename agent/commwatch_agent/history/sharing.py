"""Which agents use a history. Each holds a shared lock on a file beside it, so that none sets the file aside under another."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from commwatch.wire import crossing


def share(path: Path) -> int | None:
    """Lock the history at ``path`` as in use, until the returned descriptor is closed; ``None``: it cannot be locked."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = _opened(path)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)  # waits while another agent renames the history
    except OSError:
        os.close(lock)
        return None
    return lock


@contextmanager
def unshared(path: Path) -> Iterator[bool]:
    """Yield whether no agent uses the history at ``path``, and let none start to use it meanwhile; ``True`` if locks do not work."""
    try:
        lock = _opened(path)
    except OSError:
        yield True
        return
    try:
        yield _is_alone(lock)
    finally:
        os.close(lock)


def remove_empty(path: Path) -> None:
    """Remove a history that could not be created, as on a full disk: SQLite made its file and wrote nothing to it."""
    with unshared(path) as alone, suppress(OSError):
        if alone and path.stat().st_size == 0:
            path.unlink()


def _is_alone(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _opened(path: Path) -> int:
    return crossing.lock_file(path.with_name(f"{path.name}.lock"), 0o600)
