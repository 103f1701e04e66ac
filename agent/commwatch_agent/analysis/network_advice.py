"""Advice on a node's network devices, for jobs with groups across nodes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from commwatch_agent.analysis.gpu_nic_affinity import GpuNicPair
from commwatch_agent.model.host_views import Complaint
from commwatch_collectors.node.pci import SYS


class Network(NamedTuple):
    """The facts about the network that the rules use."""

    #: Distances of the GPUs of this node's ranks from the network, where known.
    places: Sequence[GpuNicPair] = ()
    complaints: Sequence[Complaint] = ()


class NetworkFinding(NamedTuple):
    """One piece of advice: its reasons, and a text and a title in place of the rule's own."""

    because: list[str]
    do: str = ""
    title: str = ""


def far_from_nic(network: Network) -> Iterator[NetworkFinding]:
    """Yield advice on ranks whose GPU is on a different NUMA node from the device that carries their traffic."""
    far = [place for place in network.places if place.distance == SYS]
    if not far:
        return
    because = [
        f"rank {place.rank}: GPU {place.gpu} is on a different NUMA node from {place.nic}, "
        f"{'which carries the traffic' if place.seen else 'the nearest device'}"
        for place in far
    ]
    nearer = sorted({place.nearest for place in far if place.nearest_distance != SYS})
    let = "leave `NCCL_IB_HCA`, `NCCL_SOCKET_IFNAME` and `GLOO_SOCKET_IFNAME` unset, or add the device to them."
    who = ", ".join(str(place.rank) for place in far)
    yield NetworkFinding(
        because,
        f"Let the job use a nearer device ({', '.join(nearer)}): {let}" if nearer else "",
        f"rank {who} reaches its NIC across NUMA nodes"
        if len(far) == 1
        else f"ranks {who} reach their NICs across NUMA nodes",
    )


def complaints(*kinds: str) -> Callable[[Network], Iterator[NetworkFinding]]:
    """Return a function that yields advice from the complaints of these kinds."""

    def check(network: Network) -> Iterator[NetworkFinding]:
        for complaint in network.complaints:
            if complaint.kind in kinds:
                remedy = complaint.remedy[0].upper() + complaint.remedy[1:]
                yield NetworkFinding([f"{complaint.device}: {complaint.says}"], f"{remedy}.")

    return check
