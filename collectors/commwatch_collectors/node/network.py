"""Network devices: counters by psutil (``/proc/net/dev``), the rest from ``/sys/class/net``.

The kernel reads a device's speed under a lock of all networking, which others may hold for seconds (node_exporter #2477):
read it in a thread that no other thread waits for.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from commwatch.wire.files import names, number, text
from commwatch_collectors.node.nics import LINK_DOWNED, Counts, Nic, Traffic
from commwatch_collectors.node.pci import function_of

_UP, _DOWN = ("up",), ("down", "lowerlayerdown", "notpresent")
#: ``type`` of a device: linux/if_arp.h.
_ETHERNET, _INFINIBAND = 1, 32
_BYTES_PER_MBIT = 1_000_000 / 8


class Network:
    """The devices of ``/sys/class/net``.

    Args:
        sys: where sysfs is.
    """

    name = "network"

    def __init__(self, sys: Path = Path("/sys")) -> None:
        self._devices = f"{sys}/class/net"

    @staticmethod
    def counts() -> dict[str, Counts]:
        """Return the counters of the devices in this process's network namespace, without the loopback.

        Raises:
            OSError: there are none, or they cannot be parsed.
        """
        try:
            # Without nowrap, psutil would add the old value to a counter that restarts; Prometheus expects to see the restart.
            devices = psutil.net_io_counters(pernic=True, nowrap=False)
        except (AssertionError, ValueError) as error:
            raise OSError(f"{psutil.PROCFS_PATH}/net/dev cannot be parsed: {error}") from error
        return {
            # A name may hold any bytes, and lone surrogates could not be sent.
            name.encode(errors="surrogateescape").decode(errors="replace"): Counts(
                Traffic(of.bytes_recv, of.packets_recv, of.errin, of.dropin),
                Traffic(of.bytes_sent, of.packets_sent, of.errout, of.dropout),
            )
            for name, of in devices.items()
            if name != "lo"
        }

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
