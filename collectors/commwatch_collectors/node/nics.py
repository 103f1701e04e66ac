"""Values of a network device of any kind."""

from __future__ import annotations

from typing import NamedTuple

from commwatch_collectors.node.pci import Function


class Traffic(NamedTuple):
    """Counters of a device in one direction since it came up; ``None`` if the device does not count that."""

    bytes: int | None
    packets: int | None
    errors: int | None
    drops: int | None


class Counts(NamedTuple):
    """Both directions."""

    received: Traffic
    sent: Traffic


class Nic(NamedTuple):
    """A device of ``/sys/class/net``, or a port of ``/sys/class/infiniband``; its values seldom change."""

    #: ``eth0``; a port as NCCL names it: ``mlx5_0:1``.
    name: str
    #: ``ethernet``, ``infiniband``, ``roce``, ``rdma`` (neither of the two: EFA), ``ipoib`` or ``virtual`` (veth, bond, bridge, tunnel).
    kind: str
    #: As the kernel names it.
    state: str
    #: ``None`` if not known.
    up: bool | None
    #: Bytes per second and direction; ``None``: not known.
    speed: float | None
    function: Function | None
    #: Devices whose counters include its traffic: those below a bond, VLAN or bridge.
    over: tuple[str, ...] = ()
    #: The device in ``/sys/class/net`` of an RDMA port.
    netdev: str | None = None


#: The event that every kind of device counts: the link was lost.
LINK_DOWNED = "link_downed"
