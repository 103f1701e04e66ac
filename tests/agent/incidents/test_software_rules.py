"""Conditions on findings of NCCL's log, on what is not recorded, and on collectors."""

from __future__ import annotations

import pytest

from commwatch_agent.incidents.conclude import conclude
from commwatch_agent.incidents.evidence import Evidence, KnownJob
from commwatch_agent.incidents.incident import JOB_ENDED
from commwatch_agent.incidents.lifecycle import Around
from commwatch_agent.incidents.metric_window import MetricWindow
from commwatch_agent.incidents.software_rules import agent_fault, capture_incomplete, logged_errors, nccl_fault
from commwatch_collectors.nccl.views import Evidence as Line
from commwatch_collectors.nccl.views import Finding
from tests.agent.incidents.metric_series import at_end, variants, windows
from tests.agent.incidents.test_job_rules import TABLE
from tests.alerts.cases import MANY, Series, counter, gauge, series


def finding(name: str, severity: str = "warning", job: str = "j", **more: str) -> Series:
    """A finding in the log of a job."""
    return gauge("nccl_finding", 1, job_id=job, finding=name, severity=severity, **more)


def port(kind: str, **more: str) -> Series:
    """A network device."""
    return gauge("network_info", 1, device="mlx5_0:1", kind=kind, **more)


def records(read: float, dropped: float, job: str = "j") -> Series:
    """Records of each 15 s."""
    return counter("events_total", read, job_id=job) | counter("events_dropped_total", dropped, job_id=job)


def test_errors() -> None:
    """Each error of each job is found, and warnings are not."""
    several = finding("timeout", "error"), finding("timeout", "error", "k"), finding("oom", "error")
    found = at_end(nccl_fault, *several, finding("slow_init"))
    assert {(one.job_id, one.subject, one.variant) for one in found} == {
        ("j", ("timeout",), ""),
        ("j", ("oom",), ""),
        ("k", ("timeout",), ""),
    }
    assert found[0].says == "NCCL's log shows an error: timeout"
    assert dict(found[0].labels) == {"job_id": "j", "finding": "timeout"}


def error(name: str, says: str, *lines: int, do: str = "do it") -> Finding:
    """An error in a log."""
    return Finding(
        name, "error", f"title of {name}", says, "a meaning", do, [Line("log", n, f"line {n}") for n in lines]
    )


def test_errors_in_logs() -> None:
    """An error in a log has the key and labels of the metric's, its title, words, meaning and remedy, and its lines; those of one name are one."""
    errors = [
        error("oom", "rank 1 did", 4, 7),
        error("timeout", "rank 2 waits", 9),
        error("oom", "another", 5, do="no"),
    ]
    found = list(logged_errors("j", errors, 1000.0))
    (of_metric,) = at_end(nccl_fault, finding("oom", "error"))
    assert (found[0].key, found[0].labels) == (of_metric.key, of_metric.labels)
    assert [one.says for one in found] == ["title of oom: rank 1 did", "title of timeout: rank 2 waits"]
    assert [item.text for item in found[0].evidence] == ["a meaning", "log:4: line 4", "log:7: line 7", "log:5: line 5"]
    assert {item.source for item in found[0].evidence} == {"nccl_log"}
    assert [item.data.get("do") for item in found[0].evidence] == ["do it", None, None, None]


def last_window(*several: Series) -> MetricWindow:
    """The metrics at the end."""
    *_, (_, window) = windows({name: values for one in several for name, values in one.items()})
    return window


def test_incident_of_an_error() -> None:
    """An incident has the words of the log, also if the metric has the error; where only the metric has it, there is one as well."""
    jobs = {"j": KnownJob("key", 2, ended=False)}
    metrics = last_window(finding("oom", "error"), finding("timeout", "error"))
    evidence = Evidence(1000.0, jobs, metrics=metrics, errors={"j": [error("oom", "rank 1 did", 4)]})
    found = {one.subject: one for one in conclude(evidence, [], TABLE, Around(1000.0))}
    assert {subject: (one.says, one.state, one.run) for subject, one in found.items()} == {
        ("oom",): ("title of oom: rank 1 did", "open", "key"),
        ("timeout",): ("NCCL's log shows an error: timeout", "open", "key"),
    }
    assert [item.text for item in found["oom",].evidence] == ["a meaning", "log:4: line 4"]
    assert {each.name for each in found["oom",].alerts} == {"NcclErrors"}


def test_error_of_a_job_that_has_ended() -> None:
    """An error that is found once the job has ended has its incident, which has ended with the job."""
    jobs = {"j": KnownJob("key", 2, ended=True)}
    evidence = Evidence(1000.0, jobs, errors={"j": [error("oom", "rank 1 did", 4)]})
    around = Around(1000.0, ended_runs={"key"})
    (one,) = conclude(evidence, [], TABLE, around)
    assert (one.state, one.outcome, one.says) == ("ended", JOB_ENDED, "title of oom: rank 1 did")
    assert conclude(evidence, [one], TABLE, around) == [one]


@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        ("infiniband", "sockets"),
        ("roce", "sockets"),
        ("rdma", "sockets"),
        ("ethernet", "sockets_only"),
        ("virtual", "sockets_only"),
    ],
)
def test_sockets(kind: str, variant: str) -> None:
    """Sockets are a fault on a node with RDMA, and information on another; both are one incident."""
    (found,) = at_end(nccl_fault, finding("socket_transport"), port(kind))
    assert (found.variant, found.subject, found.nodes) == (variant, ("socket_transport",), ("a",))
    assert dict(found.labels) == {"instance": "a:9477", "job_id": "j"}


def test_sockets_of_two_nodes() -> None:
    """RDMA on another node does not count for this one, and where no device is known, there is none."""
    there = {"instance": "b:9477"}
    found = at_end(nccl_fault, finding("socket_transport"), finding("socket_transport", **there), port("roce", **there))
    assert {one.nodes: one.variant for one in found} == {("a",): "sockets_only", ("b",): "sockets"}


def test_gpu_direct_off() -> None:
    """GPUDirect RDMA that is off is found beside sockets, each with a key of its own."""
    found = at_end(nccl_fault, finding("gdr_off"), finding("socket_transport"))
    assert variants(found) == ["sockets_only", "gpu_direct_off"]
    assert len({one.key for one in found}) == 2


@pytest.mark.parametrize(("read", "dropped", "number"), [(990, 10, 0), (989, 11, 1), (0, 5, 1), (0, 0, 0)])
def test_dropped(read: float, dropped: float, number: int) -> None:
    """The share of all records that were lost counts, above its threshold; a job without records has none."""
    assert variants(at_end(capture_incomplete, records(read, dropped))) == ["dropped"] * number


def test_dropped_by_job() -> None:
    """Jobs are judged each by itself, over five minutes, with the numbers in words."""
    found = at_end(capture_incomplete, records(75, 25), records(1000, 0, "k"))
    assert [(one.job_id, one.value) for one in found] == [("j", 0.25)]
    assert found[0].says == "25% of the records of the last five minutes are lost: 500 of 2000"
    before = series("commwatch_events_dropped_total", "0+50x40 2000x21", job_id="j")
    assert at_end(capture_incomplete, series("commwatch_events_total", "0+50x62", job_id="j"), before) == []


def test_counts_that_begin_again() -> None:
    """An agent or job that counts from 0 again has lost what it shows since then."""
    dropped = series("commwatch_events_dropped_total", f"5000x{MANY - 8} 0x3 5x3", job_id="j")
    assert at_end(capture_incomplete, counter("events_total", 100, job_id="j"), dropped) == []


def test_half_known() -> None:
    """Without the number of records that were read, the share that is lost is not known."""
    assert at_end(capture_incomplete, counter("events_dropped_total", 5, job_id="j")) == []


def test_sheds() -> None:
    """A job is recorded in part if one of its ranks is; the lowest ratio counts."""
    ratios = [
        gauge("probe_recorded_ratio", ratio, job_id="j", rank=str(rank)) for rank, ratio in enumerate((1, 0.25, 0.0625))
    ]
    (found,) = at_end(capture_incomplete, *ratios, gauge("probe_recorded_ratio", 1, job_id="k", rank="0"))
    assert (found.job_id, found.variant, found.value) == ("j", "sheds", 0.0625)
    assert found.says == "the probe exceeds its budget: it records 6% of the operations of 2 ranks"


def test_dropped_and_sheds() -> None:
    """Records that are lost and operations that are not recorded are two incidents of one job."""
    found = at_end(capture_incomplete, records(50, 50), gauge("probe_recorded_ratio", 0.5, job_id="j", rank="0"))
    assert variants(found) == ["dropped", "sheds"]
    assert len({one.key for one in found}) == 2


def test_collectors() -> None:
    """Each collector that does not work is found, until it does."""
    down = gauge("collector_up", 0, collector="gpu") | gauge("collector_up", 0, collector="rdma")
    back = series("commwatch_collector_up", f"0x{MANY - 1} 1", collector="host")
    found = at_end(agent_fault, down, back)
    assert [(one.subject, one.labels["collector"], one.nodes) for one in found] == [
        (("gpu",), "gpu", ("a",)),
        (("rdma",), "rdma", ("a",)),
    ]
    assert found[0].says == "the agent cannot read the data of the collector gpu; its log has the reason"
