"""API answers about the node: CPU, memory, network devices, GPUs and their distances. Plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CpuView:
    """Shares of all cores over the last seconds, 0 to 1."""

    cores: int
    shares: dict[str, float]
    #: Share of softirq (incoming packets) on the core with the most; near 1, that core limits the network.
    softirq_busiest: float | None


@dataclass(frozen=True)
class MemoryView:
    """In bytes; ``None``: not known."""

    total_bytes: int | None
    available_bytes: int | None


@dataclass(frozen=True)
class PciView:
    """A PCI function."""

    address: str
    #: ``None``: not reported by the firmware.
    numa_node: int | None
    #: Its link, such as ``16 GT/s x8``, and bandwidth; then the best it supports; ``None``: not known.
    link: str | None
    bandwidth: float | None
    most: str | None
    most_bandwidth: float | None
    #: Vendor and model; equal for devices of one kind.
    model: str | None


@dataclass(frozen=True)
class NicView:
    """A network device or RDMA port. Bytes are counted since it came up; ``None``: not known."""

    device: str
    #: ``ethernet``, ``infiniband``, ``roce``, ``rdma``, ``ipoib`` or ``virtual``.
    kind: str
    state: str
    up: bool | None
    #: Bytes per second and direction.
    speed: float | None
    #: Key of the link catalogue.
    link: str | None
    pci: PciView | None
    #: The network device of an RDMA port.
    netdev: str | None
    #: Devices below it, whose traffic it counts again.
    over: list[str]
    received_bytes: int | None
    sent_bytes: int | None
    #: Over the last seconds.
    received_bytes_per_s: float | None
    sent_bytes_per_s: float | None
    #: Rate of the busier direction / ``speed``.
    utilization: float | None
    received_packets: int | None
    sent_packets: int | None
    #: Counters of errors, drops and events; and the growth of those that grew within ``HostView.lately_s``.
    errors: dict[str, int]
    errors_lately: dict[str, int]
    #: Packets within ``HostView.lately_s``.
    packets_lately: int | None


@dataclass(frozen=True)
class GpuView:
    """A GPU, found by its PCI class; ``distances`` to each device of ``nics`` in NCCL's terms, PIX (near) to SYS (far)."""

    vendor: str
    pci: PciView
    distances: dict[str, str]
    #: The nearest devices that can carry a job's traffic.
    nearest: list[str]


@dataclass(frozen=True)
class Complaint:
    """A problem of a network device."""

    #: ``down``, ``errors``, ``slow`` or ``congestion``.
    kind: str
    device: str
    says: str
    remedy: str


@dataclass(frozen=True)
class HostView:
    """This node."""

    #: Unix time of the latest sample; ``None``: none yet.
    looked_at: float | None
    #: Window of ``errors_lately`` in seconds.
    lately_s: float
    cpu: CpuView | None
    memory: MemoryView | None
    #: Share of the last seconds (0 to 1) in which some task waited for ``cpu``, ``memory`` or ``io``.
    pressure: dict[str, float]
    nics: list[NicView]
    gpus: list[GpuView]
    numa_nodes: int
    complaints: list[Complaint]
    traffic: TrafficView


@dataclass(frozen=True)
class GroupTraffic:
    """Bytes that a group's operations should have sent from this node to others in the window."""

    job_id: str
    group: str
    group_id: str
    expected_sent_bytes: float
    #: Operations whose traffic between nodes is not known, and not counted.
    left_out: list[str]


@dataclass(frozen=True)
class TrafficView:
    """Expected traffic of collectives beside the counters of network devices, over the last minute at most."""

    #: Length of the window; the agent samples once a second.
    seconds: float
    groups: list[GroupTraffic]
    expected_sent_bytes: float
    #: Counted bytes by device, without devices that count bytes of others again (a bond, a bridge).
    sent_bytes: dict[str, int]
    #: The devices that carry the traffic; ``None``: there is none, or it is not known which.
    carriers: list[str] | None
    #: Why the carriers are not known.
    says: str | None
