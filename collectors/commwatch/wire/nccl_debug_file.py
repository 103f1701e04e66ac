"""Where NCCL's debug output goes: the settings in force, from the environment and NCCL's own files; and the files that are a process's own output.

Runs inside the trainer, too: standard library only.
"""

from __future__ import annotations

import os
import pwd
import re
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from commwatch.wire import crossing, variables
from commwatch.wire.crossing import ANYBODY
from commwatch.wire.handlers import raised_by_handler

#: Levels at which NCCL writes into its debug file; below, and for unknown words, it does not.
WRITING = ("WARN", "INFO", "ABORT", "TRACE")
#: File names that are standard streams, not log files.
_STANDARD = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/dev/tty", "/dev/null", "/proc/self/fd/")
#: Bytes of a settings file, at most.
_MOST_BYTES = 1 << 20
_NAMES = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")


def in_force(env: Mapping[str, str], etc: Path = Path("/etc/nccl.conf")) -> dict[str, str]:
    """Return NCCL's debug settings: the environment overrides the user's file, which overrides the machine's."""
    found: dict[str, str] = {}
    own = Path(env["NCCL_CONF_FILE"]) if env.get("NCCL_CONF_FILE") else home_conf()
    for path in (etc, *([own] if own is not None else [])):
        try:
            real = Path(os.path.realpath(path))  # NCCL follows links, too
            found.update(read_conf(crossing.read(real, _MOST_BYTES, ANYBODY).decode(errors="replace")))
        except OSError:
            continue
    found.update({name: env[name] for name in _NAMES if name in env})
    return {name: value for name, value in found.items() if value}


def read_conf(text: str) -> dict[str, str]:
    """Parse the debug settings of an ``nccl.conf``. Like NCCL, keep blanks and the first of several values."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and name in _NAMES:
            found.setdefault(name, value)
    return found


def home_conf() -> Path | None:
    """Return the user's settings file, as NCCL does, in the home directory of the user database (not ``HOME``)."""
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir) / ".nccl.conf"
    except KeyError:
        return None


def file_of(settings: Mapping[str, str]) -> str | None:
    """Return the debug file's name, with ``%h`` and ``%p``; ``None`` if NCCL writes no file."""
    writes = settings.get("NCCL_DEBUG", "").upper() in WRITING
    name = settings.get("NCCL_DEBUG_FILE") or None
    return None if name is None or name.startswith(_STANDARD) or not writes else name


def expanded(name: str, pid: str, host: str | None = None) -> str:
    """Expand a debug file's name as NCCL does; ``pid`` may be a pattern.

    >>> expanded("/logs/%h.%p", "42", "node1")
    '/logs/node1.42'
    """
    host = short_host() if host is None else host
    return re.sub("%[hp%]", lambda found: {"%h": host, "%p": pid, "%%": "%"}[found[0]], name)


def short_host() -> str:
    """Return the host's name as NCCL prints it: up to the first dot."""
    return socket.gethostname().partition(".")[0]


def own_file(env: Mapping[str, str]) -> str | None:
    """Return the absolute path of this process's debug file; ``None`` if it has none."""
    name = file_of(in_force(env))
    return None if name is None else os.path.abspath(expanded(name, str(os.getpid())))  # noqa: PTH100 - keeps what a link names


def inspector_dir(env: Mapping[str, str]) -> str | None:
    """Return the absolute path of NCCL Inspector's dump directory; ``None`` if Inspector is off."""
    if not re.match(r"\s*[+-]?0*[1-9]", env.get("NCCL_INSPECTOR_ENABLE", "")):  # Inspector parses it with atoi
        return None
    job = env.get("SLURM_JOBID", "")
    name = env.get("NCCL_INSPECTOR_DUMP_DIR") or f"nccl-inspector-{job if job.isdecimal() else 'unknown-jobid'}"
    return os.path.abspath(name)  # noqa: PTH100 - keeps what a link names


def output_files(env: Mapping[str, str]) -> list[dict[str, str | int]]:
    """Return an entry of the names file for each regular file that is this process's standard output or error.

    ``size``: its bytes so far, which are of others. Empty if ``COMMWATCH_JOB_OUTPUT`` is ``off``.
    """
    found: dict[tuple[int, int], dict[str, str | int]] = {}
    for number in (1, 2) if env.get("COMMWATCH_JOB_OUTPUT") != variables.OFF else ():
        try:
            about, path = os.fstat(number), os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115 - keeps any bytes
        except OSError as error:  # it is closed
            if raised_by_handler(error):
                raise
            continue
        if stat.S_ISREG(about.st_mode) and about.st_nlink:
            place = about.st_dev, about.st_ino
            found[place] = {"output": path, "device": place[0], "inode": place[1], "size": about.st_size}
    return list(found.values())
