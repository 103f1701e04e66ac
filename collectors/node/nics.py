"""What is read of a network device, whichever kind it is."""

from __future__ import annotations

from typing import NamedTuple

from commwatch.collectors.node.pci import Function


class Traffic(NamedTuple):
    """What a device has counted in one direction since it came up; ``None``: it does not count that."""

    bytes: int | None
    packets: int | None
    errors: int | None
    drops: int | None


class Counts(NamedTuple):
    """Both directions."""

    received: Traffic
    sent: Traffic


class Nic(NamedTuple):
    """A device of ``/sys/class/net``, or a port of one of ``/sys/class/infiniband``; what may change, but seldom does."""

    #: ``eth0``; a port as NCCL names it: ``mlx5_0:1``.
    name: str
    #: ``ethernet``, ``infiniband``, ``roce``, ``rdma`` (neither of the two: EFA), ``ipoib`` or ``virtual`` (veth, bond, bridge, tunnel).
    kind: str
    #: In the kernel's words.
    state: str
    #: ``None``: it does not say.
    up: bool | None
    #: Bytes per second and direction; ``None``: not known.
    speed: float | None
    function: Function | None
    #: Devices that count what it counts: those below a bond, VLAN or bridge.
    over: tuple[str, ...] = ()
    #: Of an RDMA port: its device of ``/sys/class/net``.
    netdev: str | None = None


#: The event that every kind of device counts: its link was lost.
LINK_DOWNED = "link_downed"
