"""Computes rates, shares, growth of counters and distances from samples of a node. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from commwatch_agent.analysis import traffic
from commwatch_agent.analysis.gpu_nic_affinity import distances, for_traffic, nearest
from commwatch_agent.analysis.nic_health import complaints
from commwatch_agent.model.host_views import CpuView, GpuView, HostView, MemoryView, NicView, PciView, TrafficView
from commwatch_agent.model.node_counters import RECEIVED, SENT, NodeCounter
from commwatch_agent.reference.links import of_device
from commwatch_collectors.node.host import Cpu, Memory
from commwatch_collectors.node.nics import Counts, Nic
from commwatch_collectors.node.pci import GPU_VENDORS, Function

#: Window of rates, and the shortest time that gives a rate.
_RATE_NS, _LEAST_NS = 10_000_000_000, 500_000_000


class NodeSample(NamedTuple):
    """One sample of what is read every time."""

    at_ns: int
    counts: dict[str, Counts]
    cpu: Cpu | None
    memory: Memory
    pressure: dict[str, float]
    parts: dict[traffic.Key, traffic.Part]


class SlowSample(NamedTuple):
    """One sample of what is read only every ten seconds."""

    at_ns: int
    nics: tuple[Nic, ...]
    counts: dict[str, Counts]
    events: dict[str, dict[str, int]]
    gpus: tuple[Function, ...]
    numa_nodes: int


class Node(NamedTuple):
    """The samples of a node: ``samples`` of the last minute, ``slow_samples`` of the last ten minutes; at least one of each."""

    looked_at: float
    #: Monotonic time of the first sample.
    began_ns: int
    samples: tuple[NodeSample, ...]
    slow_samples: tuple[SlowSample, ...]
    #: Sources that cannot be read, with the reason.
    down: dict[str, str]

    @property
    def counts(self) -> dict[str, Counts]:
        """The latest counters."""
        return self.samples[-1].counts

    @property
    def nics(self) -> list[Nic]:
        """The devices that still exist: a device that vanished since the last list has no counters."""
        return [nic for nic in self.slow_samples[-1].nics if nic.name in self.counts]

    @property
    def events(self) -> dict[str, dict[str, int]]:
        """The latest events, by device."""
        return self.slow_samples[-1].events


def answer(node: Node | None, job: str | None) -> HostView:
    """Return the view of a node; an empty one before the first sample."""
    if node is None:
        return HostView(None, 0.0, None, None, {}, [], [], 1, [], traffic.traffic([], 0, job, ()))
    nics = [_nic(nic, node) for nic in node.nics]
    last = node.samples[-1]
    return HostView(
        looked_at=node.looked_at,
        lately_s=(node.slow_samples[-1].at_ns - node.slow_samples[0].at_ns) / 1e9,
        cpu=_cpu(node.samples),
        memory=MemoryView(last.memory.total, last.memory.available),
        pressure=_pressure(node.samples),
        nics=nics,
        gpus=[_gpu(gpu, node, for_traffic(nics)) for gpu in node.slow_samples[-1].gpus],
        numa_nodes=node.slow_samples[-1].numa_nodes,
        complaints=complaints(nics),
        traffic=_traffic(node, nics, job),
    )


def counters(node: Node) -> list[NodeCounter]:
    """Return what each network device receives and sends per second, where known."""
    return [
        NodeCounter(kind, nic.name, rate)
        for nic in node.nics
        for kind, rate in zip((RECEIVED, SENT), _rates(node, nic.name), strict=True)
        if rate is not None
    ]


def _traffic(node: Node, nics: Sequence[NicView], job: str | None) -> TrafficView:
    samples = []
    for reading in node.samples:
        sent = {name: counts.sent.bytes for name, counts in reading.counts.items() if counts.sent.bytes is not None}
        samples.append(traffic.Sample(reading.at_ns, sent, reading.parts))
    named = {nic.device for nic in nics}
    ports = {nic.netdev: nic.device for nic in nics if nic.netdev is not None}
    # A device on top of others counts their traffic again, and IPoIB goes through its port; for RoCE see docs/hardware.md.
    beside = [
        nic.device for nic in nics if named.intersection(nic.over) or (nic.kind == "ipoib" and nic.device in ports)
    ]
    beside += [name for sample in samples for name in sample.sent if name not in named]
    return traffic.traffic(samples, node.began_ns, job, beside, ports)


# -- network devices ----------------------------------------------------------------------------


def _nic(nic: Nic, node: Node) -> NicView:
    counts = node.counts[nic.name]
    received, sent = _rates(node, nic.name)
    rates = [rate for rate in (received, sent) if rate is not None]
    return NicView(
        device=nic.name,
        kind=nic.kind,
        state=nic.state,
        up=nic.up,
        speed=nic.speed,
        link=of_device(nic.kind, nic.speed),
        pci=None if nic.function is None else _pci(nic.function),
        netdev=nic.netdev,
        over=list(nic.over),
        received_bytes=counts.received.bytes,
        sent_bytes=counts.sent.bytes,
        received_bytes_per_s=received,
        sent_bytes_per_s=sent,
        utilization=max(rates) / nic.speed if rates and nic.speed else None,
        received_packets=counts.received.packets,
        sent_packets=counts.sent.packets,
        errors=_errors(counts, node.events.get(nic.name, {})),
        errors_lately={name: more for name, more in _grown(nic.name, node.slow_samples).items() if more},
        packets_lately=_packets_lately(nic.name, node.slow_samples),
    )


def _rates(node: Node, name: str) -> tuple[float | None, float | None]:
    """Return the bytes per second that a device has received and sent in the last ten seconds."""
    received, sent = (_rate([(one.at_ns, _bytes(one, name, way)) for one in node.samples]) for way in (0, 1))
    return received, sent


def _bytes(reading: NodeSample, name: str, way: int) -> float | None:
    return reading.counts[name][way].bytes if name in reading.counts else None


def _errors(counts: Counts, events: Mapping[str, int]) -> dict[str, int]:
    own = {
        "receive_errors": counts.received.errors,
        "transmit_errors": counts.sent.errors,
        "receive_drops": counts.received.drops,
        "transmit_drops": counts.sent.drops,
    }
    return {**{name: value for name, value in own.items() if value is not None}, **events}


def _grown(name: str, slow_samples: Sequence[SlowSample]) -> dict[str, int]:
    """Return the growth of a device's error counters; a counter that was reset has grown by its value."""
    error_counts = [_errors(one.counts[name], one.events.get(name, {})) for one in slow_samples if name in one.counts]
    sums: dict[str, int] = {}
    for before, after in pairwise(error_counts):
        for event, value in after.items():
            more = value - before.get(event, value)
            sums[event] = sums.get(event, 0) + (more if more >= 0 else value)
    return sums


def _packets_lately(name: str, slow_samples: Sequence[SlowSample]) -> int | None:
    packet_counts = [_packets(one.counts[name]) for one in slow_samples if name in one.counts]
    known = [packets for packets in packet_counts if packets is not None]
    return known[-1] - known[0] if len(known) > 1 and known[-1] >= known[0] else None


def _packets(counts: Counts) -> int | None:
    both = [traffic.packets for traffic in counts if traffic.packets is not None]
    return sum(both) if both else None


def _rate(points: Sequence[tuple[int, float | None]]) -> float | None:
    """Return the growth of a counter per second over the last ten seconds; ``None`` if it was reset, or is too new."""
    known = [(at, value) for at, value in points if value is not None and at >= points[-1][0] - _RATE_NS]
    if not known or known[-1][0] - known[0][0] < _LEAST_NS or known[-1][1] < known[0][1]:
        return None
    return (known[-1][1] - known[0][1]) / ((known[-1][0] - known[0][0]) / 1e9)


# -- PCI ----------------------------------------------------------------------------------------


def _pci(function: Function) -> PciView:
    link, most = function.link, function.most
    return PciView(
        address=function.address,
        numa_node=function.numa_node,
        link=None if link is None else str(link),
        bandwidth=None if link is None else link.bandwidth,
        most=None if most is None else str(most),
        most_bandwidth=None if most is None else most.bandwidth,
        model=f"{function.vendor:04x}:{function.model:04x}"
        if function.vendor is not None and function.model is not None
        else None,
    )


def _gpu(gpu: Function, node: Node, able: Sequence[str]) -> GpuView:
    far = distances(gpu, {nic.name: nic.function for nic in node.nics}, node.slow_samples[-1].numa_nodes)
    return GpuView(GPU_VENDORS.get(gpu.vendor or 0, "unknown"), _pci(gpu), far, nearest(far, able))


# -- CPU ----------------------------------------------------------------------------------------


def _cpu(samples: Sequence[NodeSample]) -> CpuView | None:
    last = samples[-1].cpu
    if last is None:
        return None
    modes = {
        mode: _rate(
            [(reading.at_ns, None if reading.cpu is None else reading.cpu.seconds.get(mode)) for reading in samples]
        )
        for mode in last.seconds
    }
    total = sum(rate for rate in modes.values() if rate is not None)
    cores = [
        _rate([(reading.at_ns, _core(reading.cpu, core)) for reading in samples]) for core in range(len(last.softirq))
    ]
    known = [rate for rate in cores if rate is not None]
    return CpuView(
        cores=len(last.softirq),
        shares={mode: rate / total for mode, rate in modes.items() if rate is not None} if total else {},
        softirq_busiest=min(1.0, max(known)) if known else None,
    )


def _core(cpu: Cpu | None, core: int) -> float | None:
    return cpu.softirq[core] if cpu is not None and core < len(cpu.softirq) else None


def _pressure(samples: Sequence[NodeSample]) -> dict[str, float]:
    rates = {
        name: _rate([(reading.at_ns, reading.pressure.get(name)) for reading in samples])
        for name in samples[-1].pressure
    }
    return {name: min(1.0, rate) for name, rate in rates.items() if rate is not None}
