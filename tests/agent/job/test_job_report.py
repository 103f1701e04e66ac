"""What a report on several nodes combines: waits over time, and the networks of the nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from commwatch_agent.analysis.advice_input import network_of
from commwatch_agent.analysis.gpu_nic_affinity import GpuNicPair
from commwatch_agent.analysis.network_advice import Network
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.analysis.totals import Totals
from commwatch_agent.job.job_report import NodeData, ReportPart, ReportQueries, findings_of, network_of_all, rows_of
from commwatch_agent.job.job_waits import JobWaits, joined_waits
from commwatch_agent.job.queries import Cells, view_of
from commwatch_agent.job.wait_source import wait_part
from commwatch_agent.model.host_views import Complaint, HostView, TrafficView
from commwatch_agent.model.nccl_views import Topology
from commwatch_collectors.nccl.views import Evidence, Finding
from tests.agent.analysis.test_gpu_nic_affinity import GPUS
from tests.agent.sources.test_host import Watched
from tests.helpers import MS, Watch, group_entry, mark, operation, write_ring

S, RANKS, SLOTS = 1000 * MS, 4, 5
ALWAYS = (0, 1 << 62)
HOST = HostView(None, 60.0, None, None, {}, [], [], 1, [], TrafficView(0.0, [], 0.0, {}, None, ""))


def step_of(rank: int, n: int) -> list[tuple[int, ...]]:
    """A step of 1 s: all_reduces of two sizes over all ranks, for which one rank is late, and an all_gather of the two on its node."""
    late = 150 * MS * (rank == n // 10 % RANKS)
    begin = n * S + 3 * rank * MS
    return [
        operation(start_ns=begin + 100 * MS + late, end_ns=n * S + 400 * MS, seq=2 * n, size=1 << 20),
        operation(start_ns=begin + 500 * MS, end_ns=n * S + 600 * MS, seq=2 * n + 1, size=3 << 20),
        operation("all_gather", start_ns=begin + 700 * MS, end_ns=n * S + 750 * MS, seq=n, group=1),
        mark(n, n * S + 900 * MS),
    ]


def watched(directory: Path, here: range) -> QueryService:
    """The history of an agent with some ranks, which has read each slot of 10 s when it was over."""
    watch = Watch(directory)
    writers = {}
    for rank in here:
        first = rank // 2 * 2
        names = [
            group_entry(0, tuple(range(RANKS)), "all"),
            group_entry(1, (first, first + 1), "tp", group_id=f"tp{first}"),
        ]
        writers[rank] = write_ring(watch.rings, [], names, rank=rank, world_size=RANKS)
    for slot in range(SLOTS):
        for rank, writer in writers.items():
            for n in range(10 * slot, 10 * slot + 10):
                for record in step_of(rank, n):
                    writer.write(*record)
        watch.tick((10 * slot + 10) * S - 1)
    watch.tick((10 * SLOTS + 20) * S)
    return watch.agent


def part_of(agent: QueryService) -> ReportPart:
    """What a node contributes to a report."""
    (job,) = agent.jobs()
    steps = rows_of(*agent.latest_steps(0, "job", 1000))
    about = job, agent.begun_at("job"), agent.ranks("job"), agent.groups("job"), steps, agent.step_totals("job")
    return ReportPart(*about, agent.totals("job", []).waits, {}, HOST, None)


def test_waits_over_time(tmp_path: Path) -> None:
    """Waits by rank and group, by operation and size, and by rank and slot are those of an agent with all ranks that read them as they came."""
    by = [["rank", "group"], ["group", "op", "size"]]
    whole, *nodes = (watched(tmp_path / str(at), here) for at, here in enumerate((range(4), range(2), range(2, 4))))
    expected = whole.totals("job", by)
    assert len(expected.waits) == RANKS * SLOTS
    for own, other in (nodes, nodes[::-1]):
        covered, cells = other.cells(*ALWAYS, "job")
        data = NodeData(part_of(other), {0: Cells(*covered, [view_of(one) for one in cells])}, ())
        waits = JobWaits(joined_waits(wait_part(agent.path, "job", 1000) for agent in (own, other)))
        assert comparable(ReportQueries(own, "job", [data], 1000, waits).totals("job", by)) == comparable(expected)


def comparable(totals: Totals) -> tuple[object, ...]:
    """What a report shows, in one order; the order of sums changes the last digits."""
    waits = sorted((wait.start_at, wait.rank, wait.length_s, round(wait.wait_s, 9)) for wait in totals.waits)
    rows = [sorted((str(row.by), row.count, row.wait_s and round(row.wait_s, 9)) for row in of) for of in totals.rows]
    return waits, rows


def test_networks_of_all_nodes(tmp_path: Path) -> None:
    """Advice sees the GPUs and the complaints of all nodes; a complaint names the host, or all hosts that an agent has ranks of."""
    agent = watched(tmp_path, range(2))
    part = part_of(agent)
    complaint = Complaint("down", "eth0", "has no carrier", "check the cable")
    host = replace(Watched("infiniband", tmp_path / "host").watch.view(), complaints=[complaint])
    ranks = [replace(rank, host=name, gpu_bus_id=GPUS[rank.rank]) for rank, name in zip(part.ranks, "ba", strict=True)]
    there = replace(part, host=host, ranks=ranks)
    mine = GpuNicPair(7, "gpu", "nic", "SYS", "nic", "SYS", True)
    own = Network([mine], [replace(complaint, device="ib0")])
    found = network_of_all(own, "here", [NodeData(there, {}, ()), NodeData(part, {}, ())])
    assert [each.device for each in found.complaints] == ["ib0 of here", "eth0 of a, b"]
    assert [replace(each, device="") for each in found.complaints] == [replace(complaint, device="")] * 2
    assert found.places == [mine, *network_of(host, ranks).places]
    assert [place.rank for place in found.places] == [7, 0, 1]
    assert network_of_all(own, "here", []).complaints == [replace(complaint, device="ib0 of here")]


def test_findings_of_all_nodes() -> None:
    """Causes on any node come before what others noticed of them, and a line of a file that several nodes read counts once."""

    def topology(*found: tuple[str, str, int]) -> Topology:
        findings = [
            Finding(name, severity, "t", "s", "m", "d", [Evidence("log", line, "x")]) for name, severity, line in found
        ]
        return Topology("job", "NCCL", [], {}, [], [], [], findings, [], 1, 0, 0)

    here = topology(("peer_lost", "error", 1), ("gdr_off", "warning", 2))
    there = topology(("cuda_error", "error", 3), ("peer_lost", "error", 1), ("peer_lost", "error", 4))
    assert [(each.name, each.evidence[0].line) for each in findings_of([here, None, there])] == [
        ("cuda_error", 3),
        ("peer_lost", 1),
        ("peer_lost", 4),
        ("gdr_off", 2),
    ]
