"""Network devices: counters from ``/proc/net/dev``, the rest from ``/sys/class/net``.

The kernel reads a device's speed under a lock of all networking, which others may hold for seconds (node_exporter #2477):
read it in a thread that no other thread waits for.
"""

from __future__ import annotations

import os
from pathlib import Path

from commwatch.collectors.node.nics import LINK_DOWNED, Counts, Nic, Traffic
from commwatch.collectors.node.pci import function_of
from commwatch.collectors.wire.files import names, number, text

_UP, _DOWN = ("up",), ("down", "lowerlayerdown", "notpresent")
#: ``type`` of a device: linux/if_arp.h.
_ETHERNET, _INFINIBAND = 1, 32
_BYTES_PER_MBIT = 1_000_000 / 8


def parse(content: str) -> dict[str, Counts]:
    """Parse ``/proc/net/dev``: counters by device, without the loopback; other lines are skipped."""
    found = {}
    for line in content.splitlines()[2:]:
        device, _, counters = line.partition(":")
        values = counters.split()
        if len(values) < 12 or device.strip() == "lo" or not all(value.isdecimal() for value in values[:12]):
            continue
        numbers = [int(value) for value in values[:12]]
        found[device.strip()] = Counts(Traffic(*numbers[:4]), Traffic(*numbers[8:12]))
    return found


class Network:
    """The devices of ``/sys/class/net``.

    Args:
        proc: where procfs is; ``net/dev`` in it is that of the reader's own network namespace.
        sys: where sysfs is.
    """

    name = "network"

    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._counters, self._devices = proc / "net" / "dev", f"{sys}/class/net"

    def counts(self) -> dict[str, Counts]:
        """Return the counters now; raise ``OSError`` if there are none."""
        return parse(self._counters.read_text(encoding="utf-8", errors="replace"))

    def nics(self) -> list[Nic]:
        """Return the devices, without the loopback, the oldest first."""
        order = {name: number(f"{self._devices}/{name}/ifindex") or 0 for name in names(self._devices)}
        return [self._nic(name) for name in sorted(order, key=lambda name: order[name]) if name != "lo"]

    def events(self, nic: Nic) -> dict[str, int]:
        """Return how often its link was lost, if the kernel counts that."""
        downs = number(f"{self._devices}/{nic.name}/carrier_down_count")
        return {} if downs is None else {LINK_DOWNED: downs}

    def _nic(self, name: str) -> Nic:
        folder = f"{self._devices}/{name}"
        state = text(f"{folder}/operstate") or "unknown"
        kind = self._kind(folder)
        return Nic(
            name=name,
            kind=kind,
            state=state,
            up=True if state in _UP else False if state in _DOWN else None,
            speed=self._speed(folder, kind),
            function=function_of(folder),
            over=tuple(entry.removeprefix("lower_") for entry in names(folder) if entry.startswith("lower_")),
        )

    @staticmethod
    def _kind(folder: str) -> str:
        if "/devices/virtual/" in os.path.realpath(folder):
            return "virtual"
        hardware = number(f"{folder}/type")
        return {_ETHERNET: "ethernet", _INFINIBAND: "ipoib"}.get(hardware or 0, "virtual")

    @staticmethod
    def _speed(folder: str, kind: str) -> float | None:
        """Return bytes per second. Virtual devices report speeds they do not have; a bond has that of its parts."""
        if kind == "virtual" and not names(f"{folder}/bonding"):
            return None
        speed = number(f"{folder}/speed")
        return speed * _BYTES_PER_MBIT if speed is not None and 0 < speed < 0xFFFFFFFF else None
