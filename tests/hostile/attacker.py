"""Processes of another user, who attacks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers import NOBODY, PATIENCE_S, clean_env

#: Two users of the node, who share the group of the first.
MALLORY, BOB = NOBODY, NOBODY - 1
#: What scripts need is loaded before: root's Python may be private.
_BECOME = """
import ctypes, encodings.ascii, encodings.idna, encodings.latin_1, fcntl, json, os, sys, time
from pathlib import Path
from commwatch.wire.announcement import announce, answering
from commwatch.wire import crossing
os.setgroups([{gid}]); os.setgid({gid}); os.setuid({uid}); os.chdir("/")
"""


def as_user(uid: int, script: str, *arguments: object) -> str:
    """Run a script as a user of the shared group; return what it printed."""
    done = subprocess.run(
        _command(uid, script, arguments),
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@contextmanager
def going_on(uid: int, script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run a script as a user until the block ends; it begins once the script has printed a line."""
    command = _command(uid, f"{script}\nprint('ready', flush=True); sys.stdin.read()", arguments)
    with subprocess.Popen(
        command, env=clean_env(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def shared(path: Path, owner: int = 0) -> Path:
    """A folder that a user shares with the group, as commwatch makes it."""
    path.mkdir()
    os.chown(path, owner, MALLORY)
    path.chmod(0o2770)
    return path


def _command(uid: int, script: str, arguments: tuple[object, ...]) -> list[str]:
    return [sys.executable, "-c", _BECOME.format(uid=uid, gid=MALLORY) + script, *map(str, arguments)]
