"""What the kernel says of a process."""

from __future__ import annotations

from pathlib import Path

from commwatch.collectors import files

#: By the letter in ``/proc/PID/stat``; the others are passing states.
STATES = {"R": "running", "S": "sleeping", "D": "disk", "T": "stopped", "t": "stopped", "Z": "zombie", "X": "zombie"}


def state(pid: int, proc: Path = Path("/proc")) -> str | None:
    """``running``, ``sleeping``, ``disk`` (waits for it), ``stopped`` or ``zombie``; ``None``: not known, or not there."""
    text = files.text(str(proc / str(pid) / "stat")) or ""  # its name is any bytes: the kernel cuts it anywhere
    return STATES.get(text.rpartition(")")[2].strip()[:1])
