"""Defines all metrics of commwatch."""

from __future__ import annotations

from commwatch_agent.prometheus.node_metrics import NODE_METRICS
from commwatch_agent.prometheus.spec import Spec

_OPS = ("job_id", "rank", "group", "op")
_RANK_GROUP = ("job_id", "rank", "group")
_RANK = ("job_id", "rank")
_RANK_SOURCE = (*_RANK, "source")
_GROUP_ID = ("job_id", "rank", "group", "group_id")
#: Labels of ``commwatch_job_info`` that the setting ``job_info`` chooses, and that labels of one's own may replace.
NAMED = ("user", "script", "node")
_CHOICE = (*_RANK, "algorithm", "protocol")

METRICS = {
    spec.name.removeprefix("commwatch_"): spec
    for spec in (
        Spec(
            "commwatch_collectives_total",
            "counter",
            "Total number of operations that ended without an error, or, while the probe only counts, that were launched.",
            _OPS,
        ),
        Spec(
            "commwatch_collective_bytes_total",
            "counter",
            "Total size S of the operations as counted by nccl-tests, in bytes.",
            _OPS,
        ),
        Spec(
            "commwatch_collective_bus_bytes_total",
            "counter",
            "Total size S times the bus factor of operations with a known duration, in bytes; absent where there is no bus bandwidth.",
            _OPS,
        ),
        Spec(
            "commwatch_collective_seconds_total",
            "counter",
            "Total time in which at least one of the operations was running, including the wait for late ranks, in seconds.",
            _OPS,
        ),
        Spec(
            "commwatch_collective_duration_seconds",
            "histogram",
            "Duration of single operations from start to end on one rank, in seconds.",
            ("job_id", "group", "op"),
        ),
        Spec(
            "commwatch_collective_size_bytes",
            "histogram",
            "Size S of single operations, in bytes.",
            ("job_id", "group", "op"),
        ),
        Spec(
            "commwatch_collective_wait_seconds_total",
            "counter",
            "Total time this rank spent in collectives waiting for late ranks, in seconds.",
            _RANK_GROUP,
        ),
        Spec(
            "commwatch_rank_lateness_seconds_total",
            "counter",
            "Total time the other ranks (their median) spent waiting for this rank, in seconds.",
            _RANK_GROUP,
        ),
        Spec(
            "commwatch_p2p_wait_seconds_total",
            "counter",
            "Total time a thread of this rank spent waiting for a send or recv, in seconds.",
            _RANK_GROUP,
        ),
        Spec(
            "commwatch_pipeline_wait_seconds_total",
            "counter",
            "Total time a thread of this rank waited for messages by direction (forward: receive from the previous stage, send to the next), in seconds.",
            ("job_id", "rank", "group", "direction"),
        ),
        Spec(
            "commwatch_collective_efficiency_ratio",
            "gauge",
            "Ratio of expected to measured transfer time over the last minute, against a link or the job's own best.",
            ("job_id", "group", "op", "reference"),
        ),
        Spec(
            "commwatch_symmetric_collectives_total",
            "counter",
            "Total number of symmetric operations whose durations are comparable with those of the group's other ranks.",
            _GROUP_ID,
        ),
        Spec(
            "commwatch_symmetric_collective_seconds_total",
            "counter",
            "Total duration of symmetric operations whose durations are comparable with those of the group's other ranks, in seconds.",
            _GROUP_ID,
        ),
        Spec(
            "commwatch_collective_in_flight_seconds",
            "gauge",
            "Age of the oldest operation in flight (0 if there is none), in seconds; on a GPU, since the GPU reached it; of sends and receives "
            "on the CPU, since a thread waits for it.",
            _GROUP_ID,
        ),
        Spec("commwatch_collective_last_seq", "gauge", "Sequence number of the latest finished collective.", _GROUP_ID),
        Spec(
            "commwatch_steps_total", "counter", "Total number of training steps, from one step mark to the next.", _RANK
        ),
        Spec(
            "commwatch_steps_info",
            "gauge",
            "What the steps of a rank are: marks (between calls of an optimizer or commwatch.step()), or iterations (turns of the cycle of its "
            "operations, because nothing marks steps); the value is always 1.",
            (*_RANK, "source"),
        ),
        Spec("commwatch_step_seconds_total", "counter", "Total duration of training steps, in seconds.", _RANK),
        Spec(
            "commwatch_step_comm_seconds_total",
            "counter",
            "Total communication time in training steps (the union of this rank's operations), in seconds.",
            _RANK,
        ),
        Spec(
            "commwatch_step_exposed_comm_seconds_total",
            "counter",
            "Total communication time in training steps during which this rank's compute waited, in seconds; absent if unknown.",
            _RANK_SOURCE,
        ),
        Spec(
            "commwatch_step_group_comm_seconds_total",
            "counter",
            "Total communication time in training steps during which operations of one group ran, in seconds.",
            _RANK_GROUP,
        ),
        Spec(
            "commwatch_step_p2p_wait_seconds_total",
            "counter",
            "Total communication time in training steps during which a thread waited for a send or recv (the bubble of a pipeline), in seconds.",
            _RANK,
        ),
        Spec(
            "commwatch_long_steps_total",
            "counter",
            "Total number of training steps that took over three times as long as the steps before them.",
            _RANK,
        ),
        Spec(
            "commwatch_periods_total",
            "counter",
            "Total number of periods with known communication time (steps added up to at least 250 ms, or seconds if steps are not marked).",
            _RANK,
        ),
        Spec(
            "commwatch_period_seconds_total",
            "counter",
            "Total duration of periods with known communication time, in seconds.",
            _RANK,
        ),
        Spec(
            "commwatch_period_comm_seconds_total", "counter", "Total communication time in periods, in seconds.", _RANK
        ),
        Spec(
            "commwatch_period_comm_square_seconds_total",
            "counter",
            "Sum of the squared communication times of periods, in square seconds.",
            _RANK,
        ),
        Spec(
            "commwatch_comm_share_ratio",
            "gauge",
            "Ratio of communication time to step time over the steps of the last 60 s (at least 5), excluding long steps.",
            _RANK,
        ),
        Spec(
            "commwatch_exposed_comm_share_ratio",
            "gauge",
            "Ratio of exposed communication time to step time over the steps of the last 60 s (at least 5), excluding long steps.",
            _RANK_SOURCE,
        ),
        Spec(
            "commwatch_verdict_seconds",
            "gauge",
            "Age of a current verdict with one series per culprit, or, for a straggler, the time over which it was judged, in seconds.",
            ("job_id", "group", "group_id", "kind", "rank"),
        ),
        Spec(
            "commwatch_replica_checks_total",
            "counter",
            "Total number of comparisons of replicated weights between the ranks of this node.",
            ("job_id",),
        ),
        Spec(
            "commwatch_collective_checks_total",
            "counter",
            "Total number of collectives whose data was compared between the ranks of this node.",
            ("job_id",),
        ),
        Spec(
            "commwatch_straggler_wait_ratio",
            "gauge",
            "Ratio of time that the other ranks spend waiting for a straggler; absent if there is none.",
            ("job_id", "group", "group_id", "rank"),
        ),
        Spec(
            "commwatch_rank_up",
            "gauge",
            "Whether the rank's process is alive (1 for yes, 0 if it was lost); absent after it has ended properly.",
            _RANK,
        ),
        *NODE_METRICS,
        Spec(
            "commwatch_nccl_messages_total",
            "counter",
            "Total number of warnings in the NCCL logs of a job and of time-outs of PyTorch's watchdog.",
            ("job_id", "class"),
        ),
        Spec(
            "commwatch_nccl_channels",
            "gauge",
            "Number of channel connections made by the ranks of this node, from NCCL's INFO log.",
            ("job_id", "group", "transport"),
        ),
        Spec(
            "commwatch_nccl_finding",
            "gauge",
            "A metric with a constant value of 1, labelled with a finding in the NCCL logs of a job.",
            ("job_id", "finding", "severity"),
        ),
        Spec(
            "commwatch_nccl_operations_total",
            "counter",
            "Total number of collectives that NCCL's profiler interface timed, by what NCCL chose for them.",
            _CHOICE,
        ),
        Spec(
            "commwatch_nccl_operation_seconds_total",
            "counter",
            "Total duration of the kernels of collectives that NCCL's profiler interface timed, in seconds.",
            _CHOICE,
        ),
        Spec(
            "commwatch_nccl_operation_bus_bytes_total",
            "counter",
            "Total size S times the bus factor of collectives that NCCL's profiler interface timed, in bytes; absent where there is no bus bandwidth.",
            _CHOICE,
        ),
        Spec(
            "commwatch_job_info",
            "gauge",
            "A metric with a constant value of 1 for each job known to the agent.",
            ("job_id", "world_size", "restart", *NAMED),
        ),
        Spec(
            "commwatch_rank_info",
            "gauge",
            "A metric with a constant value of 1, labelled with the GPU, local rank and hook of a rank.",
            ("job_id", "rank", "gpu", "local_rank", "hook"),
        ),
        Spec(
            "commwatch_group_info",
            "gauge",
            "A metric with a constant value of 1 for each process group that a rank has used.",
            ("job_id", "rank", "group", "group_id", "group_size"),
        ),
        Spec(
            "commwatch_build_info",
            "gauge",
            "A metric with a constant value of 1, labelled with the version of the agent.",
            ("version",),
        ),
        Spec("commwatch_events_total", "counter", "Total number of records read from the rings.", ("job_id",)),
        Spec(
            "commwatch_events_dropped_total",
            "counter",
            "Total number of records lost because they were overwritten before they were read, torn, or given up by a faulty probe.",
            ("job_id",),
        ),
        Spec(
            "commwatch_probe_seconds_total",
            "counter",
            "Total CPU time of the trainer used by the probe, estimated from a sample of operations, in seconds.",
            _RANK,
        ),
        Spec(
            "commwatch_probe_recorded_ratio",
            "gauge",
            "Ratio of a rank's operations that are recorded individually; while the probe is above its budget, the rest are only counted.",
            _RANK,
        ),
        Spec(
            "commwatch_series_dropped_total",
            "counter",
            "Total number of groups counted under the label 'other', or without series by group_id, because a job has too many.",
        ),
        Spec(
            "commwatch_memory_refused_total",
            "counter",
            "Total number of times that there was no room in memory for a name, a kind of operations or another entry of a rank's tables.",
        ),
        Spec(
            "commwatch_history_damaged_chunks_total",
            "counter",
            "Total number of damaged pieces of the history (chunks of raw records, rows, ends of its log) that were skipped.",
        ),
        Spec(
            "commwatch_notifications_total",
            "counter",
            "Total number of deliveries of alerts to a receiver, by result.",
            ("receiver", "result"),
        ),
        Spec(
            "commwatch_notifications_waiting",
            "gauge",
            "Number of alerts whose latest state has not been delivered to a receiver.",
            ("receiver",),
        ),
        Spec(
            "commwatch_alerts",
            "gauge",
            "Number of alerts raised by the agent itself, by state (pending or firing).",
            ("alertname", "severity", "state"),
        ),
        Spec(
            "commwatch_alert_evaluation_seconds_total",
            "counter",
            "Total time spent concluding what is wrong, in seconds.",
        ),
        Spec(
            "commwatch_incident_open",
            "gauge",
            "Number of open incidents, with one series per culprit (an empty rank if there is none).",
            ("job_id", "kind", "severity", "rank"),
        ),
        Spec(
            "commwatch_incidents_total",
            "counter",
            "Total number of incidents that have opened.",
            ("job_id", "kind"),
        ),
        Spec(
            "commwatch_incident_cost_seconds_total",
            "counter",
            "Total time that ranks have lost to incidents, in rank seconds.",
            ("job_id", "kind"),
        ),
        Spec(
            "commwatch_collector_up",
            "gauge",
            "Whether the last run of the collector succeeded (1 for yes, 0 for no).",
            ("collector",),
        ),
    )
}
