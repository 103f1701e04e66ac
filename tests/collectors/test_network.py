"""Bytes of the network devices, from a recorded ``/proc/net/dev``."""

from __future__ import annotations

from pathlib import Path

import pytest

from commwatch.collectors.network import NetworkCollector, parse
from commwatch.collectors.registry import Reading

PROC = Path(__file__).parents[1] / "fixtures" / "proc"
HEAD = "Inter-| Receive | Transmit\n face |bytes ... |bytes ...\n"


def test_recorded() -> None:
    """Each device that has moved a byte has what it received and what it sent; the loopback and idle ones are left out."""
    assert NetworkCollector(proc=PROC).collect() == [
        Reading("network_bytes_total", ("eth0", "receive"), 734_981_227_654),
        Reading("network_bytes_total", ("eth0", "transmit"), 18_446_744_073_709_551_000),
        # An old kernel leaves no space behind the colon.
        Reading("network_bytes_total", ("eno1np1", "receive"), 1_500_000),
        Reading("network_bytes_total", ("eno1np1", "transmit"), 0),
        Reading("network_bytes_total", ("ibs2", "receive"), 0),
        Reading("network_bytes_total", ("ibs2", "transmit"), 256),
    ]


@pytest.mark.parametrize("text", ["", HEAD, HEAD + "\n", HEAD + "eth0: 1 2 3\n", HEAD + "nonsense\n"])
def test_nothing_to_read(text: str) -> None:
    """No devices, and lines that are no devices, give no readings and no error."""
    assert parse(text) == []


def test_this_machine() -> None:
    """The kernel's own file is read, with each device and direction once."""
    labels = [reading.labels for reading in NetworkCollector().collect()]
    assert len(labels) == len(set(labels))
    assert {direction for _, direction in labels} <= {"receive", "transmit"}


def test_no_file(tmp_path: Path) -> None:
    """Where there is no such file the collector says so with an ``OSError``."""
    with pytest.raises(OSError, match="net/dev"):
        NetworkCollector(proc=tmp_path).collect()
