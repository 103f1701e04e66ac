"""Which network devices are near which GPU. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from commwatch.collectors.node.pci import DISTANCES, Function, address, distance
from commwatch.core.host_views import GpuView, HostView, NicView

#: A device slower than this part of the fastest is for management.
_LEAST_SPEED = 0.5


class GpuNicPair(NamedTuple):
    """A rank's GPU and the network device that its traffic goes through."""

    rank: int
    gpu: str
    nic: str
    #: Of ``DISTANCES``.
    distance: str
    #: The device nearest to the GPU, and how far that is.
    nearest: str
    nearest_distance: str
    #: It has been seen that ``nic`` carries the traffic; else it is the nearest there is.
    seen: bool


def distances(gpu: Function, nics: Mapping[str, Function | None], nodes: int) -> dict[str, str]:
    """How far each device is from a GPU, where that is known."""
    known = {name: distance(gpu, function, nodes) for name, function in nics.items() if function is not None}
    return {name: far for name, far in known.items() if far is not None}


def for_traffic(nics: Iterable[NicView]) -> list[str]:
    """The devices that can carry a job's traffic: up, of hardware, not half as slow as the fastest; a port, not its network device."""
    known = list(nics)
    of_ports = {nic.netdev for nic in known if nic.netdev is not None}
    up = [nic for nic in known if nic.up and nic.pci is not None and nic.device not in of_ports]
    fastest = max((nic.speed for nic in up if nic.speed is not None), default=0.0)
    return [nic.device for nic in up if nic.speed is None or nic.speed >= _LEAST_SPEED * fastest]


def nearest(far: Mapping[str, str], among: Iterable[str]) -> list[str]:
    """Those of some devices that are as near as any."""
    known = {name: DISTANCES.index(far[name]) for name in among if name in far}
    return [name for name, at in known.items() if at == min(known.values())]


def places(gpus: Mapping[int, str], host: HostView) -> list[GpuNicPair]:
    """For each rank how far its GPU is from the network; ranks are left out where that is not known.

    Args:
        gpus: the PCI address of each rank's GPU, in any spelling.
    """
    by_address = {gpu.pci.address: gpu for gpu in host.gpus}
    found = []
    for rank, told in sorted(gpus.items()):
        gpu = by_address.get(address(told) or "")
        place = _place(rank, gpu, host.traffic.carriers) if gpu is not None else None
        found += [place] if place is not None else []
    return found


def _place(rank: int, gpu: GpuView, carriers: list[str] | None) -> GpuNicPair | None:
    if not gpu.nearest:
        return None
    near = gpu.nearest[0]
    used = nearest(gpu.distances, carriers or ())
    nic = next((name for name in used if name in gpu.nearest), used[0] if used else near)
    return GpuNicPair(rank, gpu.pci.address, nic, gpu.distances[nic], near, gpu.distances[near], bool(used))
