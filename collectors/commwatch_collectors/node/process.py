"""State and usage of a process, from ``/proc``.

The agent reads them every second for each rank. psutil takes seven times as long for the state, and lacks the flags, the major
faults and the scheduler's times.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import struct
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from commwatch.wire import files

#: State by letter in ``/proc/PID/stat``; other letters are transient states.
STATES = {"R": "running", "S": "sleeping", "D": "disk", "T": "stopped", "t": "stopped", "Z": "zombie", "X": "zombie"}

#: Options of Python that a value follows.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
#: ``PF_EXITING`` and ``PF_SIGNALED`` of the kernel, in the flags of a process; SIGKILL among its pending signals, which any signal that
#: ends a process becomes.
_EXITING, _SIGNALED, _SIGKILL = 0x4, 0x400, 1 << 8
#: ``PIDFD_GET_INFO`` of the kernel from 6.15 on, what it fills in, and the flag ``PIDFD_INFO_EXIT``: it has the status of the process.
_GET_INFO, _INFO, _WITH_EXIT = 0xC040FF0B, struct.Struct("=Q52xi"), 1 << 3


def state(pid: int, proc: Path = Path("/proc")) -> str | None:
    """Return ``running``, ``sleeping``, ``disk`` (waits for it), ``stopped`` or ``zombie``; ``None`` if not known."""
    return STATES.get("".join(files.of_process(pid, str(proc))[:1]))


def is_exiting(pid: int, proc: Path = Path("/proc")) -> bool:
    """Return whether the process has ended and the kernel only cleans up; False if not known."""
    return bool(_number(files.of_process(pid, str(proc)), 6) & _EXITING)


def is_killed(pid: int, proc: Path = Path("/proc")) -> bool:
    """Return whether a signal has ended the process, which may not have noticed yet; False if not known."""
    fields = files.of_process(pid, str(proc))
    return bool(_number(fields, 6) & _SIGNALED or _number(fields, 28) & _SIGKILL)


def exit_status(pid: int, pidfd: int, proc: Path = Path("/proc")) -> int | None:
    """Return the exit code of a process that has ended, ``-n`` if signal n ended it; ``None``: it is 0, or not known.

    Until its parent has waited for it, ``/proc`` has it, as 0 for those who may not see it; after that, kernels from 6.15 on.
    """
    fields = files.of_process(pid, str(proc))
    status = _number(fields, 49) if fields[:1] in (["Z"], ["X"]) else 0
    if not status:
        info = bytearray(_INFO.pack(_WITH_EXIT, 0))
        with suppress(OSError):
            fcntl.ioctl(pidfd, _GET_INFO, info)
            flags, found = _INFO.unpack(info)
            status = found if flags & _WITH_EXIT else 0
    return os.waitstatus_to_exitcode(status) if status else None


def _number(fields: list[str], at: int) -> int:
    return int(fields[at]) if len(fields) > at and fields[at].isdecimal() else 0


def user(pid: int, proc: Path = Path("/proc")) -> str:
    """Return the name of the user who runs a process, or the number of a user without a name; empty if not known."""
    status = files.text(f"{proc}/{pid}/status") or ""
    uid = next((line.split()[1] for line in status.splitlines() if line.startswith("Uid:")), "")
    return account(int(uid)) if uid.isdecimal() else uid


@lru_cache(maxsize=1024)
def account(uid: int) -> str:
    """Return the name of a user, or the number of a user without a name; looked up once, because that may ask a directory service."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def script(pid: int, proc: Path = Path("/proc")) -> str:
    """Return the script or module that a Python process runs, as its command line has it; empty if there is none."""
    words = (files.text(f"{proc}/{pid}/cmdline") or "").split("\0")[1:]
    for at, word in enumerate(words):
        if word == "-m":
            return "".join(words[at + 1 : at + 2])
        if word == "-c":
            return ""
        if word in _WITH_VALUE:
            words[at + 1 : at + 2] = ["-"]
        elif not word.startswith("-"):
            return word.rpartition("/")[2]
    return ""


class Usage(NamedTuple):
    """CPU time and memory events of a process since it began."""

    #: How long its main thread ran, and how long it was ready but waited for a core, in ns.
    ran_ns: int
    wanted_ns: int
    #: Pages that its threads touched and that had to be read from disk: swapped out, or of a file.
    major_faults: int
    #: How long its cgroup was stopped for exceeding its CPU quota, in ns; ``None`` if not known.
    throttled_ns: int | None


def usage(pid: int, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Usage | None:
    """Return the usage of a process; ``None`` if the kernel does not count it, or the process does not exist."""
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
    """Return ns from ``cpu.stat`` of its cgroup: version 2 counts µs, version 1 ns."""
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
