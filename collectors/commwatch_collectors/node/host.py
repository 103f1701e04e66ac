"""CPU and memory of the node, and time in which tasks waited for resources.

To read a recorded ``/proc``, set ``psutil.PROCFS_PATH``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import psutil

from commwatch.wire.files import text
from commwatch_collectors.registry import Reading

#: Guest time is already in ``user`` and ``nice``.
MODES = ("user", "system", "idle", "iowait", "irq", "softirq", "steal")
_PRESSURE = re.compile(r"^some .*total=(\d{1,20})$", re.MULTILINE)


class Cpu(NamedTuple):
    """Seconds since boot: by mode, of all cores together, and softirq (incoming packets) by core."""

    seconds: dict[str, float]
    softirq: list[float]


class Memory(NamedTuple):
    """Memory in bytes; ``None`` if not known."""

    total: int | None
    available: int | None


def cpu_seconds() -> dict[str, float]:
    """Return seconds since boot by mode, of all cores together; raise ``OSError`` or ``ValueError``."""
    with _reading("stat"):
        total = psutil.cpu_times()
    seconds = {mode: getattr(total, mode) for mode in MODES}
    seconds["user"] += total.nice
    return seconds


def cpu() -> Cpu:
    """Return CPU seconds; raise ``OSError`` or ``ValueError``.

    The kernel's total is read for itself: it includes cores that are offline now, so a sum of the cores could fall.
    """
    with _reading("stat"):
        cores = psutil.cpu_times(percpu=True)
    return Cpu(cpu_seconds(), [core.softirq for core in cores])


def memory() -> Memory:
    """Return memory in bytes; raise ``OSError`` or ``ValueError``."""
    with _reading("meminfo"):
        found = psutil.virtual_memory()
    return Memory(found.total, found.available)


def pressure() -> dict[str, float]:
    """Return seconds in which some task waited, by resource; empty unless the kernel counts them (boot option ``psi=1``)."""
    files = {name: text(f"{psutil.PROCFS_PATH}/pressure/{name}") or "" for name in ("cpu", "memory", "io")}
    return {name: int(found[1]) / 1e6 for name, words in files.items() if (found := _PRESSURE.search(words))}


@contextmanager
def _reading(file: str) -> Iterator[None]:
    """Raise ``ValueError`` with the name of the file where psutil fails in other ways, because the file is damaged."""
    try:
        yield
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{psutil.PROCFS_PATH}/{file} cannot be parsed: {error}") from error


class HostCollector:
    """Collector of CPU, memory and pressure."""

    def collect(self) -> list[Reading]:
        """Return the current readings."""
        return list(self._collect())

    @staticmethod
    def _collect() -> Iterable[Reading]:
        for mode, seconds in cpu_seconds().items():
            yield Reading("host_cpu_seconds_total", (mode,), seconds)
        for name, value in memory()._asdict().items():
            yield Reading(f"host_memory_{name}_bytes", (), value)
        for resource, seconds in pressure().items():
            yield Reading("host_pressure_seconds_total", (resource,), seconds)
