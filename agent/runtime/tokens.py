"""The file with an agent's token: made at its start where nobody gave one, read whenever a token is shown."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from pathlib import Path

from commwatch.collectors.wire.identity import write_whole

#: In the run directory: one agent a directory, and none of it outlives the machine's uptime.
NAME = "agent.token"
_MOST_BYTES = 4096
_TOKEN = re.compile(r"[\x21-\x7e]{16,1024}")


class BadToken(Exception):
    """There is no token in the file, or it is not safe there; the message names the file, and the remedy."""


def read(path: Path) -> str:
    """The token in a file.

    Raises:
        BadToken: it cannot be read, others may read or write it, or there stands something else.
    """
    return _read(path, None)


def read_own(path: Path, uid: int) -> str:
    """As ``read``, of a file that the agent of a user has made: nobody else's will do, nor a link.

    The run directory may be a group's, whose members could put another there.
    """
    return _read(path, uid)


def _read(path: Path, uid: int | None) -> str:
    # Not to be kept waiting by a pipe in its place.
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
        raise BadToken(f"token file {path}: needs one token of 16 letters or more in ASCII, without spaces")
    return token


def make(path: Path) -> None:
    """A new token at ``path``, for this user alone; one that is good stays, for those who have it.

    Raises:
        OSError: it cannot be written.
    """
    with contextlib.suppress(BadToken):
        read_own(path, os.getuid())
        return
    write_whole(path, f"{secrets.token_urlsafe(32)}\n", 0o600)
