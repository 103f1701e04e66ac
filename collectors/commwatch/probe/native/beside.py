"""Build the native hook beside a job, for the jobs after it, so that no job waits for a compiler.

The builder has the lowest priority, and outlives the job. It starts only where the node and the container have memory to spare: what the
compiler takes must not be missing in the training.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

#: What must be available, in bytes. The compiler takes 1.5 GB at most (g++ 12, torch 2.13).
ENOUGH = 4 << 30
#: Added to the nice value of the builder: what the job leaves over is enough.
NICE = 19
_CGROUP = Path("/sys/fs/cgroup")


def start(env: Mapping[str, str]) -> None:
    """Start a builder that goes on when this process and the job end. ``commwatch native status`` shows how it ended.

    Raises:
        OSError: it cannot be started.
    """
    nowhere = subprocess.DEVNULL
    command = [sys.executable, "-m", "commwatch.probe.native.build", "ensure", "--nice", str(NICE)]
    subprocess.Popen(command, env=env, cwd="/", stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)


def available(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int | None:
    """Return how many bytes of memory processes here can still take: of the node, and of the container if it has a limit.

    Args:
        cgroup: of the container, version 2. What its page cache could give back counts as available.

    Returns:
        ``None`` if the kernel does not show it.
    """
    try:
        free = 1024 * _value(meminfo, "MemAvailable:")
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError, ValueError):  # no limit: "max", or no such file
        limit, used = int((cgroup / "memory.max").read_text()), int((cgroup / "memory.current").read_text())
        free = min(free, limit - used + _value(cgroup / "memory.stat", "inactive_file"))
    return free


def _value(path: Path, name: str) -> int:
    """Return the number behind a name in a file of lines; raise ``ValueError`` if it is not there."""
    for line in path.read_text().splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    raise ValueError(name)


def give_way(nice: int) -> None:
    """Lower the priority of this process and of those that it starts, and have them killed first where memory becomes scarce all the same."""
    os.nice(nice)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
