"""What the kernel says of a process."""

from __future__ import annotations

from pathlib import Path

#: By the letter in ``/proc/PID/stat``; the others are passing states.
STATES = {"R": "running", "S": "sleeping", "D": "disk", "T": "stopped", "t": "stopped", "Z": "zombie", "X": "zombie"}


def state(pid: int, proc: Path = Path("/proc")) -> str | None:
    """``running``, ``sleeping``, ``disk`` (waits for it), ``stopped`` or ``zombie``; ``None``: not known, or not there."""
    try:
        text = (proc / str(pid) / "stat").read_text()
    except OSError:
        return None
    return STATES.get(text.rpartition(")")[2].split()[0])
