"""What ``commwatch run`` does about ``NCCL_DEBUG``: nothing the user has set is touched."""

from __future__ import annotations

import contextlib
import glob
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from commwatch.collectors.nccl import debug
from commwatch.passing import copy_size

LEVELS = ("warn", "info", "off")
#: What ``info`` asks for where the user has not said.
INFO_SUBSYSTEMS = "INIT,ENV,NET,GRAPH,TUNING"
_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
_DRAIN_S = 2.0


@dataclass(frozen=True)
class Plan:
    """How the NCCL logs of a job are come by."""

    #: Added to the job's environment.
    env: dict[str, str] = field(default_factory=dict)
    #: Files to follow.
    patterns: list[str] = field(default_factory=list)
    #: Where NCCL writes to standard output: the file that its lines are kept in, but for ``.stdout`` and ``.stderr``.
    capture: Path | None = None
    #: Made for this job's files.
    directory: Path | None = None
    #: What the user should know.
    remark: str = ""

    def remove_if_empty(self) -> None:
        """Take back the folder that was made for files which never came."""
        if self.directory is not None:
            with contextlib.suppress(OSError):
                self.directory.rmdir()
                self.directory.parent.rmdir()


def plan(env: Mapping[str, str], level: str, directory: Path) -> Plan:
    """Decide it.

    Args:
        level: ``warn``, ``info`` or ``off``: what is asked for where the user has not set ``NCCL_DEBUG``.
        directory: where this job's files would go, beside the history; need not exist.
    """
    settings = debug.in_force(env)
    given = settings.get("NCCL_DEBUG")
    name = debug.file_of({"NCCL_DEBUG": level.upper(), **settings})
    patterns = [] if name is None else [_pattern(name)]
    remark = f"NCCL_DEBUG={given} stays as it is" if given and level == "info" else ""
    if given and (name is not None or level == "off" or given.upper() not in debug.WRITING):
        return Plan(patterns=patterns, remark=remark)
    if level == "off" and not given:
        return Plan()
    if name is None and in_memory(directory):
        return Plan(remark=f"no NCCL logs: {directory} lies in memory; choose a place on disk with --state")
    files = directory / debug.short_host()
    if given:
        kept = [f"{glob.escape(str(files))}.{stream}*" for stream in ("stdout", "stderr")]
        return Plan(patterns=kept, capture=files, directory=directory, remark=remark)
    added = {"NCCL_DEBUG": level.upper()}
    if level == "info" and "NCCL_DEBUG_SUBSYS" not in settings:
        added["NCCL_DEBUG_SUBSYS"] = INFO_SUBSYSTEMS
    if name is not None:
        return Plan(added, patterns)
    escaped = str(directory).replace("%", "%%")
    added["NCCL_DEBUG_FILE"] = f"{escaped}/%h.%p"
    return Plan(added, [f"{glob.escape(str(files))}.*"], directory=directory)


def _pattern(name: str) -> str:
    """What matches the debug files of all processes of this host."""
    whole = os.path.abspath(debug.expanded(name, "%p"))  # noqa: PTH100 - keeps what a link names
    return glob.escape(whole).replace("%p", "[0-9]*")


def in_memory(path: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Whether ``path``, or where it would be made, lies in a file system that is memory."""
    try:
        table = [line.split()[1:3] for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines()]
    except (OSError, IndexError):
        return False
    whole = path.resolve()
    kind = ""
    for point, mounted in sorted(table, key=lambda row: len(row[0])):
        if whole.is_relative_to(point.replace("\\040", " ")):
            kind = mounted
    return kind in _MEMORY


class Capture:
    """The job's standard output and error, passed on through filters that keep NCCL's lines; ``None``: closed, and left so.

    Args:
        files: where to, but for ``.stdout`` and ``.stderr``.
    """

    def __init__(self, files: Path) -> None:
        self._filters: list[subprocess.Popen[bytes]] = []
        self._ours: list[int] = []
        self.stdout = self._filtered(1, f"{files}.stdout")
        # Where both are one, they stay in order.
        self.stderr = self.stdout if _same(1, 2) else self._filtered(2, f"{files}.stderr")

    def _filtered(self, stream: int, file: str) -> int | None:
        """The end that the job writes to: a terminal where the stream is one."""
        try:
            os.fstat(stream)
        except OSError:
            return None
        if os.isatty(stream):
            read, write = pty.openpty()
            attributes = termios.tcgetattr(write)
            attributes[1] &= ~termios.OPOST  # the real one does that
            termios.tcsetattr(write, termios.TCSANOW, attributes)
            copy_size(stream, read)
        else:
            read, write = os.pipe()
        command = [sys.executable, "-m", "commwatch.passing", file]
        # From / because the job's folder may hold modules named like ours.
        self._filters.append(subprocess.Popen(command, stdin=read, stdout=stream, cwd="/"))
        os.close(read)
        self._ours.append(write)
        return write

    def started(self) -> None:
        """The job has them now: our copies would keep the filters waiting."""
        while self._ours:
            os.close(self._ours.pop())

    def finish(self) -> None:
        """Let the filters pass on what is left; who still writes keeps them."""
        self.started()
        for filtering in self._filters:
            with contextlib.suppress(subprocess.TimeoutExpired):
                filtering.wait(_DRAIN_S)


def _same(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False
