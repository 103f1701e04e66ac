"""CPU cores that a process may use, and the threads that use them, from ``/proc`` and its cgroup."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from commwatch.wire import files

#: A thread computes if it ran, or was ready to, for this part of the time of the busiest thread.
_COMPUTES = 0.1
#: Most threads, and bytes of a file, that are read.
_MOST_THREADS, _MOST_BYTES = 1024, 1 << 18


@dataclass(frozen=True)
class Cores:
    """Cores and threads of a process; ``None``: not known."""

    #: Cores that its affinity and the CPU quotas of its cgroups allow.
    usable: float | None
    #: Threads that compute.
    threads: int | None
    #: ``OMP_NUM_THREADS`` of the environment that it began with.
    omp_threads: int | None


def cores(pid: int, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Cores:
    """Return the cores and threads of a process."""
    limits = [each for each in (_affinity(pid, proc), *_quotas(pid, proc, cgroups)) if each is not None]
    return Cores(min(limits, default=None), _threads(pid, proc), _omp_threads(pid, proc))


def _affinity(pid: int, proc: Path) -> int | None:
    status = files.text(f"{proc}/{pid}/status", _MOST_BYTES) or ""
    listed = next((line.split()[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list:\t")), "")
    try:
        ends = [[int(end) for end in span.split("-")] for span in listed.split(",") if span]
    except ValueError:
        return None
    return sum(span[-1] - span[0] + 1 for span in ends) or None


def _quotas(pid: int, proc: Path, cgroups: Path) -> Iterator[float]:
    """Yield the CPU quotas of the cgroups of a process in cores: version 2 has ``cpu.max``, version 1 two files."""
    for line in (files.text(f"{proc}/{pid}/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        of_cpu = "cpu" in controllers.split(",")
        if not of_cpu and number != "0":
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for folder in (inside, *inside.parents):
            at = (cgroups / "cpu" if of_cpu else cgroups) / folder
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if of_cpu else ("cpu.max",)
            words = " ".join(files.text(f"{at}/{name}") or "" for name in names).split()
            if len(words) == 2 and all(map(str.isdecimal, words)) and int(words[1]):
                yield int(words[0]) / int(words[1])


def _threads(pid: int, proc: Path) -> int | None:
    tasks = files.names(f"{proc}/{pid}/task")
    if not tasks or len(tasks) > _MOST_THREADS:
        return None
    times = [(files.text(f"{proc}/{pid}/task/{task}/schedstat") or "").split()[:2] for task in tasks]
    busy = [sum(map(int, both)) for both in times if len(both) == 2 and all(map(str.isdecimal, both))]
    most = max(busy, default=0)
    return sum(each >= _COMPUTES * most for each in busy) if most else None


def _omp_threads(pid: int, proc: Path) -> int | None:
    words = (files.text(f"{proc}/{pid}/environ", _MOST_BYTES) or "").split("\0")
    value = next((word.partition("=")[2] for word in words if word.startswith("OMP_NUM_THREADS=")), "")
    return int(value) if value.isdecimal() else None
