"""CPU, memory and pressure of the node, from recorded files."""

from __future__ import annotations

from pathlib import Path

import pytest

from commwatch_collectors.node.host import HostCollector, cpu, memory, pressure
from commwatch_collectors.registry import Reading
from tests.trees import procfs, say, unpack, vanish


def test_recorded(tmp_path: Path) -> None:
    """Seconds by mode (nice counts as user), memory in bytes, and the pressure of the kernel."""
    with procfs(unpack("infiniband", tmp_path) / "proc"):
        readings = HostCollector().collect()
    assert Reading("host_cpu_seconds_total", ("user",), 2010.0) in readings
    assert Reading("host_cpu_seconds_total", ("softirq",), 40.0) in readings
    assert Reading("host_memory_total_bytes", (), 131_072_000 * 1024) in readings
    assert Reading("host_memory_available_bytes", (), 98_304_000 * 1024) in readings
    assert [reading for reading in readings if reading.metric == "host_pressure_seconds_total"] == [
        Reading("host_pressure_seconds_total", ("memory",), 1.5)
    ]


def test_no_pressure(tmp_path: Path) -> None:
    """A kernel that counts no pressure has none; CPU and memory are there all the same."""
    with procfs(unpack("bare", tmp_path) / "proc"):
        none = dict.fromkeys(("iowait", "irq", "softirq", "steal"), 0.0)
        assert cpu().seconds == {"user": 0.1, "system": 0.05, "idle": 0.8, **none}
        assert memory() == (1024 * 1024, 512 * 1024)
        assert pressure() == {}


def test_guests(tmp_path: Path) -> None:
    """Time of virtual machines, which the kernel counts in user and nice as well, is counted once."""
    tree = unpack("bare", tmp_path)
    say(tree, "proc/stat", "cpu  300 100 0 0 0 0 0 0 200 50\ncpu0 300 100 0 0 0 0 0 0 200 50")
    with procfs(tree / "proc"):
        assert sum(cpu().seconds.values()) == cpu().seconds["user"] == 4.0


def test_core_by_core(tmp_path: Path) -> None:
    """Softirq time is given by core: one core that does it all is visible."""
    with procfs(unpack("infiniband", tmp_path) / "proc"):
        assert cpu().softirq == [40.0, 0.0]


@pytest.mark.parametrize("file", ["stat", "meminfo"])
@pytest.mark.parametrize(
    "text", ["nonsense", "", "\n", "cpu a b c d e f g h i j", "cpu 1", "cpu  10 0 5 80", "MemTotal: 1 kB"]
)
def test_damaged(tmp_path: Path, file: str, text: str) -> None:
    """A file that is something else is a ``ValueError`` that names it, none an ``OSError``: the collector is then down."""
    tree = unpack("bare", tmp_path)
    say(tree, f"proc/{file}", text)
    with procfs(tree / "proc"):
        with pytest.raises(ValueError, match=f"{file} cannot be parsed"):
            HostCollector().collect()
        vanish(tree, f"proc/{file}")
        with pytest.raises(OSError, match=file):
            HostCollector().collect()


def test_this_machine() -> None:
    """The kernel's own files are read."""
    readings = {reading.metric: reading.value for reading in HostCollector().collect()}
    assert readings["host_memory_total_bytes"] >= readings["host_memory_available_bytes"] > 0
