"""What the rules on metrics share: names of the metrics, and a condition made from labels and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from statistics import fmean

from commwatch_agent.incidents.incident import Condition, EvidenceItem
from commwatch_agent.incidents.metric_window import MetricWindow, Vector, by

#: Finds conditions in the last minutes of the metrics. It gets the thresholds of the table by name, and the Unix time in s.
MetricRule = Callable[[MetricWindow, Mapping[str, float], float], Iterator[Condition]]
#: Labels by which series are joined.
GPU, DEVICE = ("instance", "gpu"), ("instance", "device")
RANK, OPERATION = ("instance", "job_id", "rank"), ("instance", "job_id", "group", "op")


class Name(str, Enum):
    """The metrics that rules read."""

    BUS_BYTES = "commwatch_collective_bus_bytes_total"
    COLLECTIVE_S = "commwatch_collective_seconds_total"
    COLLECTOR_UP = "commwatch_collector_up"
    COMM_SHARE = "commwatch_comm_share_ratio"
    DROPPED = "commwatch_events_dropped_total"
    EFFICIENCY = "commwatch_collective_efficiency_ratio"
    EVENTS = "commwatch_events_total"
    EXPOSED_SHARE = "commwatch_exposed_comm_share_ratio"
    FINDING = "commwatch_nccl_finding"
    GPU_ECC = "commwatch_gpu_ecc_errors_total"
    GPU_THROTTLED = "commwatch_gpu_throttled"
    GPU_UP = "commwatch_gpu_up"
    GPU_UTILIZATION = "commwatch_gpu_utilization_ratio"
    GPU_XID = "commwatch_gpu_xid_errors_total"
    JOB_INFO = "commwatch_job_info"
    LINK_DOWNS = "commwatch_network_link_downs_total"
    NETWORK_BYTES = "commwatch_network_bytes_total"
    NETWORK_ERRORS = "commwatch_network_errors_total"
    NETWORK_INFO = "commwatch_network_info"
    NETWORK_SPEED = "commwatch_network_speed_bytes_per_second"
    RANK_INFO = "commwatch_rank_info"
    RDMA_EVENTS = "commwatch_infiniband_events_total"
    RECORDED = "commwatch_probe_recorded_ratio"
    STRAGGLER_WAIT = "commwatch_straggler_wait_ratio"
    WAIT_S = "commwatch_collective_wait_seconds_total"


def condition(
    kind: str,
    subject: tuple[str, ...],
    labels: Mapping[str, str],
    *,
    now_s: float,
    value: float,
    says: str,
    source: str,
    metric: Name,
    measured: str,
    variant: str = "",
    numbers: Mapping[str, float] | None = None,
    share: float | None = None,
    idle_ranks: float | None = None,
) -> Condition:
    """Return a condition that begins now; the life cycle keeps the first begin.

    Args:
        labels: of the alert; they name job, group, operation and node.
        source, metric, measured: of the evidence. ``measured`` has the figures; the data of evidence is equal as long as the condition
            holds, because an incident keeps each evidence once.
    """
    labels = {name: value for name, value in labels.items() if value}
    # The label is HOST:PORT.
    host = labels.get("instance", "").rpartition(":")
    return Condition(
        kind,
        subject,
        says,
        now_s,
        job_id=labels.get("job_id", ""),
        variant=variant,
        value=value,
        nodes=(host[0] or host[2],) if "instance" in labels else (),
        group=labels.get("group", ""),
        op=labels.get("op", ""),
        idle_ranks=idle_ranks,
        share=share,
        labels=labels,
        numbers=numbers or {},
        evidence=(EvidenceItem(source, now_s, measured, {"metric": metric.value, "variant": variant, **labels}),),
    )


def of_jobs(values: Vector, combined: Callable[[Sequence[float]], float]) -> dict[str, float]:
    """Combine the series of each job."""
    return {dict(labels).get("job_id", ""): value for labels, value in by(values, ["job_id"], combined).items()}


def shares(window: MetricWindow, name: Name) -> dict[str, float]:
    """Return a share by job: the mean of its ranks, which run in step."""
    return of_jobs(window.latest(name), fmean)
