"""The file with an agent's token: created at its start if none was given, read for each check of a token."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from pathlib import Path

from commwatch.collectors.wire.identity import write_atomically
from commwatch.core.errors import CommwatchError

#: In the run directory, which has one agent and does not survive a reboot.
NAME = "agent.token"
_MOST_BYTES = 4096
_TOKEN = re.compile(r"[\x21-\x7e]{16,1024}")


class BadToken(CommwatchError):
    """The file has no token, or the token is not safe there; the message names the file and the remedy."""

    names_command = False


def read(path: Path) -> str:
    """Return the token in a file.

    Raises:
        BadToken: it cannot be read, others may read or write it, or it has no valid token.
    """
    return _read(path, None)


def read_own(path: Path, uid: int) -> str:
    """Return the token in a file that ``uid`` owns and that is no link; raises ``BadToken``.

    The run directory may belong to a group, whose members could replace the file.
    """
    return _read(path, uid)


def _read(path: Path, uid: int | None) -> str:
    # Non-blocking, because a pipe may be in its place.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if uid is not None else 0)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        raise BadToken(f"token file {path}: {error.strerror}") from None
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise BadToken(f"token file {path}: not a file")
        if uid not in (None, about.st_uid):
            raise BadToken(f"token file {path}: belongs to uid {about.st_uid}; remove it and start the agent again")
        if about.st_mode & 0o027:
            raise BadToken(f"token file {path}: others may read or write it; chmod 600 {path}")
        content = os.read(fd, _MOST_BYTES)
    except OSError as error:
        raise BadToken(f"token file {path}: {error.strerror}") from None
    finally:
        os.close(fd)
    token = content.decode("latin-1").strip()
    if not _TOKEN.fullmatch(token):
        raise BadToken(f"token file {path}: needs one token of at least 16 ASCII characters, without spaces")
    return token


def make(path: Path) -> None:
    """Write a new token to ``path``, readable by this user only; keep a valid one, because clients may have it.

    Raises:
        OSError: it cannot be written.
    """
    with contextlib.suppress(BadToken):
        read_own(path, os.getuid())
        return
    write_atomically(path, f"{secrets.token_urlsafe(32)}\n", 0o600)
