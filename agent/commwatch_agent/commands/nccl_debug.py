"""How ``commwatch run`` sets ``NCCL_DEBUG`` and related variables; what the user has set stays."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from commwatch.wire import nccl_debug_file as debug
from commwatch_agent.commands.output_filter import Shown

LEVELS = ("warn", "info", "off")
#: Subsystems that ``info`` selects if the user has not selected any.
INFO_SUBSYSTEMS = "INIT,ENV,NET,GRAPH,TUNING"
_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


@dataclass(frozen=True)
class Plan:
    """How the NCCL logs of a job are obtained."""

    #: Variables to add to the job's environment.
    env: dict[str, str] = field(default_factory=dict)
    #: Patterns of the files to follow.
    patterns: list[str] = field(default_factory=list)
    #: Folder for this job's files; ``None``: none is needed.
    directory: Path | None = None
    #: Which files in ``directory`` have text that the user expects on standard output.
    shown: Shown = "none"
    #: A note for the user of a job that uses NCCL; empty: none.
    remark: str = ""

    def remove_if_empty(self) -> None:
        """Remove ``directory`` if NCCL wrote no files there."""
        if self.directory is not None:
            with contextlib.suppress(OSError):
                self.directory.rmdir()
                self.directory.parent.rmdir()


def plan(env: Mapping[str, str], level: str, directory: Path) -> Plan:
    """Return the plan for a job.

    Args:
        level: ``warn``, ``info`` or ``off``: the level if the user has not set ``NCCL_DEBUG``.
        directory: folder for this job's files, beside the history; need not exist.
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
        return Plan(remark=f"no NCCL logs: {directory} is in memory; choose a place on disk with --state")
    escaped = str(directory).replace("%", "%%")
    added["NCCL_DEBUG_FILE"] = f"{escaped}/%h.%p"
    shown: Shown = "all" if given else "more" if level == "warn" else "none"
    return Plan(added, [f"{glob.escape(str(directory / debug.short_host()))}.*"], directory, shown, remark)


def _pattern(name: str) -> str:
    """Return the pattern that matches the debug files of all processes on this host."""
    full_path = os.path.abspath(debug.expanded(name, "%p"))  # noqa: PTH100 - does not resolve links
    return glob.escape(full_path).replace("%p", "[0-9]*")


def in_memory(path: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Return whether ``path``, which need not exist, is in a memory file system such as tmpfs."""
    try:
        table = [line.split()[1:3] for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines()]
    except (OSError, IndexError):
        return False
    resolved = path.resolve()
    kind = ""
    for point, mounted in sorted(table, key=lambda row: len(row[0])):
        if resolved.is_relative_to(point.replace("\\040", " ")):
            kind = mounted
    return kind in _MEMORY
