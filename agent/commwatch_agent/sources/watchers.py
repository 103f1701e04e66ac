"""All that one agent watches beside the rings: NCCL's logs, Inspector and RAS, GPUs, the node, the trainers' processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from socket import gethostname

from commwatch.wire.addresses import hosts_and_ports
from commwatch_agent.config import Config
from commwatch_agent.incidents.incident import Incident
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.processes import Processes
from commwatch_agent.model.node_counters import CounterSample
from commwatch_agent.reference.references import directory
from commwatch_agent.runtime.periodic import PeriodicThread
from commwatch_agent.sources.activities import Activities
from commwatch_agent.sources.connections import Connections
from commwatch_agent.sources.gpus import Gpus, note_link
from commwatch_agent.sources.host import HostWatch
from commwatch_agent.sources.inspector import Inspector
from commwatch_agent.sources.nccl import NcclLogs
from commwatch_agent.sources.nccl_archive import keep
from commwatch_agent.sources.ras import Ras
from commwatch_collectors.registry import Collectors, Reading

#: Seconds between two ticks of: NCCL logs and Inspector's files, NCCL's RAS, GPUs, node, the trainers' state and activity.
_LOGS_S, _RAS_S, GPUS_S, _HOST_S, _PROCESSES_S = 0.5, 1.0, 1.0, 1.0, 1.0
#: By which part of them the pauses between looks at connections differ.
_UNEVEN = 0.3
#: Seconds between two samples of the history: 26 values (8 GPUs, 9 network devices) take 1 kB.
_SAMPLES_S = 5.0


class Watchers:
    """The watchers of one agent, each with a thread.

    Args:
        lock: guards ``aggregate``.
        stop: set when the agent ends.
        jobs: set while there are jobs, and when the agent ends.
        incidents: returns those in memory.
    """

    def __init__(
        self,
        config: Config,
        aggregate: JobTable,
        lock: threading.RLock,
        stop: threading.Event,
        jobs: threading.Event,
        *,
        incidents: Callable[[], Iterable[Incident]] = tuple,
    ) -> None:
        self.nccl = NcclLogs(config.dir, aggregate, lock, keep=partial(keep, config.history))
        self.inspector = Inspector(config.inspector_dir, aggregate, lock)
        self.ras = Ras(hosts_and_ports(config.ras) or () if config.ras else (), aggregate, lock)
        self.gpus = Gpus(config.gpus, seen=partial(note_link, directory(config.state), gethostname()))
        self.host = HostWatch(aggregate, lock, time.monotonic_ns)
        self._collectors = Collectors()
        self._aggregate, self._lock, self._sampled_s = aggregate, lock, -_SAMPLES_S
        activities = Activities(aggregate, lock, incidents=incidents, gpu_busy=self.gpus.busy)
        processes = Processes(aggregate, lock, held_back=self.gpus.held_back)
        self.threads = [
            PeriodicThread("nccl_log", self.nccl.tick, _LOGS_S, stop, self.nccl.close, jobs=jobs),
            PeriodicThread("inspector", self.inspector.tick, _LOGS_S, stop, self.inspector.close, jobs=jobs),
            PeriodicThread("ras", self.ras.tick, _RAS_S, stop),
            PeriodicThread("network", self.host.tick, _HOST_S, stop, jobs=jobs),
            PeriodicThread("processes", processes.tick, _PROCESSES_S, stop, jobs=jobs),
            PeriodicThread("activities", activities.tick, _PROCESSES_S, stop, jobs=jobs),
            PeriodicThread(
                "connections", Connections(aggregate, lock).tick, _PROCESSES_S, stop, uneven=_UNEVEN, jobs=jobs
            ),
        ]
        #: Not among ``threads``, because a GPU driver that hangs must not delay the end of the agent.
        self.gpu_thread = PeriodicThread("gpu", self.gpus.tick, GPUS_S, stop, self.gpus.close)

    def readings(self) -> list[tuple[str, list[Reading] | None]]:
        """Return the readings of collectors and watchers by collector; ``None``: it failed."""
        return [
            *self._collectors.collect(),
            *self.host.readings(),
            *self.gpus.readings(),
            *self.nccl.readings(),
            *self.ras.readings(),
        ]

    def sample(self, now_s: float, wall_ns: int) -> CounterSample | None:
        """Return measurements of GPUs and network devices for the history; ``None``: it is not time yet, or no rank runs.

        Args:
            now_s: monotonic seconds.
            wall_ns: Unix time.
        """
        if now_s - self._sampled_s < _SAMPLES_S:
            return None
        self._sampled_s = now_s
        with self._lock:
            runs = any(totals.alive for job in self._aggregate.jobs.values() for totals in job.rank_totals.values())
        counters = [*self.gpus.counters(), *self.host.counters()] if runs else []
        return CounterSample(wall_ns, counters) if counters else None
