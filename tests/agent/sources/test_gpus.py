"""The GPUs of the agent: silent if there are none, down and logged once if they vanish, and joined to the ranks on them."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.model.node_counters import GPU_BUSY
from commwatch_agent.sources.gpus import Gpus, note_link
from commwatch_collectors.node.gpu import DriverTrouble, Gpu, GpuPlace, MigInstance, NoGpus, Snapshot, Xid, plain_uuid
from tests.agent.prometheus.test_metrics import exporter, samples
from tests.gpus import UUIDS, ToldSource, card, full, lost
from tests.helpers import MS, group_entry, identity, mark, operation, packed
from tests.trees import unpack

BOTH = Snapshot((full(0), full(1)))
GONE = DriverTrouble("NVML: Driver Not Loaded")
NOBODY = NoGpus("no NVIDIA driver is installed")


class Clock:
    """Seconds, as set by the test."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def watching(*script: Snapshot | NoGpus | DriverTrouble, wanted: str = "auto") -> tuple[Gpus, ToldSource, Clock]:
    """GPUs from a source that the test controls."""
    source, clock = ToldSource(*script), Clock()
    return Gpus(wanted, [source], clock, lambda: 1e9 + clock.now), source, clock


def later(gpus: Gpus, clock: Clock, seconds: int) -> None:
    """Let the thread read once a second."""
    for _ in range(seconds):
        clock.now += 1
        gpus.tick()


def test_no_cards_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    """A machine without a driver is no fault: no series, no message, the reason in the answer, and one attempt a minute."""
    caplog.set_level(logging.INFO, "commwatch")
    gpus, source, clock = watching(NOBODY)
    assert gpus.readings() == []
    later(gpus, clock, 600)
    assert gpus.readings() == []
    assert (gpus.state().state, gpus.state().says) == ("none", "no NVIDIA driver is installed")
    assert caplog.records == []
    assert source.opened <= 6 + 600 / 60


def test_busy() -> None:
    """How busy a GPU is, by the latest reading; of a part of it, or while it is not read, that is not known."""
    gpus, _, clock = watching(BOTH)
    place = GpuPlace(plain_uuid(UUIDS[1]), "", 0)
    assert gpus.busy(place) is None
    gpus.tick()
    assert gpus.busy(place) == full(1).measured.utilization is not None
    assert gpus.busy(replace(place, mig="instance")) is None
    assert gpus.busy(GpuPlace("other", "", 0)) is None
    clock.now += 60
    assert gpus.busy(place) is None


def test_required(caplog: pytest.LogCaptureFixture) -> None:
    """If the user requires GPUs and there are none, the collector is down and logs the reason once."""
    gpus, _, clock = watching(NOBODY, wanted="required")
    later(gpus, clock, 600)
    assert gpus.readings() == [("gpu", None)]
    assert [record.getMessage() for record in caplog.records] == [
        "collector gpu is down: no NVIDIA driver is installed"
    ]


def test_broken_driver(caplog: pytest.LogCaptureFixture) -> None:
    """A driver that is there and does not work is a fault even if it never did."""
    gpus, _, clock = watching(GONE)
    later(gpus, clock, 100)
    assert (gpus.readings(), gpus.state().state) == ([("gpu", None)], "down")
    assert len(caplog.records) == 1


def test_off() -> None:
    """Switched off, no driver is touched."""
    gpus, source, clock = watching(BOTH, wanted="off")
    later(gpus, clock, 3)
    assert (gpus.readings(), gpus.state().state, source.opened) == ([], "off", 0)


def test_driver_goes_and_returns(caplog: pytest.LogCaptureFixture) -> None:
    """If a driver vanishes, the collector is down, has no old values, and logs it once; it tries at growing intervals, and recovers."""
    caplog.set_level(logging.INFO, "commwatch")
    gpus, source, clock = watching(BOTH, GONE, NOBODY, NOBODY, NOBODY, GONE, BOTH)
    gpus.tick()
    (name, readings), *_ = gpus.readings()
    assert (name, len(readings or ()) > 20) == ("gpu", True)
    later(gpus, clock, 1)
    assert (gpus.readings(), source.closed) == ([("gpu", None)], 1)
    assert gpus.state().says == "NVML: Driver Not Loaded"
    later(gpus, clock, 1 + 2 + 4 + 8 + 16)
    assert gpus.state().state == "up"
    later(gpus, clock, 100)
    assert [record.getMessage() for record in caplog.records] == [
        "2 GPUs, nvidia driver 550.54.15",
        "collector gpu is down: NVML: Driver Not Loaded",
        "collector gpu works again",
    ]
    assert source.opened == 6


def test_driver_that_hangs() -> None:
    """A call that never returns blocks nothing else: for ten seconds the last values stay, then the collector is down."""
    gpus, _, clock = watching(BOTH)
    gpus.tick()
    clock.now += 10
    assert gpus.state().state == "up"
    assert [(each.kind, each.device) for each in gpus.counters()] == [(GPU_BUSY, "0"), (GPU_BUSY, "1")]
    clock.now += 1
    assert gpus.counters() == []
    assert gpus.readings() == [("gpu", None)]
    assert "has not answered for 11 s" in str(gpus.state().says)
    gpus.tick()
    assert gpus.state().state == "up"


def test_lost_card_is_looked_for() -> None:
    """While a card is lost the driver is opened anew once a minute, and not otherwise; Xids go on counting."""
    with_xid = Snapshot((full(0), lost(1)), (Xid(UUIDS[1], 79),))
    gpus, source, clock = watching(BOTH, with_xid, Snapshot((full(0), lost(1))))
    later(gpus, clock, 59)
    assert source.opened == 1
    later(gpus, clock, 100)
    assert source.opened == 3
    source.script = [BOTH]
    later(gpus, clock, 300)
    assert source.opened == 3
    ((_, readings),) = gpus.readings()
    assert ("gpu_xid_errors_total", ("1", "79"), 1) in (readings or [])


def test_first_that_finds_cards() -> None:
    """The first of several libraries that finds GPUs is used; if none does, all reasons are reported together."""
    clock = Clock()
    amd = ToldSource(Snapshot((full(0),)))
    gpus = Gpus("auto", [ToldSource(NOBODY), amd], clock)
    gpus.tick()
    assert (gpus.state().state, amd.opened) == ("up", 1)
    nobody = Gpus("auto", [ToldSource(NOBODY), ToldSource(NoGpus("amdsmi is not installed"))], clock)
    nobody.tick()
    assert nobody.state().says == "no NVIDIA driver is installed; amdsmi is not installed"


# -- ranks ------------------------------------------------------------------------------------


def rank(aggregate: JobTable, number: int, gpu: object, job: str = "train") -> RankTotals:
    """A rank that spends a fifth of its steps communicating, and has left word of its card."""
    book = aggregate.open(f"{job}-{number}", identity(job, number, wall_offset_ns=0))
    book.learn([group_entry(), {"gpu": gpu}])
    records = [mark(0, MS)]
    for n in range(1, 9):
        start = n * 100 * MS
        records += [operation(start_ns=start - 30 * MS, end_ns=start - 10 * MS, seq=n), mark(n, start)]
    ingest_records(book, packed(*records))
    return book


def test_ranks_beside_their_cards() -> None:
    """Each rank appears at the GPU it computes on, its comm share beside the GPU's utilisation; unknown ranks are named."""
    gpus, _, _ = watching(Snapshot((full(0), full(1)), (Xid(UUIDS[1], 31), Xid(UUIDS[1], 79))))
    gpus.tick()
    aggregate = JobTable()
    rank(aggregate, 0, {"uuid": UUIDS[1].removeprefix("GPU-"), "index": 0})
    rank(aggregate, 1, {"uuid": "", "bus_id": "00000000:1B:00.0", "index": 0})
    rank(aggregate, 2, {"uuid": UUIDS[5], "index": 0})
    rank(aggregate, 3, "nonsense")
    rank(aggregate, 4, {"uuid": UUIDS[0], "index": 0}).alive = False
    view = gpus.view(aggregate.jobs.values(), 900 * MS)
    assert [[on.rank for on in each.ranks] for each in view.gpus] == [[1], [0]]
    assert view.gpus[1].ranks[0].comm_share == pytest.approx(0.2, abs=0.01)
    assert (view.gpus[1].gpu.measured.utilization, view.gpus[1].ranks[0].mig) == (0.98, None)
    assert [(xid.xid, xid.at) for xid in view.gpus[1].xids] == [(79, 1e9 + 100), (31, 1e9 + 100)]
    assert view.gpus[0].xids == []
    assert [(who.rank, who.uuid) for who in view.elsewhere] == [(2, UUIDS[5].removeprefix("GPU-"))]


def test_place_outlives_the_driver() -> None:
    """Who sits where does not change when the driver goes away, nor when the card is lost."""
    gpus, _, clock = watching(Snapshot((full(0), lost(1))), GONE)
    where = GpuPlace(UUIDS[1].removeprefix("GPU-"), "", 0)
    assert (gpus.label(where), gpus.label(None)) == ("", "")
    later(gpus, clock, 2)
    assert gpus.state().state == "down"
    assert gpus.label(where) == "1"


def test_rank_info() -> None:
    """``commwatch_rank_info`` names the card by the number that ``/metrics`` gives it; empty where it is not known."""
    gpus, _, _ = watching(BOTH)
    gpus.tick()
    aggregate = JobTable()
    rank(aggregate, 0, {"uuid": UUIDS[1], "index": 0})
    rank(aggregate, 1, {"uuid": UUIDS[7], "index": 1})
    found = samples(exporter_page(aggregate, gpus))
    infos = {dict(labels)["rank"]: dict(labels)["gpu"] for name, labels in found if name == "commwatch_rank_info"}
    assert infos == {"0": "1", "1": ""}


def exporter_page(aggregate: JobTable, gpus: Gpus) -> str:
    """What Prometheus gets of an agent with these cards."""
    from prometheus_client import generate_latest

    return generate_latest(exporter(aggregate, gpus.readings(), gpus.label)).decode()


def test_series_of_eight_cards() -> None:
    """Eight cards that support everything add less than 300 series, so that a full node stays within 1,500."""
    gpus, _, _ = watching(Snapshot(tuple(map(full, range(8)))))
    gpus.tick()
    ((_, readings),) = gpus.readings()
    assert 200 < len(readings or []) <= 300


def test_card_that_was_never_identified() -> None:
    """GPUs without a UUID (lost before the agent started) get no rank, and are distinguished by their number."""
    nameless = [Gpu(replace(card(at), uuid="", bus_id=""), lost="NVML: GPU is lost") for at in (0, 1)]
    gpus, _, _ = watching(Snapshot(tuple(nameless)))
    gpus.tick()
    assert gpus.label(GpuPlace("", "", 0)) == ""
    ((_, readings),) = gpus.readings()
    assert len(readings or []) == 4


def test_link_is_noted_once(tmp_path: Path) -> None:
    """The link of known GPUs is written when they are first read; GPUs that do not count bytes on their links, or are divided, have none."""

    def noted(*gpus: Gpu) -> dict[str, str]:
        watched = Gpus(
            "auto",
            [ToldSource(Snapshot(gpus), Snapshot(gpus))],
            Clock(),
            seen=partial(note_link, tmp_path, "node1", sys=tmp_path),
        )
        watched.tick()
        return {path.name: path.read_text() for path in tmp_path.iterdir()}

    def named(number: int, **measured: Any) -> Gpu:
        gpu = full(number)
        about = replace(gpu.card, name="NVIDIA H100 80GB HBM3", mig=())
        return replace(gpu, card=about, measured=replace(gpu.measured, **{"nvlink_bytes": {"transmit": 1}, **measured}))

    assert noted(named(0), named(1)) == {"node1.link": "2 x nvlink4\n"}
    assert noted(named(0), named(1, nvlink_bytes={})) == {}
    assert noted(named(0), named(1)) != {}
    divided = replace(named(1), card=replace(named(1).card, mig=(MigInstance("uuid", "", 0, 0),)))
    assert noted(named(0), divided) == {}


def test_network_cards_are_noted(tmp_path: Path) -> None:
    """With the link of the GPUs goes that of their network cards, as the node has them."""
    tree = unpack("infiniband", tmp_path / "node") / "sys"
    note_link(tmp_path / "kept", "node1", [full(0), full(1)], sys=tree)
    assert (tmp_path / "kept" / "node1.link").read_text() == "2 x nvlink4, each with ib-ndr\n"


def test_link_that_cannot_be_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where the link cannot be written, GPUs are read all the same, and one line says why."""
    (tmp_path / "file").touch()
    gpu = full(0)
    both = tuple(replace(gpu, card=replace(gpu.card, name="NVIDIA H200", index=n, mig=())) for n in range(2))
    watched = Gpus(
        "auto",
        [ToldSource(Snapshot(both))],
        Clock(),
        seen=partial(note_link, tmp_path / "file" / "x", "node1", sys=tmp_path),
    )
    watched.tick()
    assert watched.state().state == "up"
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said.startswith("cannot store the link of the GPUs")
