"""CPU and memory of the node, from ``/proc``: CPU time by mode, free memory, and time in which tasks waited for resources."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from commwatch.collectors.registry import Reading
from commwatch.collectors.wire.files import text

#: Columns of ``/proc/stat`` in order; guest time is already in ``user`` and ``nice``.
_COLUMNS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
MODES = tuple(mode for mode in _COLUMNS if mode != "nice")
_TICKS = os.sysconf("SC_CLK_TCK")
_PRESSURE = re.compile(r"^some .*total=(\d{1,20})$", re.MULTILINE)


class Cpu(NamedTuple):
    """Seconds since boot: by mode, of all cores together, and softirq (incoming packets) by core."""

    seconds: dict[str, float]
    softirq: list[float]


class Memory(NamedTuple):
    """Memory in bytes; ``None`` if not known."""

    total: int | None
    available: int | None


def cpu(content: str) -> Cpu:
    """Parse ``/proc/stat``; raise ``ValueError`` if it is invalid."""
    seconds: dict[str, float] = {}
    softirq = []
    for line in content.splitlines():
        name, *ticks = line.split()
        if not name.startswith("cpu"):
            break
        columns = dict(zip(_COLUMNS, (int(tick) / _TICKS for tick in ticks), strict=False))
        if name == "cpu" and "nice" in columns:
            seconds = {mode: columns[mode] for mode in MODES if mode in columns}
            seconds["user"] += columns["nice"]
        elif name != "cpu":
            softirq.append(columns.get("softirq", 0.0))
    if not seconds:
        raise ValueError("/proc/stat: no line 'cpu'")
    return Cpu(seconds, softirq)


def memory(content: str) -> Memory:
    """Parse ``/proc/meminfo``."""
    kilobytes = dict(re.findall(r"^(\w+): +(\d+) kB$", content, re.MULTILINE))
    total, available = (kilobytes.get(name) for name in ("MemTotal", "MemAvailable"))
    return Memory(None if total is None else int(total) * 1024, None if available is None else int(available) * 1024)


class Host:
    """Reads CPU, memory and pressure of the node."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def cpu(self) -> Cpu:
        """Return CPU seconds; raise ``OSError`` or ``ValueError``."""
        return cpu((self._proc / "stat").read_text(encoding="utf-8"))

    def memory(self) -> Memory:
        """Return memory in bytes; raise ``OSError``."""
        return memory((self._proc / "meminfo").read_text(encoding="utf-8"))

    def pressure(self) -> dict[str, float]:
        """Return seconds in which some task waited, by resource; empty unless the kernel counts them (boot option ``psi=1``)."""
        matches = {
            name: _PRESSURE.search(text(f"{self._proc}/pressure/{name}") or "") for name in ("cpu", "memory", "io")
        }
        return {name: int(matched[1]) / 1e6 for name, matched in matches.items() if matched}


class HostCollector:
    """Collector of CPU, memory and pressure."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._host = Host(proc)

    def collect(self) -> list[Reading]:
        """Return the current readings."""
        return list(self._collect())

    def _collect(self) -> Iterable[Reading]:
        for mode, seconds in self._host.cpu().seconds.items():
            yield Reading("host_cpu_seconds_total", (mode,), seconds)
        total, available = self._host.memory()
        for name, value in (("total", total), ("available", available)):
            if value is not None:
                yield Reading(f"host_memory_{name}_bytes", (), value)
        for resource, seconds in self._host.pressure().items():
            yield Reading("host_pressure_seconds_total", (resource,), seconds)
