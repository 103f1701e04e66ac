"""Rules on software: findings in NCCL's log, records that are missing, collectors that do not work. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from commwatch_agent.incidents.incident import Condition, EvidenceItem
from commwatch_agent.incidents.metric_conditions import Name, condition, of_jobs
from commwatch_agent.incidents.metric_window import MetricWindow, by, only, where
from commwatch_agent.text.units import counted, percent
from commwatch_collectors.nccl.views import Finding

_RDMA = ("infiniband", "roce", "rdma")


def nccl_fault(window: MetricWindow, thresholds: Mapping[str, float], now_s: float) -> Iterator[Condition]:
    """Errors in NCCL's log of a job, and slow ways between nodes. A finding stays as long as the job runs: a log never revokes a message."""
    findings = window.latest(Name.FINDING)
    for labels, value in by(where(findings, "severity", "error".__eq__), ["job_id", "finding"], max).items():
        finding = dict(labels).get("finding", "")
        says = f"NCCL's log shows an error: {finding}"
        yield _found("", finding, dict(labels), value=value, says=says, now_s=now_s)
    # On a node without RDMA devices, sockets are intended.
    rdma = by(where(window.latest(Name.NETWORK_INFO), "kind", _RDMA.__contains__), ["instance"], max)
    for labels, value in by(where(findings, "finding", "socket_transport".__eq__), ["instance", "job_id"], max).items():
        variant, there = (
            ("sockets", "although it has") if only(labels, ["instance"]) in rdma else ("sockets_only", "as it has no")
        )
        says = f"NCCL uses TCP sockets between nodes, {there} InfiniBand or RoCE"
        yield _found(variant, "socket_transport", dict(labels), value=value, says=says, now_s=now_s)
    for labels, value in by(where(findings, "finding", "gdr_off".__eq__), ["instance", "job_id"], max).items():
        says = "network traffic of the GPUs passes through host memory: GPUDirect RDMA is off"
        yield _found("gpu_direct_off", "gdr_off", dict(labels), value=value, says=says, now_s=now_s)


def logged_errors(job_id: str, errors: Iterable[Finding], now_s: float) -> Iterator[Condition]:
    """Errors in the logs of a job, with their words and lines. Those of one name are one condition, in the words of the first."""
    by_name: dict[str, list[Finding]] = {}
    for error in errors:
        by_name.setdefault(error.name, []).append(error)
    for name, found in by_name.items():
        yield Condition(
            "nccl_fault",
            (name,),
            f"{found[0].title}: {found[0].says}",
            now_s,
            job_id=job_id,
            value=1.0,
            labels={"job_id": job_id, "finding": name},
            evidence=tuple(_shown(found, now_s)),
        )


def _shown(errors: Sequence[Finding], now_s: float) -> Iterator[EvidenceItem]:
    """Yield what the first error means, and the lines that show it and the others."""
    first = errors[0]
    about = {"finding": first.name, "means": first.means, "do": first.do}
    yield EvidenceItem("nccl_log", now_s, first.means, about)
    for line in (line for error in errors for line in error.evidence):
        place = {"finding": first.name, "file": line.file, "line": line.line}
        yield EvidenceItem("nccl_log", now_s, f"{line.file}:{line.line}: {line.text}", place)


def _found(
    variant: str, finding: str, labels: Mapping[str, str], *, value: float, says: str, now_s: float
) -> Condition:
    return condition(
        "nccl_fault",
        (finding,),
        labels,
        now_s=now_s,
        value=value,
        variant=variant,
        says=says,
        source="nccl_log",
        metric=Name.FINDING,
        measured=f"finding {finding}: `commwatch explain` shows its lines",
    )


def capture_incomplete(window: MetricWindow, thresholds: Mapping[str, float], now_s: float) -> Iterator[Condition]:
    """Jobs of which records are lost, or are not made because the probe would exceed its budget."""
    read, dropped = (of_jobs(window.increase(name), sum) for name in (Name.EVENTS, Name.DROPPED))
    for job_id, lost in dropped.items():
        number = lost + read.get(job_id, 0.0)
        if job_id in read and number > 0 and lost / number > thresholds["records_dropped"]:
            part = lost / number
            says = f"{percent(part)} of the records of the last five minutes are lost: {lost:.0f} of {number:.0f}"
            yield _incomplete("dropped", job_id, part, Name.DROPPED, says=says, now_s=now_s)
    recorded = {labels: part for labels, part in window.latest(Name.RECORDED).items() if part < 1}
    ranks = of_jobs(by(recorded, ["job_id", "rank"], min), len)
    for job_id, part in of_jobs(recorded, min).items():
        says = f"the probe exceeds its budget: it records {percent(part)} of the operations of {counted(round(ranks[job_id]), 'rank')}"
        yield _incomplete("sheds", job_id, part, Name.RECORDED, says=says, now_s=now_s)


def _incomplete(variant: str, job_id: str, part: float, metric: Name, *, says: str, now_s: float) -> Condition:
    return condition(
        "capture_incomplete",
        (variant,),
        {"job_id": job_id},
        now_s=now_s,
        value=part,
        variant=variant,
        says=says,
        source="metrics",
        metric=metric,
        measured=says,
    )


def agent_fault(window: MetricWindow, thresholds: Mapping[str, float], now_s: float) -> Iterator[Condition]:
    """Collectors that do not work."""
    for labels, up in by(window.latest(Name.COLLECTOR_UP), ["instance", "collector"], min).items():
        if up == 0:
            collector = dict(labels).get("collector", "")
            yield condition(
                "agent_fault",
                (collector,),
                dict(labels),
                now_s=now_s,
                value=up,
                says=f"the agent cannot read the data of the collector {collector}; its log has the reason",
                source="metrics",
                metric=Name.COLLECTOR_UP,
                measured=f"the last run of the collector {collector} failed",
            )
