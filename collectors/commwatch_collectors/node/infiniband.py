"""RDMA ports, InfiniBand and RoCE, from ``/sys/class/infiniband``. Counters that a device does not have are absent.

Sources: linux Documentation/ABI/stable/sysfs-class-infiniband; drivers/infiniband/core/sysfs.c (formats, widths); NVIDIA,
"Understanding mlx5 Linux Counters and Status Parameters". PFC's pause frames are not in sysfs, only in ethtool.
"""

from __future__ import annotations

import re
from pathlib import Path

from commwatch.wire.files import names, number, text
from commwatch_collectors.node.nics import LINK_DOWNED, Counts, Nic, Traffic
from commwatch_collectors.node.pci import function_of

#: Events by file name, in ``counters`` (InfiniBand's own) and in ``hw_counters`` (the driver's).
EVENTS = {
    "symbol_error": "minor errors on the lanes",
    "link_error_recovery": "the link was retrained after an error",
    LINK_DOWNED: "the link was lost",
    "local_link_integrity_errors": "local errors exceeded their threshold",
    "excessive_buffer_overrun_errors": "an input buffer overflowed",
    "VL15_dropped": "management packets dropped for lack of buffers",
    "port_xmit_wait": "ticks in which data waited for credit: congestion",
}
HW_EVENTS = {
    "np_cnp_sent": "congestion notifications sent, because packets arrived with an ECN mark",
    "np_ecn_marked_roce_packets": "packets that arrived with an ECN mark",
    "rp_cnp_handled": "congestion notifications handled: this port slowed down",
    "out_of_sequence": "packets that arrived out of order: some were lost in transit",
    "packet_seq_err": "the other side reported that packets from this port were lost",
    "local_ack_timeout_err": "no acknowledgement arrived in time, so packets were sent again",
    "rnr_nak_retry_err": "the other side was not ready too many times",
    "roce_adp_retrans": "packets sent again (adaptive retransmission)",
    "rx_icrc_encapsulated": "packets that arrived damaged",
}
#: Share of a signalling rate that the line code leaves: 8b/10b, 64b/66b. From EDR on the kernel gives net rates.
_LINE_CODES = {"": 0.8, "SDR": 0.8, "DDR": 0.8, "QDR": 0.8, "FDR10": 64 / 66, "FDR": 64 / 66}
_RATE = re.compile(r"(\d{1,5}(?:\.\d{1,2})?) Gb/sec(?: \(\d{1,2}X ?(\w*)\))?")
_KINDS = {"InfiniBand": "infiniband", "Ethernet": "roce"}
#: ACTIVE, ACTIVE_DEFER.
_ACTIVE = ("4", "5")
#: A 32-bit counter, on ports without extended counters, stops at this value.
_FULL = 0xFFFFFFFF
_WORD = 4


class Infiniband:
    """The ports of ``/sys/class/infiniband``; none without that folder."""

    name = "infiniband"

    def __init__(self, sys: Path = Path("/sys")) -> None:
        self._devices, self._net = f"{sys}/class/infiniband", f"{sys}/class/net"
        self._ports: list[str] = []

    def nics(self) -> list[Nic]:
        """Return the ports."""
        found = [self._nic(*port) for port in self._list()]
        self._ports = [nic.name for nic in found]
        return found

    def counts(self) -> dict[str, Counts]:
        """Return the counters now, of the ports that ``nics`` found and that still exist."""
        found = {name: self._counts(self._folder(name)) for name in self._ports}
        return {name: counts for name, counts in found.items() if counts is not None}

    def events(self, nic: Nic) -> dict[str, int]:
        """Return counters of errors, congestion and retransmissions."""
        folder = self._folder(nic.name)
        read = {name: number(f"{folder}/counters/{name}") for name in EVENTS}
        read |= {name: number(f"{folder}/hw_counters/{name}") for name in HW_EVENTS}
        return {name: value for name, value in read.items() if value is not None}

    def _list(self) -> list[tuple[str, str]]:
        return [
            (device, port)
            for device in names(self._devices)
            for port in sorted(names(f"{self._devices}/{device}/ports"), key=lambda port: (len(port), port))
        ]

    def _folder(self, name: str) -> str:
        device, _, port = name.rpartition(":")
        return f"{self._devices}/{device}/ports/{port}"

    def _nic(self, device: str, port: str) -> Nic:
        folder = self._folder(f"{device}:{port}")
        number_of_state, _, state = (text(f"{folder}/state") or "").partition(": ")
        kind = _KINDS.get(text(f"{folder}/link_layer") or "", "rdma")
        up = number_of_state in _ACTIVE if number_of_state else None
        return Nic(
            name=f"{device}:{port}",
            kind=kind,
            state=state.lower() or "unknown",
            up=up,
            # A port that is down shows a rate that it does not have.
            speed=rate(text(f"{folder}/rate") or "", kind) if up else None,
            function=function_of(f"{self._devices}/{device}"),
            netdev=self._netdev(device, port, folder),
        )

    def _netdev(self, device: str, port: str, folder: str) -> str | None:
        """Return its network device: that of its first GID (RoCE), or the one of its function and port (IPoIB)."""
        netdev = text(f"{folder}/gid_attrs/ndevs/0")
        if netdev:
            return netdev
        for name in names(f"{self._devices}/{device}/device/net"):
            if (number(f"{self._net}/{name}/dev_port") or 0) == int(port) - 1:
                return name
        return None

    @staticmethod
    def _counts(folder: str) -> Counts | None:
        """Return the counters of a port; ``None`` if the port is gone."""
        if not Path(folder).is_dir():
            return None
        counters, own = f"{folder}/counters", f"{folder}/hw_counters"
        received, sent = _words(f"{counters}/port_rcv_data"), _words(f"{counters}/port_xmit_data")
        if received is None and sent is None:  # EFA has counters in bytes, among the driver's own
            received, sent = number(f"{own}/rx_bytes"), number(f"{own}/tx_bytes")
        packets = [number(f"{counters}/port_{way}_packets") for way in ("rcv", "xmit")]
        errors, discards = number(f"{counters}/port_rcv_errors"), number(f"{counters}/port_xmit_discards")
        return Counts(
            Traffic(received, packets[0], errors, number(f"{own}/rx_drops")),
            Traffic(sent, packets[1], None, discards),
        )


def _words(path: str) -> int | None:
    """Return a counter of 4-byte words in bytes; ``None`` if it is missing or full."""
    words = number(path)
    return None if words is None or words == _FULL else words * _WORD


def rate(content: str, kind: str) -> float | None:
    """Return bytes per second of a port's ``rate``, such as ``400 Gb/sec (4X NDR)``; ``None`` for other text."""
    matched = _RATE.match(content)
    if matched is None:
        return None
    code = _LINE_CODES.get(matched[2] or "", 1.0) if kind == "infiniband" else 1.0
    return float(matched[1]) * 1e9 / 8 * code or None
