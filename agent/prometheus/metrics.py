"""Defines all metrics of commwatch: name, type, help text and labels."""

from __future__ import annotations

from typing import NamedTuple


class Spec(NamedTuple):
    """Name, type, help text and label names of one metric."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()


_GPU = ("gpu",)
GPU_METRICS = (
    Spec("commwatch_gpu_utilization_ratio", "gauge", "Share of the last moments in which any kernel ran.", _GPU),
    Spec("commwatch_gpu_memory_utilization_ratio", "gauge", "Share of them in which memory was read or written.", _GPU),
    Spec("commwatch_gpu_memory_used_bytes", "gauge", "Memory in use.", _GPU),
    Spec("commwatch_gpu_memory_total_bytes", "gauge", "Memory there is.", _GPU),
    Spec("commwatch_gpu_power_watts", "gauge", "Power drawn.", _GPU),
    Spec("commwatch_gpu_power_limit_watts", "gauge", "Power the card is allowed.", _GPU),
    Spec("commwatch_gpu_energy_joules_total", "counter", "Energy taken since the driver was loaded.", _GPU),
    Spec("commwatch_gpu_temperature_celsius", "gauge", "Temperature of the chip.", _GPU),
    Spec("commwatch_gpu_clock_hertz", "gauge", "Clock of the multiprocessors and of the memory.", (*_GPU, "clock")),
    Spec(
        "commwatch_gpu_throttled", "gauge", "1 while the card keeps its clock down for this reason.", (*_GPU, "reason")
    ),
    Spec("commwatch_gpu_pcie_bytes_total", "counter", "Bytes over PCIe, as the card sees it.", (*_GPU, "direction")),
    Spec(
        "commwatch_gpu_pcie_bytes_per_second",
        "gauge",
        "The same during a look of 20 ms every ten seconds, where the card does not count.",
        (*_GPU, "direction"),
    ),
    Spec("commwatch_gpu_pcie_replays_total", "counter", "Packets sent again over PCIe.", _GPU),
    Spec("commwatch_gpu_nvlink_bytes_total", "counter", "Payload over all NVLinks of the card.", (*_GPU, "direction")),
    Spec("commwatch_gpu_nvlink_errors_total", "counter", "Errors of all NVLinks of the card.", (*_GPU, "type")),
    Spec("commwatch_gpu_ecc_errors_total", "counter", "Memory errors since the driver was loaded.", (*_GPU, "type")),
    Spec("commwatch_gpu_xid_errors_total", "counter", "Xids seen since the agent began.", (*_GPU, "xid")),
    Spec("commwatch_gpu_up", "gauge", "0 for a card that was there and does not answer any more.", _GPU),
    Spec(
        "commwatch_gpu_info",
        "gauge",
        "Always 1; which card it is.",
        (*_GPU, "uuid", "bus_id", "name", "vendor", "driver_version"),
    ),
)
_OPS = ("job_id", "rank", "group", "op")
_RANK_GROUP = ("job_id", "rank", "group")
_RANK = ("job_id", "rank")
_INSPECTOR = ("job_id", "rank", "group", "op", "timing")
_DIRECTION = ("device", "direction")
_GROUP_ID = ("job_id", "rank", "group", "group_id")

METRICS = {
    spec.name.removeprefix("commwatch_"): spec
    for spec in (
        Spec(
            "commwatch_collectives_total",
            "counter",
            "Operations that ended without an error; while a probe only counts, that were launched.",
            _OPS,
        ),
        Spec("commwatch_collective_bytes_total", "counter", "Their size S, as nccl-tests counts it.", _OPS),
        Spec(
            "commwatch_collective_bus_bytes_total",
            "counter",
            "S times the bus factor, of the operations whose duration is known; absent where there is no bus bandwidth.",
            _OPS,
        ),
        Spec(
            "commwatch_collective_seconds_total",
            "counter",
            "Union of the operations' intervals, waiting for late ranks included.",
            _OPS,
        ),
        Spec(
            "commwatch_collective_duration_seconds",
            "histogram",
            "Duration of single operations, from start to end on one rank.",
            ("job_id", "group", "op"),
        ),
        Spec("commwatch_collective_size_bytes", "histogram", "Size S of single operations.", ("job_id", "group", "op")),
        Spec(
            "commwatch_collective_wait_seconds_total",
            "counter",
            "Time this rank spent in collectives waiting for late ranks.",
            _RANK_GROUP,
        ),
        Spec(
            "commwatch_rank_lateness_seconds_total",
            "counter",
            "Time the others (their median) spent waiting for this rank.",
            _RANK_GROUP,
        ),
        Spec(
            "commwatch_p2p_wait_seconds_total",
            "counter",
            "Time a thread of this rank stood in a wait for a send or recv.",
            _RANK_GROUP,
        ),
        Spec(
            "commwatch_pipeline_wait_seconds_total",
            "counter",
            "That time by direction: forward is receiving from the stage before and sending to the next.",
            ("job_id", "rank", "group", "direction"),
        ),
        Spec(
            "commwatch_collective_efficiency_ratio",
            "gauge",
            "Expected over measured transfer time, of the last minute; against a link, or the job's own best.",
            ("job_id", "group", "op", "reference"),
        ),
        Spec(
            "commwatch_symmetric_collectives_total",
            "counter",
            "Symmetric operations whose durations compare with those of the group's other ranks.",
            _GROUP_ID,
        ),
        Spec("commwatch_symmetric_collective_seconds_total", "counter", "Their durations.", _GROUP_ID),
        Spec("commwatch_collective_in_flight_seconds", "gauge", "Age of the oldest operation in flight.", _GROUP_ID),
        Spec("commwatch_collective_last_seq", "gauge", "Sequence number of the latest finished collective.", _GROUP_ID),
        Spec("commwatch_steps_total", "counter", "Training steps, from one step mark to the next.", _RANK),
        Spec("commwatch_step_seconds_total", "counter", "Their duration.", _RANK),
        Spec(
            "commwatch_step_comm_seconds_total",
            "counter",
            "Communication time in them: union of this rank's operations.",
            _RANK,
        ),
        Spec(
            "commwatch_step_exposed_comm_seconds_total",
            "counter",
            "The part of it in which this rank's compute stood still; absent where not known.",
            _RANK,
        ),
        Spec(
            "commwatch_step_group_comm_seconds_total",
            "counter",
            "The part of it in which operations of one group ran.",
            _RANK_GROUP,
        ),
        Spec(
            "commwatch_step_p2p_wait_seconds_total",
            "counter",
            "The part of it in which a thread stood waiting for a send or recv: a pipeline's bubble.",
            _RANK,
        ),
        Spec(
            "commwatch_long_steps_total", "counter", "Steps that took over three times as long as those before.", _RANK
        ),
        Spec(
            "commwatch_periods_total",
            "counter",
            "Periods whose communication is known: steps added up to at least 250 ms, or seconds where none are marked.",
            _RANK,
        ),
        Spec("commwatch_period_seconds_total", "counter", "Their duration.", _RANK),
        Spec("commwatch_period_comm_seconds_total", "counter", "Communication time in them.", _RANK),
        Spec(
            "commwatch_period_comm_square_seconds_total",
            "counter",
            "Sum of the squares of the communication time of each, in square seconds: for its spread.",
            _RANK,
        ),
        Spec(
            "commwatch_comm_share_ratio",
            "gauge",
            "Communication time over step time, steps of the last 60 s (at least 5) but for the long ones.",
            _RANK,
        ),
        Spec(
            "commwatch_exposed_comm_share_ratio",
            "gauge",
            "Exposed communication time over step time, of the same steps.",
            _RANK,
        ),
        Spec(
            "commwatch_verdict_seconds",
            "gauge",
            "For how long a verdict has stood: what is wrong now, one series per culprit; of a straggler, the time judged.",
            ("job_id", "group", "group_id", "kind", "rank"),
        ),
        Spec(
            "commwatch_straggler_wait_ratio",
            "gauge",
            "Share of the time that the other ranks wait for a straggler; absent while there is none.",
            ("job_id", "group", "group_id", "rank"),
        ),
        Spec(
            "commwatch_rank_up",
            "gauge",
            "1 while the rank's process lives, 0 once it was lost; absent once it has ended properly.",
            _RANK,
        ),
        *GPU_METRICS,
        Spec("commwatch_network_bytes_total", "counter", "Bytes a network device or RDMA port has moved.", _DIRECTION),
        Spec("commwatch_network_packets_total", "counter", "Packets it has moved.", _DIRECTION),
        Spec("commwatch_network_errors_total", "counter", "Packets with errors.", _DIRECTION),
        Spec("commwatch_network_drops_total", "counter", "Packets without errors that it has dropped.", _DIRECTION),
        Spec(
            "commwatch_network_speed_bytes_per_second",
            "gauge",
            "What its link carries a direction, line code taken off; absent where not known.",
            ("device",),
        ),
        Spec("commwatch_network_up", "gauge", "1 if its link is up.", ("device",)),
        Spec("commwatch_network_link_downs_total", "counter", "How often its link was lost.", ("device",)),
        Spec(
            "commwatch_infiniband_events_total",
            "counter",
            "Errors, congestion and retransmissions of an RDMA port, as its driver counts them.",
            ("device", "event"),
        ),
        Spec(
            "commwatch_network_info",
            "gauge",
            "Always 1; what a device is: its network device, place, and link of the catalogue.",
            ("device", "kind", "netdev", "pci", "numa_node", "link"),
        ),
        Spec("commwatch_host_cpu_seconds_total", "counter", "Time of all cores by mode.", ("mode",)),
        Spec("commwatch_host_memory_total_bytes", "gauge", "Memory of the node."),
        Spec("commwatch_host_memory_available_bytes", "gauge", "What programs could still have of it."),
        Spec(
            "commwatch_host_pressure_seconds_total",
            "counter",
            "Time in which some task stood still for want of a resource.",
            ("resource",),
        ),
        Spec(
            "commwatch_nccl_messages_total",
            "counter",
            "Warnings in the NCCL logs of a job, and time-outs of PyTorch's watchdog.",
            ("job_id", "class"),
        ),
        Spec(
            "commwatch_nccl_channels",
            "gauge",
            "Channel connections that the ranks of this node have made, from NCCL's INFO log.",
            ("job_id", "group", "transport"),
        ),
        Spec(
            "commwatch_nccl_finding",
            "gauge",
            "Always 1; what the NCCL logs of a job show to be wrong or slow.",
            ("job_id", "finding", "severity"),
        ),
        Spec(
            "commwatch_inspector_collectives_total",
            "counter",
            "Operations that NCCL Inspector has timed: by default only on the GPU, from 8 KiB on.",
            _INSPECTOR,
        ),
        Spec("commwatch_inspector_collective_seconds_total", "counter", "Their durations, by its clock.", _INSPECTOR),
        Spec(
            "commwatch_inspector_collective_bus_bytes_total",
            "counter",
            "Their S times the bus factor; absent where there is no bus bandwidth.",
            _INSPECTOR,
        ),
        Spec("commwatch_job_info", "gauge", "Always 1; one per job in sight.", ("job_id", "world_size", "restart")),
        Spec(
            "commwatch_rank_info",
            "gauge",
            "Always 1; where a rank runs.",
            ("job_id", "rank", "gpu", "local_rank", "hook"),
        ),
        Spec(
            "commwatch_group_info",
            "gauge",
            "Always 1; a process group a rank has used.",
            ("job_id", "rank", "group", "group_id", "group_size"),
        ),
        Spec("commwatch_build_info", "gauge", "Always 1; the version of the agent.", ("version",)),
        Spec("commwatch_events_total", "counter", "Records read from the rings.", ("job_id",)),
        Spec(
            "commwatch_events_dropped_total",
            "counter",
            "Records lost: overwritten before they were read, torn, or given up by a faulty probe.",
            ("job_id",),
        ),
        Spec(
            "commwatch_probe_seconds_total",
            "counter",
            "CPU time of the trainer that the probe has used, estimated from a sample of operations.",
            _RANK,
        ),
        Spec(
            "commwatch_probe_recorded_ratio",
            "gauge",
            "Part of its operations that a rank records one by one; the rest are counted, for the probe is above its budget.",
            _RANK,
        ),
        Spec(
            "commwatch_series_dropped_total",
            "counter",
            "Groups counted under the label 'other', or without series by group_id, because a job has too many.",
        ),
        Spec(
            "commwatch_history_damaged_chunks_total",
            "counter",
            "Pieces of the history (chunks of raw records, rows, ends of its log) that were found damaged, and passed over.",
        ),
        Spec(
            "commwatch_notifications_total",
            "counter",
            "Alerts by what came of telling a receiver of them, each time it is told.",
            ("receiver", "result"),
        ),
        Spec(
            "commwatch_notifications_waiting",
            "gauge",
            "Alerts whose latest state a receiver has not been told.",
            ("receiver",),
        ),
        Spec(
            "commwatch_alerts",
            "gauge",
            "Alerts that the agent itself has raised, by state: pending or firing.",
            ("alertname", "severity", "state"),
        ),
        Spec("commwatch_alert_evaluation_seconds_total", "counter", "Time that evaluating the rules has taken."),
        Spec("commwatch_alert_evaluation_failures_total", "counter", "Rules that could not be evaluated in a round."),
        Spec("commwatch_collector_up", "gauge", "1 if the collector worked last time.", ("collector",)),
    )
}
