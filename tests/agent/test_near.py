"""Which network device the traffic of a rank's GPU goes through, and that the advice about a job hears of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from commwatch import report
from commwatch.facts import Counts, facts
from commwatch.host_views import HostView
from commwatch.near import for_traffic, places
from commwatch.traffic import GroupTraffic
from tests.agent.test_host import Watched
from tests.helpers import MS, Watch, end_rank, group_entry, mark, operation, write_ring

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
    """Where it is not known what carries the traffic, the nearest device is taken, and it is said that this was not seen."""
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
    [(19, 100, False), (20, 100, True), (20, 5, False), (2, 15_000, False), (3, 15_000, False)],
)
def test_late_rank_of_few_steps(tmp_path: Path, steps: int, step_ms: int, late: bool) -> None:
    """Of fewer than 20 steps, and of steps shorter than what was waited in all, nothing follows about who is late."""
    watch = Watch(tmp_path)
    for rank in (0, 1):
        records = [mark(0, MS)]
        for n in range(4):  # some of it outside of the steps
            at = (2 + 100 * n) * MS
            records.append(operation(start_ns=at + rank * 30 * MS, end_ns=at + 50 * MS, seq=n, size=1_000_000))
        records += [mark(n + 1, (1 + step_ms * (n + 1)) * MS) for n in range(steps)]
        group = group_entry(0, (0, 1), "data")
        end_rank(write_ring(watch.rings, records, [group], rank=rank, world_size=2))
    watch.tick()
    built = report.build(watch.agent, "job", watch.path, "")
    assert built is not None
    assert [line.wait_s for line in built.ranks] == [pytest.approx(0.12), pytest.approx(0)]
    assert built.wait_hours == pytest.approx(0.12 / 3600)
    assert [each.title for each in built.advice if each.rule == "straggler"] == [
        "rank 1 is late, the others wait for it"
    ] * late


@pytest.mark.parametrize(
    ("steps", "said"), [(1, "1, too few for figures"), (2, "2, too few"), (3, "3, median 100 ms, p95 170 ms")]
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
    text = report.text(built)
    assert said in text
    assert ("bottleneck" in text) == (steps == 3)


def test_advice_of_a_job(host: HostView, tmp_path: Path) -> None:
    """A job whose groups cross nodes is told of the slot that holds its NIC back, and of the rank that crosses NUMA."""
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
    built = report.build(watch.agent, "job", watch.path, "", (), host)
    assert built is not None
    (slow,) = [each for each in built.advice if each.rule == "nic_below_its_rate"]
    assert slow.because[1].startswith("mlx5_1:1: 400 Gbit/s behind")
    (job,) = watch.agent.jobs()
    steps = watch.agent.steps(0, 1 << 62, "job", None, 100)
    counts = Counts(built.operations, [], built.group_shares)
    known = facts(watch.agent, job, steps, counts, (), carried_by(host, "mlx5_0:1"), {0: GPUS[2]})
    assert known is not None
    assert [(each.rank, each.distance) for each in known.network.places] == [(0, "SYS")]
    alone = facts(watch.agent, job, steps, counts, ())
    assert alone is not None
    assert not alone.network.complaints


@pytest.mark.parametrize(
    ("comm", "exposed", "waiting", "messages", "says"),
    [
        (0.3, 0.3, None, None, ""),
        (None, None, None, None, ""),
        (0.52, 0.5, None, None, "above 30 %, communication is the bottleneck"),
        (0.52, 0.5, 0.2, 0.05, "above 30 %, communication is the bottleneck"),
        (0.52, 0.05, 0.44, None, "above 30 %, but hidden behind compute"),
        (
            0.52,
            0.5,
            0.44,
            None,
            "above 30 %, most of it waiting for late ranks: they are the bottleneck, not the network",
        ),
        (
            0.52,
            0.5,
            0.1,
            0.3,
            "above 30 %, most of it waiting for messages: uneven stages or a late rank are likelier than the network",
        ),
        (
            0.41,
            0.4,
            0.2,
            0.01,
            "above 30 %, most of it waiting for late ranks and messages: uneven stages or a late rank are likelier than the network",
        ),
    ],
)
def test_bottleneck(
    comm: float | None, exposed: float | None, waiting: float | None, messages: float | None, says: str
) -> None:
    """Above 30 % communication is the bottleneck, unless it is hidden or is mostly waiting for late ranks."""
    assert report.bottleneck(comm, exposed, waiting, messages) == says
