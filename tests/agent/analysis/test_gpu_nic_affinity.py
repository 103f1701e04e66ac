"""Which network device the traffic of a rank's GPU goes through, and that the advice about a job hears of it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from commwatch_agent.analysis.advice_input import LAST_S, count, facts
from commwatch_agent.analysis.gpu_nic_affinity import for_traffic, places
from commwatch_agent.analysis.network_advice import Network
from commwatch_agent.model.host_views import GroupTraffic, HostView
from commwatch_agent.report import report, report_text
from commwatch_agent.report.job_advice import lately
from tests.agent.sources.test_host import Watched
from tests.helpers import EPOCH_NS, MS, Watch, end_rank, group_entry, mark, operation, write_ring

GPUS = {0: "00000000:19:00.0", 1: "00000000:49:00.0", 2: "00000000:99:00.0"}


@pytest.fixture
def host(tmp_path: Path) -> HostView:
    """Two sockets with an InfiniBand port on each."""
    return Watched("infiniband", tmp_path / "host").watch.view()


def carried_by(host: HostView, *devices: str) -> HostView:
    """The same host while these devices carry a job."""
    groups = [GroupTraffic("job", "data", "data-0", 1e9, [])]
    return replace(host, traffic=replace(host.traffic, carriers=list(devices), groups=groups))


def test_by_the_nearest(host: HostView) -> None:
    """If it is unknown which device carries the traffic, the nearest one is assumed, and the text says that it was not observed."""
    assert [(each.rank, each.nic, each.distance, each.seen) for each in places(GPUS, host)] == [
        (0, "mlx5_0:1", "PIX", False),
        (1, "mlx5_0:1", "NODE", False),
        (2, "mlx5_1:1", "PHB", False),
    ]


def test_by_what_carries(host: HostView) -> None:
    """Where one device carries all, the GPU on the other socket crosses to it, with a nearer one beside it."""
    far = places(GPUS, carried_by(host, "mlx5_0:1"))[2]
    assert (far.nic, far.distance, far.nearest, far.nearest_distance, far.seen) == (
        "mlx5_0:1", "SYS", "mlx5_1:1", "PHB", True,
    )  # fmt: skip
    both = places(GPUS, carried_by(host, "mlx5_0:1", "mlx5_1:1"))
    assert [each.distance for each in both] == ["PIX", "NODE", "PHB"]


def test_not_what_is_slow_or_down(host: HostView) -> None:
    """The port for management does not carry a job, nor does one that is down, nor a port's network device."""
    assert for_traffic(host.nics) == ["mlx5_0:1", "mlx5_1:1"]
    down = [replace(nic, up=False) if nic.device == "mlx5_0:1" else nic for nic in host.nics]
    assert for_traffic(down) == ["mlx5_1:1"]
    assert for_traffic([]) == []


@pytest.mark.parametrize(
    ("steps", "step_ms", "late"),
    [(19, 100, False), (20, 100, True), (20, 2, False), (2, 15_000, False), (3, 15_000, False)],
)
def test_late_rank_of_few_steps(tmp_path: Path, steps: int, step_ms: int, late: bool) -> None:
    """Of fewer than 20 steps, and of steps shorter than what was waited in all, nothing follows about who is late."""
    watch = Watch(tmp_path)
    for rank in (0, 1):
        records = [mark(0, MS)]
        for n in range(20):  # with few or short steps, some of it is outside of them
            at = (2 + 100 * n) * MS
            records.append(operation(start_ns=at + rank * 30 * MS, end_ns=at + 50 * MS, seq=n, size=1_000_000))
        records += [mark(n + 1, (1 + step_ms * (n + 1)) * MS) for n in range(steps)]
        records.sort(key=lambda fields: fields[10])
        group = group_entry(0, (0, 1), "data")
        end_rank(write_ring(watch.rings, records, [group], rank=rank, world_size=2))
    watch.tick()
    built = report.build(watch.agent, "job", watch.path, "")
    assert built is not None
    assert [line.wait_s for line in built.ranks] == [pytest.approx(0.6), pytest.approx(0)]
    assert built.wait_hours == pytest.approx(0.6 / 3600)
    assert [each.title for each in built.advice if each.rule == "straggler"] == [
        "rank 1 is late and the others wait for it"
    ] * late


def test_late_onset(tmp_path: Path) -> None:
    """A rank that is late only at the end of a long job is named by the last five minutes, and not by the whole job."""
    watch, steps, from_step = Watch(tmp_path), 700, 600
    rings = []
    for rank in (0, 1):
        records = [mark(0, MS)]
        for n in range(steps):
            at = (1 + 1000 * n) * MS
            begins = at + (400 if rank == 1 and n >= from_step else 100) * MS
            records += [operation(start_ns=begins, end_ns=at + 500 * MS, seq=n, size=4), mark(n + 1, at + 1000 * MS)]
        group = group_entry(0, (0, 1), "data")
        rings.append(write_ring(watch.rings, records, [group], slots=4096, rank=rank, world_size=2))
    watch.tick(steps * 1000 * MS)
    for ring in rings:
        ring.close(steps * 1000 * MS)
        ring.release()
    watch.tick((steps + 1) * 1000 * MS)
    now_ns = time.time_ns()
    list(watch.store.tidy(now_ns, 1 << 40, 1 << 40, now_ns))  # the history is old, and keeps 5 minutes together
    for last_s, late in ((None, []), (LAST_S, ["rank 1 is late and the others wait for it"])):
        built = report.build(watch.agent, "job", watch.path, "", last_s=last_s)
        assert built is not None
        assert [each.title for each in built.advice if each.rule == "straggler"] == late
        assert built.advice_last_s == (None if last_s is None else pytest.approx(last_s, abs=301))
        assert (f"what to try, {report_text.about(built.advice_last_s)}" in report_text.text(built)) == bool(
            built.advice
        )


def test_more_steps_than_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a job of more steps than are read, advice is about the steps and sums of the same time; tables, numbers and hours are of the whole job."""
    monkeypatch.setattr("commwatch_agent.analysis.advice_input.MOST_STEPS", 60)
    monkeypatch.setattr(
        "commwatch_agent.analysis.advice_input.time", SimpleNamespace(time_ns=lambda: EPOCH_NS + 200_000 * MS)
    )
    watch, group = Watch(tmp_path), group_entry(0, (0, 1), "data")
    rings = [write_ring(watch.rings, [mark(0, MS)], [group], rank=rank, world_size=2) for rank in (0, 1)]
    for n in range(100):
        at = (1 + 1000 * n) * MS
        for rank, ring in enumerate(rings):
            begins = at + (400 if rank == 1 and n >= 50 else 100) * MS
            ring.write(*operation(start_ns=begins, end_ns=at + 500 * MS, seq=n, size=4))
            ring.write(*mark(n + 1, at + 1000 * MS, exposed_ns=360 * MS))
        watch.tick(at + 1000 * MS)
    for ring in rings:
        ring.close(101_000 * MS)
        ring.release()
    watch.tick(102_000 * MS)
    built = report.build(watch.agent, "job", watch.path, "", last_s=None)
    assert built is not None
    assert [row.count for row in built.operations] == [200]
    assert built.ranks[0].wait_s == pytest.approx(50 * 0.3)
    (late,) = [each for each in built.advice if each.rule == "straggler"]
    assert late.saves_share == pytest.approx(0.3, abs=0.05)
    assert [line.steps for line in built.ranks] == [built.steps] * 2 == [100] * 2
    assert built.exposed_hours == pytest.approx((150 * 0.36 + 50 * 0.1) / 3600)  # no more than the communication
    assert built.latest_steps == 21
    assert "; only the latest 21 were read for medians and shares" in report_text.text(built, 250)


def test_checkpoint_names_no_rank(tmp_path: Path) -> None:
    """The ranks that wait while one writes a checkpoint do not make it a straggler: what they wait in a long step does not count."""
    watch = Watch(tmp_path)
    for rank in (0, 1):
        records, at = [mark(0, MS)], 1
        for n in range(60):
            pause = 30_000 if n == 40 else 0
            begins = at + (pause if rank == 0 else 0) + 50
            at += 1000 + pause
            records += [operation(start_ns=begins * MS, end_ns=(at - 850) * MS, seq=n, size=4), mark(n + 1, at * MS)]
        end_rank(write_ring(watch.rings, records, [group_entry(0, (0, 1), "data")], rank=rank, world_size=2))
    watch.tick()
    built = report.build(watch.agent, "job", watch.path, "")
    assert built is not None
    assert built.long_steps is not None
    assert (built.ranks[1].wait_s or 0) > 29  # it did wait
    assert [each.title for each in built.advice if each.rule in ("straggler", "uneven_work")] == []


@pytest.mark.parametrize(
    ("steps", "said"), [(1, "1, too few for step statistics"), (2, "2, too few"), (3, "3, median 100 ms, p95 170 ms")]
)
def test_report_of_few_steps(tmp_path: Path, steps: int, said: str) -> None:
    """Of fewer than three steps there is no median, no share and no verdict; no percentile lies below the median."""
    watch = Watch(tmp_path)
    ends = [1, 101, 131, 301][: steps + 1]
    records = [mark(n, end * MS) for n, end in enumerate(ends)]
    records.insert(1, operation(start_ns=2 * MS, end_ns=98 * MS))
    end_rank(write_ring(watch.rings, records, [group_entry()], world_size=1))
    watch.tick()
    built = report.build(watch.agent, "job", watch.path, "")
    assert built is not None
    assert built.steps == steps
    assert (built.comm_share is None) == (built.step_p95_s is None) == (steps < 3)
    text = report_text.text(built)
    assert said in text
    assert ("above 30%" in text) == (steps == 3)


def test_advice_of_a_job(host: HostView, tmp_path: Path) -> None:
    """A job whose groups cross nodes gets advice on the slot that limits its NIC, and on the rank that crosses NUMA nodes."""
    records = [mark(0, 1 * MS)]
    for n in range(20):
        at = (1 + 100 * n) * MS
        records += [
            operation(start_ns=at + 10 * MS, end_ns=at + 60 * MS, seq=n, size=1_000_000),
            mark(n + 1, at + 100 * MS, exposed_ns=50 * MS),
        ]
    watch = Watch(tmp_path)
    end_rank(write_ring(watch.rings, records, [group_entry(0, (0, 1), "data")], rank=0))
    watch.tick()
    (job,) = watch.agent.jobs()
    network = Network(places({0: GPUS[2]}, carried_by(host, "mlx5_0:1")), host.complaints)
    advice = lately(watch.agent, job, (), None, network=network, late=lambda _: {}, recorded=lambda: None)
    (slow,) = [each for each in advice if each.rule == "nic_below_its_rate"]
    assert slow.because[1].startswith("mlx5_1:1: 400 Gbit/s behind")
    counts = count(watch.agent, "job")
    known = facts(watch.agent, job, counts, (), network=network)
    assert known is not None
    assert [(each.rank, each.distance) for each in known.network.places] == [(0, "SYS")]
    alone = facts(watch.agent, job, counts, ())
    assert alone is not None
    assert not alone.network.complaints


def test_all_that_is_read_within_a_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If all steps that are read are within one slot of the history, the report has their median; advice, for which no sums fit, is left out."""
    monkeypatch.setattr("commwatch_agent.analysis.advice_input.MOST_STEPS", 40)
    watch, marks = Watch(tmp_path), [mark(n, (1 + 100 * n) * MS) for n in range(81)]
    ring = write_ring(watch.rings, marks, [group_entry(0, (0, 1), "data")], world_size=2)
    watch.tick(9_000 * MS)
    ring.close(9_000 * MS)
    ring.release()
    watch.tick(9_001 * MS)
    built = report.build(watch.agent, "job", watch.path, "")
    assert built is not None
    assert (built.steps, built.latest_steps) == (80, 40)
    assert built.step_p50_s == pytest.approx(0.1)
    assert built.advice == []
