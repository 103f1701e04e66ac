"""Bytes that the node's network devices have moved, from ``/proc/net/dev``."""

from __future__ import annotations

from pathlib import Path

from commwatch.collectors.registry import Reading


def parse(text: str) -> list[Reading]:
    """Readings of the devices in ``text``; the loopback and devices that never moved a byte are left out."""
    readings = []
    for line in text.splitlines()[2:]:
        device, _, counters = line.partition(":")
        values = counters.split()
        if len(values) < 9 or device.strip() == "lo":
            continue
        received, sent = int(values[0]), int(values[8])
        if received or sent:
            readings.append(Reading("network_bytes_total", (device.strip(), "receive"), received))
            readings.append(Reading("network_bytes_total", (device.strip(), "transmit"), sent))
    return readings


class NetworkCollector:
    """Reads the kernel's counters."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._file = proc / "net" / "dev"

    def collect(self) -> list[Reading]:
        """Bytes by device and direction."""
        return parse(self._file.read_text())
