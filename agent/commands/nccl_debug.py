"""What ``commwatch run`` does about ``NCCL_DEBUG``: nothing the user has set is touched."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from commwatch.collectors.wire import nccl_debug_file as debug
from commwatch.commands.output_filter import Shown

LEVELS = ("warn", "info", "off")
#: What ``info`` asks for where the user has not said.
INFO_SUBSYSTEMS = "INIT,ENV,NET,GRAPH,TUNING"
_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


@dataclass(frozen=True)
class Plan:
    """How the NCCL logs of a job are come by."""

    #: Added to the job's environment.
    env: dict[str, str] = field(default_factory=dict)
    #: Files to follow.
    patterns: list[str] = field(default_factory=list)
    #: Made for this job's files.
    directory: Path | None = None
    #: Which of the files in ``directory`` hold what the user expects on standard output.
    shown: Shown = "none"
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
    if level == "off" or (given and (name is not None or given.upper() not in debug.WRITING)):
        return Plan(patterns=patterns if given else [], remark=remark)
    added = {} if given else {"NCCL_DEBUG": level.upper()}
    if level == "info" and not given and "NCCL_DEBUG_SUBSYS" not in settings:
        added["NCCL_DEBUG_SUBSYS"] = INFO_SUBSYSTEMS
    if name is not None:
        return Plan(added, patterns)
    if "NCCL_DEBUG_FILE" in settings:
        remark = f"no NCCL logs: NCCL_DEBUG_FILE={settings['NCCL_DEBUG_FILE']} stays as it is"
        return Plan(remark=remark if given else "")
    if in_memory(directory):
        return Plan(remark=f"no NCCL logs: {directory} lies in memory; choose a place on disk with --state")
    escaped = str(directory).replace("%", "%%")
    added["NCCL_DEBUG_FILE"] = f"{escaped}/%h.%p"
    shown: Shown = "all" if given else "more" if level == "warn" else "none"
    return Plan(added, [f"{glob.escape(str(directory / debug.short_host()))}.*"], directory, shown, remark)


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
