"""The file with an agent's token: created at its start if none was given, read for each check of a token."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from dataclasses import replace
from pathlib import Path

from commwatch.wire import crossing
from commwatch.wire.errors import CommwatchError

#: In the run directory, which has one agent and does not survive a reboot.
NAME = "agent.token"
_MOST_BYTES = 4096
_TOKEN = re.compile(r"[\x21-\x7e]{16,1024}")


class BadToken(CommwatchError):
    """The file has no token, or the token is not safe there; the message names the file and the remedy."""

    names_command = False


def read(path: Path) -> str:
    """Return the token in a file that only this user and root can have written.

    Raises:
        BadToken: it cannot be read, others may read or write it, or it has no valid token.
    """
    return _read(path, crossing.operator())


def read_own(path: Path, uid: int) -> str:
    """Return the token in a file that ``uid`` owns and that is no link; raises ``BadToken``.

    The run directory may belong to a group, whose members could replace the file.
    """
    return _read(path, crossing.user(uid))


def _read(path: Path, trust: crossing.Trust) -> str:
    try:
        if crossing.look(path, replace(trust, strict=False)).st_mode & 0o027:
            raise BadToken(f"token file {path}: others may read or write it; chmod 600 {path}")
        content = crossing.read(path, _MOST_BYTES, trust)
    except OSError as error:
        why = error.strerror or str(error)
        remedy = "; run this as that user" if re.fullmatch(r"belongs to uid \d+", why) else ""
        raise BadToken(f"token file {path}: {why}{remedy}") from None
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
    crossing.write(path, f"{secrets.token_urlsafe(32)}\n", 0o600)
