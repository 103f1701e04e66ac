"""Samples the node and its network devices once a second in a thread of its own, so that no request waits for a driver.

Traffic counters are read each time; what rarely changes or may take long (speeds, errors, the list of devices) every ten
seconds. ``host_rates`` computes rates from the samples.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import time

from commwatch_agent.analysis.host_rates import Node, NodeSample, SlowSample, answer, counters
from commwatch_agent.analysis.traffic import parts
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.model.host_views import HostView
from commwatch_agent.model.node_counters import NodeCounter
from commwatch_agent.reference.links import of_device
from commwatch_collectors.node import host, pci
from commwatch_collectors.node.infiniband import Infiniband
from commwatch_collectors.node.network import Network
from commwatch_collectors.node.nics import LINK_DOWNED, Counts, Nic
from commwatch_collectors.registry import Reading

log = logging.getLogger("commwatch")
#: How long samples and slow samples are kept.
WINDOW_NS, LATELY_NS = 60_000_000_000, 600_000_000_000
_SELDOM_NS = 10_000_000_000
#: After so long without a sample a driver hangs, and the latest values are out of date.
_STUCK_NS = 30_000_000_000
#: After so long without a sample its rates do not go into the history.
_OLD_NS = 5_000_000_000
#: Virtual devices reported, the oldest first: a Kubernetes node has one per pod.
MOST_VIRTUAL = 16
_WAYS = ("receive", "transmit")
_KINDS_OF_COUNTS = ("bytes", "packets", "errors", "drops")


class HostWatch:
    """The state of the node, now and in the last minutes. One thread calls ``tick``; any thread may call the others.

    Args:
        aggregate: jobs in memory, with the bytes that collectives have moved.
        lock: guards ``aggregate``.
        now_ns: the monotonic clock.
        sys: mount point of sysfs.
    """

    def __init__(
        self,
        aggregate: JobTable,
        lock: threading.RLock,
        now_ns: Callable[[], int],
        sys: Path = Path("/sys"),
    ) -> None:
        self._aggregate, self._lock, self._now_ns, self._sys = aggregate, lock, now_ns, sys
        self._readers: tuple[Network | Infiniband, ...] = (Infiniband(sys), Network(sys))
        self._samples: deque[NodeSample] = deque()
        self._slow_samples: deque[SlowSample] = deque()
        #: What the answers are made from; replaced as a whole, so that readers need no lock.
        self._node: Node | None = None
        self._down: dict[str, str] = {}
        self._began_ns: int | None = None

    # -- sampling -----------------------------------------------------------------------------

    def tick(self) -> None:
        """Take one sample."""
        now = self._now_ns()
        if not self._slow_samples or now - self._slow_samples[-1].at_ns >= _SELDOM_NS:
            self._slow_samples.append(self._take_slow_sample(now))
        sample = self._take_sample()
        self._began_ns = sample.at_ns if self._began_ns is None else self._began_ns
        self._samples.append(sample)
        while self._samples[0].at_ns < sample.at_ns - WINDOW_NS:
            self._samples.popleft()
        while self._slow_samples[0].at_ns < sample.at_ns - LATELY_NS:
            self._slow_samples.popleft()
        self._node = Node(time(), self._began_ns, tuple(self._samples), tuple(self._slow_samples), dict(self._down))

    def _take_sample(self) -> NodeSample:
        counts: dict[str, Counts] = {}
        for reader in self._readers:
            try:
                counts |= reader.counts()
            except OSError as error:
                self._fails(reader.name, error)
            else:
                self._down.pop(reader.name, None)
        at = self._now_ns()
        try:
            cpu, memory = host.cpu(), host.memory()
        except (OSError, ValueError):
            cpu, memory = None, host.Memory(None, None)  # its own collector reports this
        with self._lock:
            moved = parts(self._aggregate.jobs.values())
        return NodeSample(at, counts, cpu, memory, host.pressure(), moved)

    def _take_slow_sample(self, now_ns: int) -> SlowSample:
        nics: list[Nic] = []
        events: dict[str, dict[str, int]] = {}
        for reader in self._readers:
            found = list(_most(reader.nics()))
            nics += found
            events |= {nic.name: reader.events(nic) for nic in found}
        try:
            counts = {name: counts for reader in self._readers for name, counts in reader.counts().items()}
        except OSError:
            counts = {}
        return SlowSample(now_ns, tuple(nics), counts, events, tuple(pci.gpus(self._sys)), pci.numa_nodes(self._sys))

    def _fails(self, name: str, error: OSError) -> None:
        if name not in self._down:
            log.warning("collector %s is down: %s", name, error)
        self._down[name] = str(error)

    # -- answers ------------------------------------------------------------------------------

    def counters(self) -> list[NodeCounter]:
        """Return the traffic of the network devices; empty if the latest sample is old."""
        node = self._node
        if node is None or self._now_ns() - node.samples[-1].at_ns > _OLD_NS:
            return []
        return counters(node)

    def view(self, job: str | None = None) -> HostView:
        """Return the node as of the latest sample.

        Args:
            job: the job whose groups are included; by default all.
        """
        return answer(self._node, job)

    def readings(self) -> list[tuple[str, list[Reading] | None]]:
        """Return readings for ``/metrics`` by collector; ``None`` for one that failed, or that a driver blocks."""
        node = self._node
        if node is None:
            return []
        if self._now_ns() - node.samples[-1].at_ns > _STUCK_NS:
            return [(name, None) for name in (Network.name, Infiniband.name)]
        ports = [nic for nic in node.nics if nic.kind in _RDMA]
        others = [nic for nic in node.nics if nic.kind not in _RDMA]
        return [
            (name, None if name in node.down else [reading for nic in nics for reading in _readings(nic, node)])
            for name, nics in ((Network.name, others), (Infiniband.name, ports))
        ]


_RDMA = ("infiniband", "roce", "rdma")


def _most(nics: Iterable[Nic]) -> Iterator[Nic]:
    """Yield all devices but the virtual ones after the first ``MOST_VIRTUAL``."""
    virtual = 0
    for nic in nics:
        virtual += nic.kind == "virtual"
        if nic.kind != "virtual" or virtual <= MOST_VIRTUAL:
            yield nic


def _readings(nic: Nic, node: Node) -> Iterator[Reading]:
    """Yield readings of one device; none of a network device that has never moved a byte."""
    counts = node.counts[nic.name]
    if nic.kind not in _RDMA and not (counts.received.bytes or counts.sent.bytes):
        return
    for way, traffic in zip(_WAYS, counts, strict=True):
        for kind, value in zip(_KINDS_OF_COUNTS, traffic, strict=True):
            if value is not None:
                yield Reading(f"network_{kind}_total", (nic.name, way), value)
    if nic.speed is not None:
        yield Reading("network_speed_bytes_per_second", (nic.name,), nic.speed)
    if nic.up is not None:
        yield Reading("network_up", (nic.name,), float(nic.up))
    for event, value in node.events.get(nic.name, {}).items():
        if event == LINK_DOWNED:
            yield Reading("network_link_downs_total", (nic.name,), value)
        else:
            yield Reading("infiniband_events_total", (nic.name, event), value)
    function = nic.function
    numa = "" if function is None or function.numa_node is None else str(function.numa_node)
    address = "" if function is None else function.address
    about = (nic.name, nic.kind, nic.netdev or "", address, numa, of_device(nic.kind, nic.speed) or "")
    yield Reading("network_info", about, 1)
