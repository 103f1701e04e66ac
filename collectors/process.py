"""What the kernel says of a process."""

from __future__ import annotations

from pathlib import Path

from commwatch.collectors import files

#: By the letter in ``/proc/PID/stat``; the others are passing states.
STATES = {"R": "running", "S": "sleeping", "D": "disk", "T": "stopped", "t": "stopped", "Z": "zombie", "X": "zombie"}

#: ``PF_EXITING`` of the kernel, in the flags of a process.
_EXITING = 0x4


def state(pid: int, proc: Path = Path("/proc")) -> str | None:
    """``running``, ``sleeping``, ``disk`` (waits for it), ``stopped`` or ``zombie``; ``None``: not known, or not there."""
    return STATES.get("".join(files.of_process(pid, str(proc))[:1]))


def is_exiting(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether it runs no more, and the kernel is only clearing up after it; False where that is not known."""
    fields = files.of_process(pid, str(proc))
    return len(fields) > 6 and fields[6].isdecimal() and bool(int(fields[6]) & _EXITING)
