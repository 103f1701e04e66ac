"""The dashboard *Cluster*: all jobs and nodes, and where to look first."""

from __future__ import annotations

from typing import Any

from commwatch_dashboards.common import (
    ALERT_NAMES,
    CLUSTER,
    COMM_SHARE,
    LATELY,
    OVER_TIME,
    THRESHOLD,
    Panel,
    Query,
    cells,
    dashboard,
    lines,
    number,
)

_EXPOSED = f"max by (job_id, rank) (rate(commwatch_step_exposed_comm_seconds_total[{OVER_TIME}]))"
_BUSY = f"max by (job_id, group, op) (rate(commwatch_collective_seconds_total[{LATELY}])) > {THRESHOLD['op_share']}"
#: Leaves only ranks that run now: the counters of ranks that have ended remain while the job runs.
_ALIVE = "and on (instance, job_id, rank) commwatch_rank_info"
_AND_BUSY = f"and on (job_id, group, op) ({_BUSY})"
#: Whether Prometheus reaches an agent: other targets may have the same ``instance``.
_AGENTS = (
    "max by (instance) (up and on (job, instance) group by (job, instance) (last_over_time(commwatch_build_info[1h])))"
)


def build() -> dict[str, Any]:
    """Return the dashboard as Grafana's JSON."""
    return dashboard(
        CLUSTER,
        "Communication of all training jobs whose agents this Prometheus scrapes.",
        [],
        [
            ("Now", _now()),
            ("Jobs", _jobs()),
            ("Operations, nodes", [_worst(), _nodes()]),
            ("Alerts", _alerts()),
        ],
        alerts=f'alertname=~"{ALERT_NAMES}"',
    )


def _now() -> list[Panel]:
    return [
        number(
            "Jobs running",
            "Jobs with at least one live rank.",
            "short",
            "count(count by (job_id) (commwatch_rank_info))",
            nothing="none",
        ),
        number(
            "Ranks alive",
            "Live ranks; this is the number of GPUs in use if each rank has one GPU.",
            "short",
            "count(count by (job_id, rank) (commwatch_rank_info))",
            nothing="none",
        ),
        number(
            "Highest communication share",
            "Communication share of the job with the highest share, as the mean of its ranks. From 30% on, "
            "communication deserves attention, unless compute hides it.",
            "percentunit",
            "max(avg by (job_id) (commwatch_comm_share_ratio))",
            marks=COMM_SHARE,
        ),
        number(
            "GPU-hours lost",
            "Hours that ranks waited for communication within the time range shown: exposed communication of all "
            "steps, summed over ranks. These are GPU-hours if each rank has a GPU. Jobs with unknown exposed time are "
            "not included.",
            "h",
            "sum(max by (job_id, rank, instance, source) (increase(commwatch_step_exposed_comm_seconds_total[$__range])))"
            " / 3600",
        ),
        number(
            "Alerts firing",
            "Alerts from the list that are firing in Prometheus. Requires the rules of `commwatch alerts export`; "
            "without them, the panel is always empty.",
            "short",
            f'count(ALERTS{{alertstate="firing", alertname=~"{ALERT_NAMES}"}})',
            marks=(1,),
            nothing="none",
        ),
        number(
            "Agents down",
            "Agents that Prometheus reached within the last hour, but does not reach now.",
            "short",
            f"sum(1 - ({_AGENTS}))",
            marks=(1,),
        ),
    ]


def _jobs() -> list[Panel]:
    return [
        cells(
            "Jobs",
            "Jobs with live ranks. Shares are means over the ranks, for the steps of the last minute. An empty cell "
            "means that the value is not known. *Fault duration* is the age of the oldest hang, stall, desync or "
            "corruption. Click a job to open its dashboard.",
            {"job_id": "Job"},
            Query("avg by (job_id) (commwatch_comm_share_ratio)", "Communication", "percentunit"),
            Query("avg by (job_id) (commwatch_exposed_comm_share_ratio)", "Exposed", "percentunit"),
            Query("count by (job_id) (count by (job_id, rank) (commwatch_rank_info))", "Ranks", "short"),
            Query("count by (job_id) (count by (job_id, instance) (commwatch_rank_info))", "Agents", "short"),
            Query(
                f"avg by (job_id) (max by (job_id, rank) (rate(commwatch_steps_total[{LATELY}]) {_ALIVE}))",
                "Steps per second",
                "suffix: steps/s",
            ),
            Query('max by (job_id) (commwatch_verdict_seconds{kind!="straggler"})', "Fault duration", "s"),
            sort="Communication",
        ),
        lines(
            "Communication share",
            "Communication time divided by step time, mean of a job's ranks, for the steps of the last minute. Above "
            "the line at 30%, communication deserves attention; above 50%, half of the machine is lost, unless "
            "compute hides the communication.",
            "percentunit",
            Query("avg by (job_id) (commwatch_comm_share_ratio)", "{{job_id}}"),
            marks=COMM_SHARE,
            most=1,
        ),
        lines(
            "Exposed share",
            "Share of the step time in which compute waited for communication. Without this wait, steps would "
            "be shorter by this share. On CPU, the value is an upper bound. It is absent if it is not known.",
            "percentunit",
            Query("avg by (job_id) (commwatch_exposed_comm_share_ratio)", "{{job_id}}"),
            marks=(THRESHOLD["exposed_share"],),
            most=1,
        ),
        lines(
            "GPUs lost to exposed communication",
            "Mean number of ranks that waited for communication: exposed seconds per second, summed over the ranks of "
            "a job. A value of 1 for an hour is one GPU-hour.",
            "suffix: GPUs",
            Query(f"sum by (job_id) ({_EXPOSED})", "{{job_id}}"),
        ),
        lines(
            "What is wrong",
            "How long a hang, stall, desync or corruption has lasted; for a straggler, the length of the time judged. Empty "
            "if nothing is wrong.",
            "s",
            Query("max by (job_id, kind) (commwatch_verdict_seconds)", "{{job_id}} {{kind}}"),
        ),
    ]


def _worst() -> Panel:
    bandwidth = (
        f"sum by (job_id, group, op) (rate(commwatch_collective_bus_bytes_total[{LATELY}]))"
        f" / (sum by (job_id, group, op) (rate(commwatch_collective_seconds_total[{LATELY}])) > 0)"
    )
    best = "min by (job_id, group, op) (commwatch_collective_efficiency_ratio"
    return cells(
        "Worst groups",
        "Operations that take more than 5% of a rank's time, the least efficient first. Efficiency is expected "
        "divided by measured transfer time, by a measured or rated link, and by the job's own fastest operations. Bus "
        "bandwidth includes the wait for late ranks.",
        {"job_id": "Job", "group": "Group", "op": "Operation"},
        Query(_BUSY, "Share of time", "percentunit"),
        Query(f"{bandwidth} {_AND_BUSY}", "Bus bandwidth", "Bps"),
        Query(f'{best}{{reference!="own_best"}}) {_AND_BUSY}', "Efficiency", "percentunit"),
        Query(f'{best}{{reference="own_best"}}) {_AND_BUSY}', "Efficiency vs. own best", "percentunit"),
        width=14,
        sort="-Efficiency",
    )


def _nodes() -> Panel:
    used = (
        f"max by (instance) (max by (instance, device) (rate(commwatch_network_bytes_total[{LATELY}]))"
        " / on (instance, device) max by (instance, device) (commwatch_network_speed_bytes_per_second))"
    )
    return cells(
        "Nodes",
        "Nodes with an agent. Click a node to open its dashboard.",
        {"instance": "Node"},
        Query(_AGENTS, "Up", "bool_yes_no"),
        Query("count by (instance) (commwatch_rank_info)", "Ranks", "short"),
        Query("avg by (instance) (commwatch_gpu_utilization_ratio)", "GPU use", "percentunit"),
        Query(used, "Busiest NIC", "percentunit"),
        width=10,
        sort="-Up",
    )


def _alerts() -> list[Panel]:
    firing = (
        f'max by (alertname, severity, job_id, instance) (ALERTS{{alertstate="firing", alertname=~"{ALERT_NAMES}"}})'
    )
    return [
        cells(
            "Firing in Prometheus",
            "Alerts from the list that are firing, if Prometheus has the rules of `commwatch alerts export`. The runbook "
            "(link above) explains each alert.",
            {"alertname": "Alert", "severity": "Severity", "job_id": "Job", "instance": "Node"},
            Query(firing, "Firing", "short"),
            width=12,
        ),
        cells(
            "Raised by agents",
            "Number of alerts that agents have raised themselves, without Prometheus. Some alerts of the list need "
            "Prometheus.",
            {"alertname": "Alert", "severity": "Severity", "state": "State", "instance": "Node"},
            Query("sum by (alertname, severity, state, instance) (commwatch_alerts)", "Number", "short"),
            width=12,
        ),
        lines(
            "Alerts over time",
            "Number of firing alerts of the list, by severity.",
            "short",
            Query(f'count by (severity) (ALERTS{{alertstate="firing", alertname=~"{ALERT_NAMES}"}})', "{{severity}}"),
        ),
        lines(
            "Records lost",
            "Records per second that were overwritten before an agent read them, torn, or given up. If a job loses "
            "records, its values cover only part of its operations.",
            "eps",
            Query("sum by (job_id) (rate(commwatch_events_dropped_total[$__rate_interval]))", "{{job_id}}"),
        ),
    ]
