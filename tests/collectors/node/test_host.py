"""CPU, memory and pressure of the node, from recorded files."""

from __future__ import annotations

from pathlib import Path

import pytest

from commwatch.collectors.node.host import Host, HostCollector, cpu, memory
from commwatch.collectors.registry import Reading
from tests.trees import say, unpack


def test_recorded(tmp_path: Path) -> None:
    """Seconds by mode (nice counts as user), memory in bytes, and the pressure of the kernel."""
    readings = HostCollector(unpack("infiniband", tmp_path) / "proc").collect()
    assert Reading("host_cpu_seconds_total", ("user",), 2010.0) in readings
    assert Reading("host_cpu_seconds_total", ("softirq",), 40.0) in readings
    assert Reading("host_memory_total_bytes", (), 131_072_000 * 1024) in readings
    assert Reading("host_memory_available_bytes", (), 98_304_000 * 1024) in readings
    assert [reading for reading in readings if reading.metric == "host_pressure_seconds_total"] == [
        Reading("host_pressure_seconds_total", ("memory",), 1.5)
    ]


def test_what_is_not_told(tmp_path: Path) -> None:
    """An old kernel's short line, no available memory, no pressure: missing values are absent."""
    host = Host(unpack("bare", tmp_path) / "proc")
    assert host.cpu().seconds == {"user": 0.1, "system": 0.05, "idle": 0.8}
    assert host.memory() == (1024 * 1024, None)
    assert host.pressure() == {}


def test_core_by_core(tmp_path: Path) -> None:
    """Softirq time is given by core: one core that does it all is visible."""
    assert Host(unpack("infiniband", tmp_path) / "proc").cpu().softirq == [40.0, 0.0]


def test_damaged(tmp_path: Path) -> None:
    """A file that is something else is a ``ValueError``, none an ``OSError``: the collector is then down."""
    tree = unpack("bare", tmp_path)
    say(tree, "proc/stat", "nonsense")
    with pytest.raises(ValueError, match="no line 'cpu'"):
        HostCollector(tree / "proc").collect()
    with pytest.raises(ValueError, match="literal"):
        cpu("cpu a b c")
    with pytest.raises(ValueError, match="no line"):
        cpu("cpu 1")
    with pytest.raises(OSError, match="stat"):
        HostCollector(tmp_path / "none").collect()
    assert memory("nonsense") == (None, None)


def test_this_machine() -> None:
    """The kernel's own files are read."""
    readings = {reading.metric: reading.value for reading in HostCollector().collect()}
    assert readings["host_memory_total_bytes"] >= readings["host_memory_available_bytes"] > 0
