"""What the API shows of the node: CPU, memory, network devices, GPUs and the way between them. Plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CpuView:
    """Shares of all cores over the last seconds, 0 to 1."""

    cores: int
    shares: dict[str, float]
    #: Softirq (incoming packets) on the core that has most of it: near 1, this core holds the network up.
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
    #: ``None``: the firmware does not say.
    numa_node: int | None
    #: Its link, such as ``16 GT/s x8``, and its bandwidth; what it could be at most; ``None``: not known.
    link: str | None
    bandwidth: float | None
    most: str | None
    most_bandwidth: float | None
    #: Vendor and model, by which one knows two of a kind.
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
    #: Devices below it; what they count, it counts again.
    over: list[str]
    received_bytes: int | None
    sent_bytes: int | None
    #: Over the last seconds.
    received_bytes_per_s: float | None
    sent_bytes_per_s: float | None
    #: The busier direction over the speed.
    utilization: float | None
    received_packets: int | None
    sent_packets: int | None
    #: Errors, drops and events, and by how much they have grown within ``HostView.lately_s``; only those that have.
    errors: dict[str, int]
    errors_lately: dict[str, int]
    #: Packets within the same time.
    packets_lately: int | None


@dataclass(frozen=True)
class GpuView:
    """A GPU, found by its PCI class: its distance to each device of ``nics``, in NCCL's words from PIX (near) to SYS (far)."""

    vendor: str
    pci: PciView
    distances: dict[str, str]
    #: The nearest devices that can carry a job's traffic.
    nearest: list[str]


@dataclass(frozen=True)
class Complaint:
    """Something is wrong with a network device."""

    #: ``down``, ``errors``, ``slow`` or ``congestion``.
    kind: str
    device: str
    says: str
    remedy: str


@dataclass(frozen=True)
class HostView:
    """This node."""

    #: Unix time at which it was looked at; ``None``: not yet.
    looked_at: float | None
    #: How far back ``errors_lately`` goes.
    lately_s: float
    cpu: CpuView | None
    memory: MemoryView | None
    #: Share of the last seconds in which some task stood still for want of ``cpu``, ``memory`` or ``io``.
    pressure: dict[str, float]
    nics: list[NicView]
    gpus: list[GpuView]
    numa_nodes: int
    complaints: list[Complaint]
    traffic: TrafficView


@dataclass(frozen=True)
class GroupTraffic:
    """What a group's operations should have sent from this node to others, within the window."""

    job_id: str
    group: str
    group_id: str
    expected_sent_bytes: float
    #: Operations that were there too, of which it is not known how much of them leaves this node.
    left_out: list[str]


@dataclass(frozen=True)
class TrafficView:
    """Collectives beside network devices, over the last minute at most."""

    #: Length of the window; the agent looks once a second.
    seconds: float
    groups: list[GroupTraffic]
    expected_sent_bytes: float
    #: What devices counted, by name; those that count the same bytes again (a bond, a bridge) are left out.
    sent_bytes: dict[str, int]
    #: The devices that carry the traffic; ``None``: there is none, or it is not known which.
    carriers: list[str] | None
    #: Why it is not known.
    says: str | None
