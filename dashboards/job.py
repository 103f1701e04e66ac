"""The dashboard *Job*: one job over all its ranks and nodes."""

from __future__ import annotations

from typing import Any

from commwatch.dashboards.common import (
    COMM_SHARE,
    JOB,
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


def _rate(metric: str, matchers: str = _JOB) -> str:
    return f"rate(commwatch_{metric}{{{matchers}}}[$__rate_interval])"


def build() -> dict[str, Any]:
    """Return the dashboard as Grafana's JSON."""
    groups = one_of(
        "group",
        "Group",
        "Process groups, by description, or by name where there is none.",
        f"label_values(commwatch_collectives_total{{{_JOB}}}, group)",
    )
    return dashboard(
        JOB,
        "One training job: how much of a step is communication, how fast it is, and who waits for whom.",
        [
            one_of("job_id", "Job", "The job that is shown.", "label_values(commwatch_job_info, job_id)"),
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
            "Communication time over step time, mean of the ranks, over the last minute's steps. From 30 % on it is the "
            "bottleneck, unless it is hidden behind compute.",
            "percentunit",
            f"avg(commwatch_comm_share_ratio{{{_JOB}}})",
            marks=COMM_SHARE,
        ),
        number(
            "Exposed share",
            "The part of the step time in which compute waited for communication. On CPU an upper bound; absent where it "
            "is not known.",
            "percentunit",
            f"avg(commwatch_exposed_comm_share_ratio{{{_JOB}}})",
            marks=(THRESHOLD["exposed_share"],),
        ),
        number("Step time now", "Mean duration of the latest steps, over all ranks.", "s", _step_time("sum")),
        number(
            "GPU-hours lost",
            "Hours that ranks of the job waited for communication within the time range shown; GPU-hours, where each rank "
            "has a GPU. Absent where exposed time is not known.",
            "h",
            f"sum(max by (rank) (increase(commwatch_step_exposed_comm_seconds_total{{{_JOB}}}[$__range]))) / 3600",
        ),
        number(
            "Ranks alive",
            "Ranks whose process lives. An agent tells of those of its node.",
            "short",
            f"sum(max by (rank) (commwatch_rank_up{{{_JOB}}}))",
        ),
        number(
            "Ranks lost",
            "Ranks whose process was killed or has crashed.",
            "short",
            f"sum(1 - max by (rank) (commwatch_rank_up{{{_JOB}}}))",
            marks=(1,),
        ),
    ]


def _step_time(by: str) -> str:
    if by == "sum":
        return f"sum({_rate('step_seconds_total')}) / (sum({_rate('steps_total')}) > 0)"
    return f"max({_rate('step_seconds_total')} / ({_rate('steps_total')} > 0))"


def _steps() -> list[Panel]:
    per_step = f"on () group_left () (sum({_rate('step_seconds_total')}) > 0)"
    return [
        lines(
            "Steps a second",
            "Training steps a second, mean of the ranks.",
            "suffix: steps/s",
            Query(f"avg({_rate('steps_total')})", "steps"),
        ),
        lines(
            "Step time",
            "From one step mark to the next: the mean of all ranks, and the rank with the longest.",
            "s",
            Query(_step_time("sum"), "mean"),
            Query(_step_time("max"), "longest of a rank"),
        ),
        lines(
            "Communication and exposed share",
            "Communication time over step time, and the part in which compute waited; means of the ranks over the last "
            "minute's steps, long steps left out. Above the line at 30 % communication is the bottleneck.",
            "percentunit",
            Query(f"avg(commwatch_comm_share_ratio{{{_JOB}}})", "communication"),
            Query(f"max(commwatch_comm_share_ratio{{{_JOB}}})", "communication, highest rank"),
            Query(f"avg(commwatch_exposed_comm_share_ratio{{{_JOB}}})", "exposed"),
            marks=COMM_SHARE,
            most=1,
        ),
        lines(
            "Share by group",
            "Part of the step time in which operations of a group ran. Groups that communicate at the same time overlap, so "
            "these may add up to more than the communication share.",
            "percentunit",
            Query(f"sum by (group) ({_rate('step_group_comm_seconds_total', _GROUP)}) / {per_step}", "{{group}}"),
        ),
    ]


def _odd_steps() -> list[Panel]:
    return [
        lines(
            "Pipeline bubble",
            "Part of the step time in which a thread of a rank stood waiting for a send or recv, of the sixteen ranks that "
            "wait most. Messages themselves take part of it.",
            "percentunit",
            Query(
                f"topk(16, max by (rank) ({_rate('step_p2p_wait_seconds_total')} / ({_rate('step_seconds_total')} > 0)))",
                "rank {{rank}}",
            ),
        ),
        lines(
            "Long steps",
            "Steps that took over three times as long as those before them, such as a checkpoint, within the last interval; the "
            "rank with most.",
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
            "S times the bus factor of nccl-tests, over the time in operations: comparable with the rated speed of a link. "
            "Waiting for late ranks is in the time.",
            "Bps",
            Query(f"{moved} / ({took} > 0)", "{{group}} {{op}}"),
        ),
        lines(
            "Duration, p99",
            "Duration that 99 of 100 operations stay below, waiting for late ranks included; as exact as the buckets, 10 µs to "
            "10 s.",
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
            "Expected over measured transfer time of the last minute, late ranks left out, with what it is held against: a "
            "measured or rated link, or the job's own best, which says nothing of how good that is. The lowest of all nodes.",
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
            "Part of the time that the busiest rank spends in an operation.",
            "percentunit",
            Query(f"max by (group, op) ({_rate('collective_seconds_total', _GROUP)})", "{{group}} {{op}}"),
        ),
        lines(
            "Operations a second",
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
            "Bytes a second",
            "Sizes S of all operations of all ranks.",
            "Bps",
            Query(sizes, "{{group}} {{op}}"),
        ),
    ]


def _rank_maps() -> list[Panel]:
    across = f"job_rank:commwatch_period_comm_share:lateness{{{_JOB}}}"
    return [
        rank_map(
            "Stragglers: lateness by rank",
            "Share of time that the others (their median) waited for a rank. A row that stands out is a straggler. Of groups "
            "whose ranks are all on one node.",
            "percentunit",
            _rate("rank_lateness_seconds_total", _GROUP),
        ),
        rank_map(
            "Waiting by rank",
            "Share of time that a rank waited in collectives for late ranks. Of groups whose ranks are all "
            "on one node.",
            "percentunit",
            _rate("collective_wait_seconds_total", _GROUP),
        ),
        rank_map(
            "Stragglers across nodes",
            "Share of time by which a rank communicates less than the others, who wait for it; from the counters of all agents. Needs "
            "the recording rules of `commwatch alerts export`.",
            "percentunit",
            across,
        ),
        rank_map(
            "Waiting for messages by rank",
            "Share of time that a thread of a rank stood in a wait for a send or recv.",
            "percentunit",
            _rate("p2p_wait_seconds_total", _GROUP),
        ),
    ]


def _waits() -> list[Panel]:
    return [
        lines(
            "Pipelines by direction",
            "Waiting for messages in the direction of the next stage (forward) and of the one before (backward), mean of the "
            "ranks. A first stage that waits backward is idle in the bubble.",
            "percentunit",
            Query(
                f"avg by (group, direction) ({_rate('pipeline_wait_seconds_total', _GROUP)})", "{{group}} {{direction}}"
            ),
        ),
        cells(
            "Ranks",
            "Where each rank runs, what it spends in communication, and what the others wait for it. A click on a node leads to "
            "its dashboard.",
            {"rank": "Rank", "instance": "Node"},
            Query(f"max by (rank, instance) (commwatch_comm_share_ratio{{{_JOB}}})", "Communication", "percentunit"),
            Query(f"max by (rank, instance) (commwatch_exposed_comm_share_ratio{{{_JOB}}})", "Exposed", "percentunit"),
            Query(f"sum by (rank, instance) ({_rate('collective_wait_seconds_total')})", "Waits", "percentunit"),
            Query(f"sum by (rank, instance) ({_rate('rank_lateness_seconds_total')})", "Lets wait", "percentunit"),
            width=12,
            sort="Lets wait",
        ),
    ]


def _wrong() -> list[Panel]:
    return [
        lines(
            "Verdicts",
            "For how long a hang, stall, desync or straggler has lasted, and the rank to blame (empty where there is none). "
            "Empty while nothing is wrong; `commwatch diagnose` says more.",
            "s",
            Query(
                f"max by (kind, group, rank) (commwatch_verdict_seconds{{{_JOB}}})", "{{kind}} {{group}} rank {{rank}}"
            ),
        ),
        cells(
            "Alerts",
            "Alerts of this job that fire, if Prometheus has the rules of `commwatch alerts export`. What each means stands in "
            "the runbook (link above).",
            {"alertname": "Alert", "severity": "Severity", "rank": "Rank", "group": "Group"},
            Query(
                f'max by (alertname, severity, rank, group) (ALERTS{{alertstate="firing", {_JOB}}})', "Firing", "short"
            ),
            width=12,
        ),
        cells(
            "Findings in NCCL's logs",
            "What NCCL's logs of the job show to be wrong or slow; `commwatch explain` shows the lines.",
            {"finding": "Finding", "severity": "Severity"},
            Query(f"count by (finding, severity) (commwatch_nccl_finding{{{_JOB}}})", "Nodes", "short"),
            width=12,
        ),
        lines(
            "NCCL channels by transport",
            "Channel connections that ranks have made over each transport. Needs NCCL's INFO log.",
            "short",
            Query(f"sum by (group, transport) (commwatch_nccl_channels{{{_GROUP}}})", "{{group}} {{transport}}"),
        ),
    ]
