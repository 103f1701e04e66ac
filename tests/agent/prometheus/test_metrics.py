"""The whole /metrics page for rings written by hand, compared with ``tests/golden/metrics.txt``.

After a wanted change: ``python -m tests.agent.prometheus.test_metrics --write``, and read the difference.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from commwatch.wire import events as ev
from commwatch.wire import ring
from commwatch.wire.ring_reader import RingReader
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.prometheus.exporter import MOST_GROUPS, Exporter
from commwatch_agent.prometheus.exposition import rendered
from commwatch_agent.prometheus.metrics import METRICS
from commwatch_collectors.node.gpu import GpuPlace, Measured, Xid
from commwatch_collectors.node.gpu import readings as gpu_readings
from commwatch_collectors.registry import Reading
from tests.gpus import DRIVER, UUIDS, full, lost
from tests.helpers import MS, end_rank, group_entry, mark, needs, operation, packed, write_ring

GOLDEN = Path(__file__).parents[2] / "golden" / "metrics.txt"
S = 1000 * MS
NOW = 10 * S
UNKNOWN_OP = 32
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def exporter(
    aggregate: JobTable,
    readings: list[tuple[str, list[Reading] | None]] | None = None,
    gpu_of: Callable[[GpuPlace | None], str] = lambda where: "",
) -> CollectorRegistry:
    """What the agent serves, at ten seconds on a fixed clock."""
    registry = CollectorRegistry()
    registry.register(Exporter(aggregate, threading.RLock(), lambda: NOW, lambda: readings or [], gpu_of=gpu_of))
    return registry


def page(aggregate: JobTable, readings: list[tuple[str, list[Reading] | None]] | None = None) -> str:
    """The text Prometheus gets."""
    return rendered(exporter(aggregate, readings).collect(), openmetrics=False).decode()


def samples(text: str) -> Samples:
    """The samples of a page, by name and labels; fails if two share both."""
    found = [
        ((sample.name, frozenset(sample.labels.items())), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    assert max(Counter(key for key, _ in found).values()) == 1
    return dict(found)


def take(aggregate: JobTable, path: Path) -> RankTotals:
    """Read a ring as the agent does; its trainer counts as alive."""
    reader = RingReader(path)
    book = aggregate.open(str(path), reader.identity)
    book.learn(reader.names())
    drained = reader.drain(final=True)
    ingest_records(book, drained.records)
    book.lost, book.in_flight = drained.lost, reader.in_flight()
    book.dropped, book.probe_ns = reader.counter(ring.DROPPED), reader.counter(ring.PROBE_NS)
    reader.close()
    return book


def _train(rings: Path, rank: int) -> Path:
    """One rank of four: every kind of operation, and one that hangs."""
    mesh = group_entry(1, (0, 1) if rank < 2 else (2, 3), "mesh_tp", group_id="tp-a" if rank < 2 else "tp-b")
    names = [group_entry(0, (0, 1, 2, 3), group_id="world"), mesh, {"op": UNKNOWN_OP, "name": "c10d::swap"}]
    names += [{"gpu": {"uuid": UUIDS[0], "bus_id": "", "index": 0}}] if rank == 0 else []
    t = S  # rank k comes k ms late; all finish together
    odd = operation("barrier", start_ns=t + 60 * MS, end_ns=t + 61 * MS, seq=2, size=0, flags=ev.NO_SIZE)
    p2p = operation(
        ("send", "recv")[rank % 2],
        start_ns=t + 70 * MS,
        end_ns=t + 74 * MS,
        size=1 << 20,
        peer=rank ^ 1,
        waited_us=1500,
    )
    records = [
        mark(0, t),
        operation("all_reduce", start_ns=t + rank * MS, end_ns=t + 10 * MS, seq=0, size=4_000_000),
        operation("all_gather", start_ns=t + 20 * MS, end_ns=t + 24 * MS, seq=0, size=8_000_000, group=1),
        operation("barrier", start_ns=t + 40 * MS, end_ns=t + 41 * MS, seq=1, size=0, flags=ev.NO_SIZE),
        (UNKNOWN_OP, *odd[1:]),
        p2p,
        mark(1, t + 100 * MS, exposed_ns=9 * MS),
        mark(2, t + 200 * MS, exposed_ns=0),
        mark(3, t + 300 * MS, exposed_ns=0),
        operation("all_reduce", start_ns=t + 310 * MS, end_ns=t + 320 * MS, seq=3, flags=ev.UNTIMED, timing=ev.BY_NONE),
    ]
    writer = write_ring(rings, records, names, job="train", rank=rank, world_size=4, started_ns=t)
    writer.counters[ring.PROBE_NS] = 1_250_000
    if rank == 3:
        writer.begin(*operation("all_reduce", start_ns=0, end_ns=0, launch_ns=t + 500 * MS, seq=4))
        writer.counters[ring.DROPPED] = 2
    end_rank(writer)
    return writer.path


def recorded(rings: Path) -> JobTable:
    """Two jobs with equal ranks: ``train`` on four, and ``eval``, of which one rank has ended."""
    aggregate = JobTable()
    for rank in range(4):
        take(aggregate, _train(rings, rank))
    for rank in range(2):
        records = [operation("broadcast", start_ns=S, end_ns=S + 5 * MS, seq=i, size=1 << 20) for i in range(3)]
        writer = write_ring(rings, records, [group_entry()], job="eval", rank=rank, slots=128)
        end_rank(writer)
        take(aggregate, writer.path).alive = rank == 0
    return aggregate


#: A card that has everything, one that has PCIe's rates instead of counters and an Xid, and one that is lost.
GPUS = [full(0), replace(full(1), measured=Measured(pcie_bytes_per_second={"transmit": 1e6, "receive": 2e6})), lost(2)]
READINGS: list[tuple[str, list[Reading] | None]] = [
    ("gpu", list(gpu_readings(DRIVER, GPUS, {Xid(UUIDS[1], 79): 1}))),
    ("network", [Reading("network_bytes_total", ("eth0", way), n) for way, n in (("receive", 1e9), ("transmit", 5e8))]),
    ("infiniband", [
        Reading("network_packets_total", ("mlx5_0:1", "transmit"), 5e6),
        Reading("network_errors_total", ("mlx5_0:1", "receive"), 1),
        Reading("network_drops_total", ("mlx5_0:1", "transmit"), 2),
        Reading("network_speed_bytes_per_second", ("mlx5_0:1",), 50e9),
        Reading("network_up", ("mlx5_0:1",), 1),
        Reading("network_link_downs_total", ("mlx5_0:1",), 0),
        Reading("infiniband_events_total", ("mlx5_0:1", "symbol_error"), 0),
        Reading("network_info", ("mlx5_0:1", "infiniband", "ibs1", "0000:1a:00.0", "0", "ib-ndr"), 1),
    ]),
    ("host", [
        Reading("host_cpu_seconds_total", ("softirq",), 4.5),
        Reading("host_memory_total_bytes", (), 1 << 37),
        Reading("host_memory_available_bytes", (), 1 << 36),
        Reading("host_pressure_seconds_total", ("memory",), 0.25),
    ]),
    ("alerts", [
        Reading("notifications_total", ("slack", "sent"), 3),
        Reading("notifications_waiting", ("slack",), 0),
    ]),
    ("broken", None),
]  # fmt: skip


def golden_page() -> str:
    """The page for the recorded rings."""
    with TemporaryDirectory() as rings:
        registry = exporter(recorded(Path(rings)), READINGS, lambda where: "0" if where is not None else "")
        return rendered(registry.collect(), openmetrics=False).decode()


def test_whole_page() -> None:
    """The whole page is the golden file, byte for byte: a changed name or number shows up as a changed line."""
    assert golden_page() == GOLDEN.read_text(), "if it was meant: python -m tests.agent.prometheus.test_metrics --write"


def test_promtool_finds_nothing() -> None:
    """Prometheus' own linter has nothing to say about the page."""
    needs(shutil.which("promtool"), "promtool")
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=GOLDEN.read_text(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_numbers() -> None:
    """Counters are those worked out by hand: bus bytes, seconds, waits, lateness, shares; what is not defined is absent."""
    found = samples(GOLDEN.read_text())

    def value(name: str, **labels: str) -> float | None:
        return found.get((f"commwatch_{name}", frozenset(labels.items())))

    first = {"job_id": "train", "rank": "0", "group": "default_pg"}
    reduced = {**first, "op": "all_reduce"}
    assert value("collectives_total", **reduced) == 2  # one of them untimed
    assert value("collective_bytes_total", **reduced) == 4_004_096
    assert value("collective_bus_bytes_total", **reduced) == 6_000_000  # 4 MB x 2 * 3/4
    assert value("collective_seconds_total", **reduced) == pytest.approx(0.010)
    # What rules compare over ranks: all_reduce and barrier, but not the untimed one, which has no duration to divide.
    world = {**first, "group_id": "world"}
    assert value("symmetric_collectives_total", **world) == 2
    assert value("symmetric_collective_seconds_total", **world) == pytest.approx(0.010 + 0.001)
    # Rank 0 waited 3 ms for rank 3 in the all_reduce and nobody in the barrier; the others waited 3, 2, 1 ms: median 2.
    assert value("collective_wait_seconds_total", **first) == pytest.approx(0.003)
    assert value("rank_lateness_seconds_total", **{**first, "rank": "3"}) == pytest.approx(0.002)
    assert value("rank_lateness_seconds_total", **first) == 0
    gathered = {"job_id": "train", "rank": "2", "group": "mesh_tp", "op": "all_gather"}
    assert value("collective_bus_bytes_total", **gathered) == 4_000_000  # 8 MB x 1/2
    assert value("p2p_wait_seconds_total", **first) == pytest.approx(0.0015)
    # Absent, never zero: a barrier has no bytes, an unknown op no known size, neither bus bandwidth nor wait.
    for op in ("barrier", "c10d::swap"):
        for name in ("collective_bytes_total", "collective_bus_bytes_total"):
            assert value(name, **{**first, "op": op}) is None, (op, name)
        assert value("collectives_total", **{**first, "op": op}) == 1
    assert value("collective_wait_seconds_total", job_id="eval", rank="0", group="default_pg") is None
    rank_3 = {"job_id": "train", "rank": "3"}
    # 7 ms all_reduce + 4 + 1 + 1 and the 1.5 ms somebody waited for the recv, of 100 ms; then two steps without any.
    assert value("step_comm_seconds_total", **rank_3) == pytest.approx(0.0145)
    assert value("step_group_comm_seconds_total", **rank_3, group="default_pg") == pytest.approx(0.0105)
    assert value("step_group_comm_seconds_total", **rank_3, group="mesh_tp") == pytest.approx(0.004)
    assert value("step_p2p_wait_seconds_total", **rank_3) == pytest.approx(0.0015)
    assert value("comm_share_ratio", **rank_3) == pytest.approx(0.145 / 3)
    assert value("exposed_comm_share_ratio", **rank_3, source="thread_cpu") == pytest.approx(0.09 / 3)
    world = {**rank_3, "group": "default_pg", "group_id": "world"}
    assert value("collective_in_flight_seconds", **world) == pytest.approx(8.5)
    assert value("collective_last_seq", **world) == 3
    assert value("events_dropped_total", job_id="train") == 2
    assert (value("collector_up", collector="network"), value("collector_up", collector="broken")) == (1, 0)


def test_histograms() -> None:
    """Histograms are cumulative, end in +Inf, and agree with the counters; 12 buckets of time, 8 of size."""
    found = samples(GOLDEN.read_text())
    for name, buckets in (("duration_seconds", 12), ("size_bytes", 8)):
        series: dict[frozenset[tuple[str, str]], list[tuple[float, float]]] = {}
        for (metric, labels), value in found.items():
            if metric == f"commwatch_collective_{name}_bucket":
                le = float(dict(labels)["le"])
                series.setdefault(frozenset((k, v) for k, v in labels if k != "le"), []).append((le, value))
        assert series
        for labels, points in series.items():
            counts = [count for _, count in sorted(points)]
            assert len(counts) == buckets
            assert counts == sorted(counts)
            assert counts[-1] == found[f"commwatch_collective_{name}_count", labels]
    eval_ = frozenset({"job_id": "eval", "group": "default_pg", "op": "broadcast"}.items())
    assert found["commwatch_collective_size_bytes_sum", eval_] == 6 << 20
    assert found["commwatch_collective_duration_seconds_sum", eval_] == pytest.approx(0.030)
    assert found["commwatch_collective_size_bytes_bucket", eval_ | {("le", "131072.0")}] == 0
    assert found["commwatch_collective_size_bytes_bucket", eval_ | {("le", "1048576.0")}] == 6


def test_names_units_and_labels() -> None:
    """Every name has our prefix and a base unit, counters end in _total, and a series with a rank has its job."""
    for spec in METRICS.values():
        assert re.fullmatch(r"commwatch_[a-z0-9_]+", spec.name)
        assert (spec.kind == "counter") == spec.name.endswith("_total")
        assert not re.search(r"(?<!prome)(_ms|_us|_ns|_gb|_mb|percent)(_|$)", spec.name)
        assert "rank" not in spec.labels or "job_id" in spec.labels
        assert spec.help.endswith(".")


def test_two_jobs_never_share_a_series() -> None:
    """Jobs with the same ranks, groups and ops keep their series apart."""
    found = samples(GOLDEN.read_text())
    nodes = {name for name, spec in METRICS.items() if "job_id" not in spec.labels}
    for name, labels in found:
        of_node = name.removeprefix("commwatch_") in nodes or name.startswith("commwatch_gpu_")
        assert ("job_id" in dict(labels)) != of_node, name
    assert {dict(labels).get("job_id") for _, labels in found} == {"train", "eval", None}


def _node(ranks: int = 8) -> JobTable:
    """A full node: 13 (group, op) pairs a rank of data, tensor, pipeline and expert parallelism."""
    groups: dict[str, tuple[str, ...]] = {
        "dp": ("all_reduce", "all_gather", "reduce_scatter"),
        "tp": ("all_reduce", "all_gather", "reduce_scatter"),
    }
    groups |= {
        "pp": ("send", "recv"),
        "ep": ("all_to_all", "all_reduce"),
        "default_pg": ("barrier", "broadcast", "all_gather"),
    }
    assert sum(map(len, groups.values())) == 13
    everyone = tuple(range(ranks))
    names = [group_entry(i, everyone, label) for i, label in enumerate(groups)]
    aggregate = JobTable()
    for rank in everyone:
        book = aggregate.open(
            f"ring-{rank}", {"job": "big", "restart": 0, "rank": rank, "world_size": ranks, "wall_offset_ns": 0}
        )
        book.learn(names)
        made = [mark(0, MS), mark(1, 2 * MS, exposed_ns=0)]
        made += [
            operation(op, start_ns=(2 + n) * MS, end_ns=(3 + n) * MS, seq=n, group=i, size=1 << 10 + n)
            for i, ops in enumerate(groups.values())
            for n, op in enumerate(ops)
        ]
        ingest_records(book, packed(*made))
    return aggregate


def test_series_of_a_full_node() -> None:
    """A node with 8 cards, 8 ranks and 13 (group, op) pairs each stays within the budget of 1,500 series."""
    eight = [("gpu", list(gpu_readings(DRIVER, map(full, range(8)), {})))]
    found = samples(page(_node(), [*READINGS[1:], *eight]))
    assert sum(name == "commwatch_collectives_total" for name, _ in found) == 8 * 13
    assert len(found) <= 1500


def test_group_labels_are_capped() -> None:
    """Past 32 group labels of a job all further ones share `other`, and a counter says how many; nothing is lost."""
    aggregate, more = JobTable(), 18
    book = aggregate.open("ring", {"job": "many", "restart": 0, "rank": 0, "world_size": 2, "wall_offset_ns": 0})
    book.learn([group_entry(i, label=f"group_{i}") for i in range(MOST_GROUPS + more)])
    ingest_records(book, packed(*(operation(start_ns=MS, end_ns=2 * MS, group=i) for i in range(MOST_GROUPS + more))))
    registry = exporter(aggregate)
    for _ in range(2):  # a second scrape counts nothing again
        found = samples(rendered(registry.collect(), openmetrics=False).decode())
        counts = {
            dict(labels)["group"]: v for (name, labels), v in found.items() if name == "commwatch_collectives_total"
        }
        assert len(counts) == MOST_GROUPS + 1
        assert (counts["other"], sum(counts.values())) == (more, MOST_GROUPS + more)
        assert found["commwatch_series_dropped_total", frozenset()] == more


def test_a_group_called_other() -> None:
    """A group that its user calls `other` keeps series of its own: `other` has only the groups past the limit."""
    aggregate, more = JobTable(), 3
    labels = ["other", *(f"group_{i}" for i in range(1, MOST_GROUPS + more))]
    book = aggregate.open("ring", {"job": "many", "restart": 0, "rank": 0, "world_size": 2, "wall_offset_ns": 0})
    book.learn([group_entry(i, label=label) for i, label in enumerate(labels)])
    ingest_records(book, packed(*(operation(start_ns=MS, end_ns=2 * MS, group=i) for i in range(len(labels)))))
    found = samples(page(aggregate))
    counts = {dict(labels)["group"]: v for (name, labels), v in found.items() if name == "commwatch_collectives_total"}
    assert (counts["other group"], counts["other"], len(counts)) == (1, more, MOST_GROUPS + 1)
    infos = {dict(labels)["group"] for name, labels in found if name == "commwatch_group_info"}
    assert infos == counts.keys() - {"other"}


def test_second_life_adds_up() -> None:
    """A restarted rank goes on counting where its first life ended: counters never fall."""
    aggregate = JobTable()
    totals = []
    for restart in range(2):
        who = {"job": "elastic", "restart": restart, "rank": 0, "world_size": 1, "wall_offset_ns": 0}
        book = aggregate.open(f"ring-{restart}", who)
        book.learn([group_entry(group_id=f"world-{restart}")])
        made = [mark(0, MS), operation(start_ns=MS, end_ns=3 * MS, seq=0), mark(1, 9 * MS, exposed_ns=MS)]
        ingest_records(book, packed(*made))
        book.finish()
        found = samples(page(aggregate))
        adds_up = [key for key in found if key[0].endswith(("_total", "_count", "_sum")) and not _has_group_id(key[1])]
        totals.append({key: found[key] for key in adds_up})
        book.alive = False
    first, second = totals
    assert {key[0] for key in first} >= {
        "commwatch_collectives_total",
        "commwatch_steps_total",
        "commwatch_events_total",
    }
    assert second == pytest.approx({key: 2 * value for key, value in first.items()})
    info = next(dict(labels) for name, labels in samples(page(aggregate)) if name == "commwatch_job_info")
    assert info["restart"] == "1"


def _has_group_id(labels: frozenset[tuple[str, str]]) -> bool:
    """The groups of another life are other groups."""
    return "group_id" in dict(labels)


def test_step_without_length() -> None:
    """Two step marks at one instant (a damaged ring) do not cost the page: the step is counted and has no share."""
    aggregate = JobTable()
    book = aggregate.open("ring", {"job": "odd", "restart": 0, "rank": 0, "world_size": 2, "wall_offset_ns": 0})
    ingest_records(book, packed(mark(0, MS), mark(1, MS)))
    found = samples(page(aggregate))
    labels = frozenset({"job_id": "odd", "rank": "0"}.items())
    assert found.get(("commwatch_steps_total", labels), 0) <= 1
    assert ("commwatch_comm_share_ratio", labels) not in found


def test_labels_are_escaped() -> None:
    """Whatever a group or job is called, the page stays readable and gives the name back."""
    name = 'a "quoted"\nname\\with {braces} and \N{SNOWMAN}'
    aggregate = JobTable()
    book = aggregate.open("ring", {"job": name, "restart": 0, "rank": 0, "world_size": 2, "wall_offset_ns": 0})
    book.learn([group_entry(label=name)])
    ingest_records(book, packed(operation(start_ns=MS, end_ns=2 * MS)))
    text = page(aggregate)
    assert "\n\n" not in text
    labels = [dict(labels) for metric, labels in samples(text) if metric == "commwatch_collectives_total"]
    assert labels == [{"job_id": name, "rank": "0", "group": name, "op": "all_reduce"}]


if __name__ == "__main__":
    assert sys.argv[1:] == ["--write"], __doc__
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(golden_page())
