"""The one list of metrics: every name of ours, what it means, its labels."""

from __future__ import annotations

from typing import NamedTuple


class Spec(NamedTuple):
    """What a metric is called, means and is labelled with."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()


_OPS = ("job_id", "rank", "group", "op")
_RANK_GROUP = ("job_id", "rank", "group")
_RANK = ("job_id", "rank")
_GROUP_ID = ("job_id", "rank", "group", "group_id")

METRICS = {
    spec.name.removeprefix("commwatch_"): spec
    for spec in (
        Spec("commwatch_collectives_total", "counter", "Operations that ended without an error.", _OPS),
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
            "Time this rank spent in symmetric operations waiting for the last rank to begin.",
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
        Spec("commwatch_network_bytes_total", "counter", "Bytes a network device has moved.", ("device", "direction")),
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
        Spec("commwatch_job_info", "gauge", "Always 1; one per job in sight.", ("job_id", "world_size", "restart")),
        Spec("commwatch_rank_info", "gauge", "Always 1; where a rank runs.", ("job_id", "rank", "local_rank", "hook")),
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
            "Time the probe has cost its trainer, from one call in 64.",
            _RANK,
        ),
        Spec(
            "commwatch_series_dropped_total",
            "counter",
            "Groups counted under the label 'other' because a job has too many.",
        ),
        Spec("commwatch_collector_up", "gauge", "1 if the collector worked last time.", ("collector",)),
    )
}
