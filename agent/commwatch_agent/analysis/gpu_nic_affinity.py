"""Distances between GPUs and network devices. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from commwatch_agent.model.host_views import GpuView, HostView, NicView
from commwatch_collectors.node.pci import DISTANCES, Function, address, distance

#: Devices slower than this part of the fastest are for management.
_LEAST_SPEED = 0.5


class GpuNicPair(NamedTuple):
    """A rank's GPU and the network device that carries its traffic."""

    rank: int
    gpu: str
    nic: str
    #: One of ``DISTANCES``.
    distance: str
    #: The device nearest to the GPU, and its distance.
    nearest: str
    nearest_distance: str
    #: Whether ``nic`` was measured to carry the traffic; otherwise it is the nearest device.
    seen: bool


def distances(gpu: Function, nics: Mapping[str, Function | None], nodes: int) -> dict[str, str]:
    """Return the distance of each device from a GPU, where known; ``nodes`` is the number of NUMA nodes."""
    known = {name: distance(gpu, function, nodes) for name, function in nics.items() if function is not None}
    return {name: far for name, far in known.items() if far is not None}


def for_traffic(nics: Iterable[NicView]) -> list[str]:
    """Return the devices fit for a job's traffic: hardware that is up and not half as slow as the fastest.

    Of an RDMA port and its network device, only the port.
    """
    known = list(nics)
    of_ports = {nic.netdev for nic in known if nic.netdev is not None}
    up = [nic for nic in known if nic.up and nic.pci is not None and nic.device not in of_ports]
    fastest = max((nic.speed for nic in up if nic.speed is not None), default=0.0)
    return [nic.device for nic in up if nic.speed is None or nic.speed >= _LEAST_SPEED * fastest]


def nearest(far: Mapping[str, str], among: Iterable[str]) -> list[str]:
    """Return the nearest of the devices ``among``; several if their distances are equal."""
    known = {name: DISTANCES.index(far[name]) for name in among if name in far}
    return [name for name, at in known.items() if at == min(known.values())]


def places(gpus: Mapping[int, str], host: HostView) -> list[GpuNicPair]:
    """Return the distance of each rank's GPU from the network, without ranks for which it is not known.

    Args:
        gpus: the PCI address of each rank's GPU, in any spelling.
    """
    by_address = {gpu.pci.address: gpu for gpu in host.gpus}
    found = []
    for rank, pci_address in sorted(gpus.items()):
        gpu = by_address.get(address(pci_address) or "")
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
