"""The dashboard *Job*: one job over all its ranks and nodes."""

from __future__ import annotations

from typing import Any

from commwatch_dashboards.common import (
    COMM_SHARE,
    JOB,
    LATELY,
    OVER_TIME,
    THRESHOLD,
    Panel,
    Query,
    cells,
    dashboard,
    lines,
    number,
    one_of,
    rank_map,
)

_JOB = 'job_id="$job_id"'
_GROUP = f'{_JOB}, group=~"$group"'
#: Leaves only ranks that run now: the counters of ranks that have ended remain while the job runs.
_ALIVE = f"and on (instance, rank) commwatch_rank_info{{{_JOB}}}"


def _rate(metric: str, matchers: str = _JOB, window: str = OVER_TIME) -> str:
    return f"rate(commwatch_{metric}{{{matchers}}}[{window}])"


def build() -> dict[str, Any]:
    """Return the dashboard as Grafana's JSON."""
    groups = one_of(
        "group",
        "Group",
        "Process groups, by description, or by name if there is no description.",
        f"label_values(commwatch_collectives_total{{{_JOB}}}, group)",
    )
    return dashboard(
        JOB,
        "One training job: how much of a step is communication, how fast it is, and which ranks wait for which.",
        [
            one_of("job_id", "Job", "The job to show.", "label_values(commwatch_job_info, job_id)"),
            groups.multi(True).include_all(True).all_value(".*"),
        ],
        [
            ("Now", _now()),
            ("Steps", [*_steps(), *_odd_steps()]),
            ("Operations", [*_speeds(), *_amounts()]),
            ("Who waits for whom", [*_rank_maps(), *_waits()]),
            ("What is wrong", _wrong()),
        ],
        alerts=_JOB,
    )


def _now() -> list[Panel]:
    return [
        number(
            "Communication share",
            "Communication time divided by step time, mean of the ranks, for the steps of the last minute. From 30% "
            "on, it deserves attention, unless compute hides it.",
            "percentunit",
            f"avg(commwatch_comm_share_ratio{{{_JOB}}})",
            marks=COMM_SHARE,
        ),
        number(
            "Exposed share",
            "Share of the step time in which compute waited for communication. On CPU, the value is an upper bound. It "
            "is absent if it is not known.",
            "percentunit",
            f"avg(commwatch_exposed_comm_share_ratio{{{_JOB}}})",
            marks=(THRESHOLD["exposed_share"],),
        ),
        number(
            "Step time now",
            "Mean duration of the steps of the last two minutes, over all ranks.",
            "s",
            _mean_step(LATELY),
        ),
        number(
            "GPU-hours lost",
            "Hours that ranks of the job waited for communication within the time range shown. These are GPU-hours if "
            "each rank has a GPU. Absent if the exposed time is not known.",
            "h",
            f"sum(max by (rank, instance, source) (increase(commwatch_step_exposed_comm_seconds_total{{{_JOB}}}[$__range]))) / 3600",
        ),
        number(
            "Ranks alive",
            "Ranks whose process is alive. Each agent reports the ranks of its node.",
            "short",
            f"sum(max by (rank) (commwatch_rank_up{{{_JOB}}}))",
        ),
        number(
            "Ranks that died",
            "Ranks whose process was killed or crashed.",
            "short",
            f"sum(1 - max by (rank) (commwatch_rank_up{{{_JOB}}}))",
            marks=(1,),
        ),
    ]


def _mean_step(window: str) -> str:
    return f"sum({_rate('step_seconds_total', window=window)}) / (sum({_rate('steps_total', window=window)}) > 0)"


def _steps() -> list[Panel]:
    known = f"{_rate('step_seconds_total')} and on (instance, rank) commwatch_step_comm_seconds_total{{{_JOB}}}"
    per_step = f"on () group_left () (sum({known}) > 0)"
    return [
        lines(
            "Steps per second",
            "Training steps per second, mean of the ranks.",
            "suffix: steps/s",
            Query(f"avg(max by (rank) ({_rate('steps_total')} {_ALIVE}))", "steps"),
        ),
        lines(
            "Step time",
            "Time from one step mark to the next: the mean of all ranks, and the slowest rank.",
            "s",
            Query(_mean_step(OVER_TIME), "mean"),
            Query(f"max({_rate('step_seconds_total')} / ({_rate('steps_total')} > 0))", "slowest rank"),
        ),
        lines(
            "Communication and exposed share",
            "Communication time divided by step time, and the share in which compute waited: means of the ranks for "
            "the steps of the last minute, without long steps. Above the line at 30%, communication deserves "
            "attention.",
            "percentunit",
            Query(f"avg(commwatch_comm_share_ratio{{{_JOB}}})", "communication"),
            Query(f"max(commwatch_comm_share_ratio{{{_JOB}}})", "communication, highest rank"),
            Query(f"avg(commwatch_exposed_comm_share_ratio{{{_JOB}}})", "exposed"),
            marks=COMM_SHARE,
            most=1,
        ),
        lines(
            "Share by group",
            "Share of the step time in which operations of a group ran. Groups that communicate at the same time "
            "overlap, so the sum may exceed the communication share.",
            "percentunit",
            Query(f"sum by (group) ({_rate('step_group_comm_seconds_total', _GROUP)}) / {per_step}", "{{group}}"),
        ),
    ]


def _odd_steps() -> list[Panel]:
    return [
        lines(
            "Pipeline bubble",
            "Share of the step time in which a thread of a rank waited for a send or recv, for the sixteen ranks that "
            "wait most. The messages themselves take part of this time.",
            "percentunit",
            Query(
                f"topk(16, max by (rank) ({_rate('step_p2p_wait_seconds_total')} / ({_rate('step_seconds_total')} > 0)))",
                "rank {{rank}}",
            ),
        ),
        lines(
            "Long steps",
            "Steps within the last interval that took over three times as long as the steps before them, such as a "
            "checkpoint; for the rank with the most.",
            "short",
            Query(f"max(increase(commwatch_long_steps_total{{{_JOB}}}[$__rate_interval]))", "long steps"),
        ),
    ]


def _speeds() -> list[Panel]:
    buckets = f"sum by (le, group, op) ({_rate('collective_duration_seconds_bucket', _GROUP)})"
    moved = f"sum by (group, op) ({_rate('collective_bus_bytes_total', _GROUP)})"
    took = f"sum by (group, op) ({_rate('collective_seconds_total', _GROUP)})"
    return [
        lines(
            "Bus bandwidth",
            "S times the bus factor of nccl-tests, divided by the time in operations: comparable with the rated speed "
            "of a link. The time includes the wait for late ranks.",
            "Bps",
            Query(f"{moved} / ({took} > 0)", "{{group}} {{op}}"),
        ),
        lines(
            "Duration, p99",
            "Duration that 99 of 100 operations stay below, including the wait for late ranks. The precision is that "
            "of the buckets, 10 µs to 10 s.",
            "s",
            Query(f"histogram_quantile(0.99, {buckets})", "{{group}} {{op}}"),
        ),
        lines(
            "Duration, median",
            "Duration that half of the operations stay below.",
            "s",
            Query(f"histogram_quantile(0.5, {buckets})", "{{group}} {{op}}"),
        ),
        lines(
            "Efficiency",
            "Expected divided by measured transfer time of the last minute, without the wait for late ranks; the "
            "lowest value of all nodes. The reference is a measured or rated link, or the job's own best, which does "
            "not show how good the link is.",
            "percentunit",
            Query(
                f"min by (group, op, reference) (commwatch_collective_efficiency_ratio{{{_GROUP}}})",
                "{{group}} {{op}}, {{reference}}",
            ),
        ),
    ]


def _amounts() -> list[Panel]:
    sizes = f"sum by (group, op) ({_rate('collective_bytes_total', _GROUP)})"
    count = f"sum by (group, op) ({_rate('collectives_total', _GROUP)})"
    return [
        lines(
            "Share of time",
            "Share of time that the busiest rank spends in an operation.",
            "percentunit",
            Query(f"max by (group, op) ({_rate('collective_seconds_total', _GROUP)})", "{{group}} {{op}}"),
        ),
        lines(
            "Operations per second",
            "Operations that ended without an error, over all ranks.",
            "ops",
            Query(count, "{{group}} {{op}}"),
        ),
        lines(
            "Size",
            "Mean size S of an operation, as nccl-tests counts it. Small operations never reach a link's bandwidth.",
            "bytes",
            Query(f"{sizes} / ({count} > 0)", "{{group}} {{op}}"),
        ),
        lines(
            "Bytes per second",
            "Sum of the sizes S of all operations of all ranks, per second.",
            "Bps",
            Query(sizes, "{{group}} {{op}}"),
        ),
    ]


def _rank_maps() -> list[Panel]:
    across = f"job_rank:commwatch_period_comm_share:lateness{{{_JOB}}}"
    return [
        rank_map(
            "Stragglers: lateness by rank",
            "Share of time that the other ranks (their median) waited for a rank. A row that stands out is a "
            "straggler. Only for groups whose ranks are all on one node.",
            "percentunit",
            _rate("rank_lateness_seconds_total", _GROUP),
        ),
        rank_map(
            "Waiting by rank",
            "Share of time that a rank waited for late ranks in collectives. Only for groups whose ranks are all on "
            "one node.",
            "percentunit",
            _rate("collective_wait_seconds_total", _GROUP),
        ),
        rank_map(
            "Stragglers across nodes",
            "Share of time by which a rank communicates less than the other ranks, which wait for it; from the "
            "counters of all agents. Requires the recording rules of `commwatch alerts export`.",
            "percentunit",
            across,
        ),
        rank_map(
            "Waiting for messages by rank",
            "Share of time that a thread of a rank waited for a send or recv.",
            "percentunit",
            _rate("p2p_wait_seconds_total", _GROUP),
        ),
    ]


def _waits() -> list[Panel]:
    waited = f"max by (rank, group, direction) ({_rate('pipeline_wait_seconds_total', _GROUP)} {_ALIVE})"
    return [
        lines(
            "Pipelines by direction",
            "Share of time spent waiting for messages towards the next stage (forward) and towards the previous stage "
            "(backward), mean of the ranks. A first stage that waits backward is idle in the bubble.",
            "percentunit",
            Query(f"avg by (group, direction) ({waited})", "{{group}} {{direction}}"),
        ),
        cells(
            "Ranks",
            "Where each rank runs, how much time it spends in communication, and how much the other ranks wait for it. "
            "Click a node to open its dashboard.",
            {"rank": "Rank", "instance": "Node"},
            Query(f"max by (rank, instance) (commwatch_comm_share_ratio{{{_JOB}}})", "Communication", "percentunit"),
            Query(f"max by (rank, instance) (commwatch_exposed_comm_share_ratio{{{_JOB}}})", "Exposed", "percentunit"),
            Query(
                f"sum by (rank, instance) ({_rate('collective_wait_seconds_total', window=LATELY)}) {_ALIVE}",
                "Waiting",
                "percentunit",
            ),
            Query(
                f"sum by (rank, instance) ({_rate('rank_lateness_seconds_total', window=LATELY)}) {_ALIVE}",
                "Lateness",
                "percentunit",
            ),
            width=12,
            sort="Lateness",
        ),
    ]


def _wrong() -> list[Panel]:
    return [
        lines(
            "Verdicts",
            "How long a hang, stall, desync or corruption has lasted, or for a straggler, the length of the time judged; and "
            "the rank at fault (empty if there is none). Empty if nothing is wrong. `commwatch diagnose` gives details.",
            "s",
            Query(
                f"max by (kind, group, rank) (commwatch_verdict_seconds{{{_JOB}}})", "{{kind}} {{group}} rank {{rank}}"
            ),
        ),
        cells(
            "Alerts",
            "Alerts of this job that are firing, if Prometheus has the rules of `commwatch alerts export`. The runbook "
            "(link above) explains each alert.",
            {"alertname": "Alert", "severity": "Severity", "rank": "Rank", "group": "Group"},
            Query(
                f'max by (alertname, severity, rank, group) (ALERTS{{alertstate="firing", {_JOB}}})', "Firing", "short"
            ),
            width=12,
        ),
        cells(
            "Findings in NCCL's logs",
            "Problems in the NCCL logs of the job; `commwatch explain` shows the lines.",
            {"finding": "Finding", "severity": "Severity"},
            Query(f"count by (finding, severity) (commwatch_nccl_finding{{{_JOB}}})", "Nodes", "short"),
            width=12,
        ),
        lines(
            "NCCL channels by transport",
            "Channel connections that ranks have made over each transport. Requires NCCL's INFO log.",
            "short",
            Query(f"sum by (group, transport) (commwatch_nccl_channels{{{_GROUP}}})", "{{group}} {{transport}}"),
        ),
    ]
