"""What the kernel says of a process."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from commwatch.collectors.wire import files

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


class Usage(NamedTuple):
    """What a process has had of cores and memory since it began."""

    #: How long its main thread ran, and how long it waited for a core while it could have run, in ns.
    ran_ns: int
    wanted_ns: int
    #: Pages that were read from disk when its threads touched them: swapped out, or of a file.
    major_faults: int
    #: How long its cgroup was stopped for having used up its CPU quota, in ns; ``None``: not known.
    throttled_ns: int | None


def usage(pid: int, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Usage | None:
    """Of a process; ``None`` where the kernel does not count it, or the process is not there."""
    fields = files.of_process(pid, str(proc))
    times = (files.text(f"{proc}/{pid}/schedstat") or "").split()
    if len(times) < 2 or len(fields) < 10:
        return None
    try:
        ran_ns, wanted_ns, major_faults = int(times[0]), int(times[1]), int(fields[9])
    except ValueError:
        return None
    return Usage(ran_ns, wanted_ns, major_faults, _throttled_ns(pid, proc, cgroups))


def _throttled_ns(pid: int, proc: Path, cgroups: Path) -> int | None:
    """By ``cpu.stat`` of its cgroup: of version 2 in µs, of version 1 in ns."""
    for line in (files.text(f"{proc}/{pid}/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "cpu" in controllers.split(","):
            key, unit_ns, folder = "throttled_time", 1, cgroups / "cpu"
        elif number == "0":
            key, unit_ns, folder = "throttled_usec", 1000, cgroups
        else:
            continue
        stat = dict(
            each.split(" ", 1) for each in (files.text(f"{folder}{path}/cpu.stat") or "").splitlines() if " " in each
        )
        if stat.get(key, "").isdecimal():
            return int(stat[key]) * unit_ns
    return None
