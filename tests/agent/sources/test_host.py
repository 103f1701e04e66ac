"""The watch over a node, looking at recorded trees: rates, growth, distances, metrics, and what is wrong."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client import CollectorRegistry

from commwatch_agent.analysis.gpu_nic_affinity import places
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.model.host_views import HostView, NicView
from commwatch_agent.model.node_counters import SENT, NodeCounter
from commwatch_agent.prometheus.metrics import METRICS
from commwatch_agent.reference.links import links, of_device
from commwatch_agent.sources.host import MOST_VIRTUAL, HostWatch
from commwatch_agent.web.application import application
from commwatch_collectors.registry import Reading
from tests.helpers import idle_services
from tests.trees import say, unpack, vanish

S = 1_000_000_000
MLX5_0 = "sys/class/infiniband/mlx5_0/ports/1"


class Watched:
    """A recorded host under a watch whose clock is set by hand."""

    def __init__(self, name: str, at: Path) -> None:
        self.tree, self.now_ns = unpack(name, at), 0
        psutil.PROCFS_PATH = str(self.tree / "proc")
        self.watch = HostWatch(JobTable(), threading.RLock(), lambda: self.now_ns, self.tree / "sys")
        self.watch.tick()

    def later(self, seconds: float) -> HostView:
        """Look again some seconds later."""
        self.now_ns += int(seconds * S)
        self.watch.tick()
        return self.watch.view()

    def say(self, path: str, value: object) -> None:
        say(self.tree, path, value)

    def samples(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """What goes to /metrics, by name and labels."""
        return {(r.metric, r.labels): r.value for _, readings in self.watch.readings() for r in readings or ()}


def nic(view: HostView, device: str) -> NicView:
    """One device."""
    (found,) = (each for each in view.nics if each.device == device)
    return found


def said(view: HostView) -> dict[tuple[str, str], str]:
    """What is wrong, by device and kind."""
    return {(each.device, each.kind): each.says for each in view.complaints}


def test_nobody_has_looked() -> None:
    """Before the first sample there is an empty answer, and no metrics."""
    watch = HostWatch(JobTable(), threading.RLock(), lambda: 0)
    view = watch.view()
    assert (view.looked_at, view.nics, view.cpu, watch.readings()) == (None, [], None, [])


def test_rates(tmp_path: Path) -> None:
    """Rates cover the last seconds, utilisation is the busier direction over the speed; one sample gives neither."""
    watched = Watched("infiniband", tmp_path)
    first = nic(watched.watch.view(), "mlx5_0:1")
    assert (first.received_bytes_per_s, first.utilization) == (None, None)
    watched.say(f"{MLX5_0}/counters/port_xmit_data", 500_000_000_000 + 5_000_000_000)  # words
    view = watched.later(2)
    port = nic(view, "mlx5_0:1")
    assert (port.sent_bytes_per_s, port.received_bytes_per_s) == (10e9, 0)
    assert port.utilization == pytest.approx(10e9 / 50e9)
    assert NodeCounter(SENT, "mlx5_0:1", 10e9) in watched.watch.counters()
    assert (port.kind, port.link, port.netdev, port.state) == ("infiniband", "ib-ndr", "ibs1", "active")
    watched.say(f"{MLX5_0}/counters/port_xmit_data", 0)  # the driver was loaded anew
    assert nic(watched.later(1), "mlx5_0:1").sent_bytes_per_s is None


def test_cpu(tmp_path: Path) -> None:
    """Shares of the cores by mode; a core that handles all packets is visible."""
    watched = Watched("infiniband", tmp_path)
    watched.say(
        "proc/stat",
        "cpu  200100 1000 30000 700050 5000 0 4050 100 0 0\ncpu0 0 0 0 0 0 0 4050 0 0 0\ncpu1 0 0 0 0 0 0 0 0 0 0",
    )
    view = watched.later(1)
    assert view.cpu is not None
    assert view.cpu.cores == 2
    assert view.cpu.shares["user"] == pytest.approx(0.5)
    assert view.cpu.shares["softirq"] == pytest.approx(0.25)
    assert view.cpu.softirq_busiest == pytest.approx(0.5)
    assert view.memory is not None
    assert view.memory.available_bytes == 98_304_000 * 1024
    assert view.pressure == {"memory": 0.0}


def test_distances(tmp_path: Path) -> None:
    """Every GPU has its distance to every device; the nearest are those that can carry a job, not the management device."""
    view = Watched("infiniband", tmp_path).watch.view()
    assert view.numa_nodes == 2
    far = {gpu.pci.address: gpu.distances for gpu in view.gpus}
    assert far == {
        "0000:19:00.0": {"mlx5_0:1": "PIX", "mlx5_1:1": "SYS", "eth0": "NODE", "ibs1": "PIX"},
        "0000:49:00.0": {"mlx5_0:1": "NODE", "mlx5_1:1": "SYS", "eth0": "NODE", "ibs1": "NODE"},
        "0000:99:00.0": {"mlx5_0:1": "SYS", "mlx5_1:1": "PHB", "eth0": "SYS", "ibs1": "SYS"},
    }
    assert [gpu.nearest for gpu in view.gpus] == [["mlx5_0:1"], ["mlx5_0:1"], ["mlx5_1:1"]]
    assert {gpu.vendor for gpu in view.gpus} == {"nvidia"}


def test_places_of_ranks(tmp_path: Path) -> None:
    """By the addresses of their GPUs ranks have a nearest device; unknown GPUs have no place."""
    view = Watched("infiniband", tmp_path).watch.view()
    found = places({0: "00000000:19:00.0", 3: "0000:99:00.0", 5: "0000:aa:00.0", 6: "GPU-1"}, view)
    assert [(each.rank, each.nic, each.distance, each.seen) for each in found] == [
        (0, "mlx5_0:1", "PIX", False),
        (3, "mlx5_1:1", "PHB", False),
    ]


def test_a_slot_with_half_its_lanes(tmp_path: Path) -> None:
    """A port that its slot holds back is named, with what the card could do; the one with all lanes is not."""
    view = Watched("infiniband", tmp_path).watch.view()
    assert list(said(view)) == [("mlx5_1:1", "slow")]
    text = said(view)["mlx5_1:1", "slow"]
    assert "400 Gbit/s behind a PCI Express link of 32 GT/s x8 (252 Gbit/s), which could be 32 GT/s x16" in text


def test_errors_that_grow(tmp_path: Path) -> None:
    """Old errors are shown as counted; those that grow within ten minutes are a complaint until they are old."""
    watched = Watched("infiniband", tmp_path)
    port = nic(watched.watch.view(), "mlx5_1:1")
    assert (port.errors["link_downed"], port.errors_lately) == (1, {})
    watched.say(f"{MLX5_0}/counters/link_downed", 2)
    watched.say(f"{MLX5_0}/counters/symbol_error", 9)  # too few to speak of
    view = watched.later(10)
    assert nic(view, "mlx5_0:1").errors_lately == {"link_downed": 2, "symbol_error": 9}
    assert said(view)["mlx5_0:1", "errors"] == "2 link_downed within ten minutes"
    assert view.lately_s == 10
    for _ in range(61):
        view = watched.later(10)
    assert ("mlx5_0:1", "errors") not in said(view)
    assert view.lately_s == pytest.approx(600, abs=10)


def test_loss_and_congestion(tmp_path: Path) -> None:
    """Packets lost and congestion notifications are complaints by their share of the packets; a few are not."""
    watched = Watched("roce", tmp_path)
    counters, own = f"{MLX5_0}/counters", f"{MLX5_0}/hw_counters"
    watched.say(f"{counters}/port_xmit_packets", 8000 + 1_000_000)
    watched.say(f"{own}/out_of_sequence", 99)
    watched.say(f"{own}/rp_cnp_handled", 9_000)
    assert said(watched.later(10)) == {}
    watched.say(f"{own}/out_of_sequence", 200)
    watched.say(f"{own}/rp_cnp_handled", 20_000)
    found = said(watched.later(10))
    assert found["mlx5_0:1", "errors"] == "200 out_of_sequence of 1000000 packets within ten minutes"
    assert found["mlx5_0:1", "congestion"].startswith("19993 rp_cnp_handled")


def test_down(tmp_path: Path) -> None:
    """A device that is down and has carried traffic is missed; a port that never did is not."""
    watched = Watched("roce", tmp_path)
    assert said(watched.watch.view()) == {}  # mlx5_1 has no cable
    watched.say(f"{MLX5_0}/state", "1: DOWN")
    watched.say("sys/class/net/ens1f0np0/operstate", "down")
    assert said(watched.later(10)) == {("mlx5_0:1", "down"): "is down, but has carried traffic before"}


def test_slower_than_its_like(tmp_path: Path) -> None:
    """A port that came up with half the rate of the same model beside it is named."""
    watched = Watched("infiniband", tmp_path)
    watched.say(f"{MLX5_0}/rate", "200 Gb/sec (2X NDR)")
    view = watched.later(10)
    assert said(view)["mlx5_0:1", "slow"] == "200 Gbit/s, while mlx5_1:1, the same model, runs at 400 Gbit/s"
    assert nic(view, "mlx5_0:1").link == "ib-hdr"


def test_vanishes(tmp_path: Path) -> None:
    """A device that is removed is gone at the next sample, from the answer and from the metrics; the rest stays."""
    watched = Watched("infiniband", tmp_path)
    vanish(watched.tree, "sys/class/infiniband/mlx5_0")
    view = watched.later(1)
    assert [each.device for each in view.nics] == ["mlx5_1:1", "eth0", "ibs1"]
    assert {labels[0] for name, labels in watched.samples() if name.startswith("network_")} == {
        "mlx5_1:1",
        "eth0",
        "ibs1",
    }


def test_metrics(tmp_path: Path) -> None:
    """Ethernet and RDMA have one set of names; what is not known is absent; all names and labels are in the list of metrics."""
    watched = Watched("roce", tmp_path)
    found = watched.samples()
    for (name, labels), _ in found.items():
        assert len(METRICS[name].labels) == len(labels), name
    assert found["network_bytes_total", ("mlx5_0:1", "transmit")] == 8_000_000  # words of four
    assert found["network_bytes_total", ("ens1f0np0", "transmit")] == 6_000_000
    assert found["network_drops_total", ("mlx5_0:1", "transmit")] == 3
    assert found["network_speed_bytes_per_second", ("mlx5_0:1",)] == 12.5e9
    assert found["network_up", ("mlx5_1:1",)] == 0
    assert found["infiniband_events_total", ("mlx5_0:1", "rp_cnp_handled")] == 7
    assert found["network_link_downs_total", ("ens1f0np0",)] == 1
    info = ("mlx5_0:1", "roce", "ens1f0np0", "0000:21:00.0", "0", "roce-100g")
    assert found["network_info", info] == 1
    for absent in ("veth1", "mlx5_1:1"):
        assert ("network_speed_bytes_per_second", (absent,)) not in found
    assert not any(
        labels[0] == "ens1f1np1" for name, labels in found if name.startswith("network")
    )  # never moved a byte


def test_most_virtual(tmp_path: Path) -> None:
    """Of many virtual devices (a node of Kubernetes) only the oldest are shown, so that series do not grow with the pods."""
    watched = Watched("roce", tmp_path)
    lines = (watched.tree / "proc/net/dev").read_text().splitlines()
    for n in range(200):
        lines.append(f"cali{n}: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0")
        folder = watched.tree / f"sys/devices/virtual/net/cali{n}"
        folder.mkdir()
        (folder / "ifindex").write_text(f"{100 + n}\n")
        (watched.tree / f"sys/class/net/cali{n}").symlink_to(f"../../devices/virtual/net/cali{n}")
    watched.say("proc/net/dev", "\n".join(lines))
    view = watched.later(10)
    virtual = [each.device for each in view.nics if each.kind == "virtual"]
    assert len(virtual) == MOST_VIRTUAL
    assert virtual[:4] == ["bond0", "bond0.7", "veth1", "cali0"]
    assert len(watched.samples()) < 300


def test_source_that_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without /proc/net/dev the network collector is down, which is logged once; RDMA ports are still read; then it recovers."""
    watched = Watched("infiniband", tmp_path)
    kept = (watched.tree / "proc/net/dev").read_text()
    vanish(watched.tree, "proc/net/dev")
    with caplog.at_level(logging.WARNING, "commwatch"):
        watched.later(1)
        view = watched.later(10)
    assert len(caplog.records) == 1
    assert [each.device for each in view.nics] == ["mlx5_0:1", "mlx5_1:1"]
    assert dict(watched.watch.readings())["network"] is None
    watched.say("proc/net/dev", kept.rstrip())
    assert nic(watched.later(10), "eth0").received_bytes == 1_000_000
    assert dict(watched.watch.readings())["network"]
    vanish(watched.tree, "proc/stat")
    assert watched.later(1).cpu is None


def test_series_of_a_full_node(tmp_path: Path) -> None:
    """Eight ports of a node have 200 series at most: with the 960 of its ranks they stay within the budget of 1,500."""
    watched = Watched("infiniband", tmp_path)
    of_port = sum("mlx5_0:1" in labels for _, labels in watched.samples())
    assert 20 < of_port <= 25


def test_route(tmp_path: Path) -> None:
    """The route answers with all of it, as JSON."""
    watched = Watched("infiniband", tmp_path)
    view = watched.later(1)
    app = application(idle_services(QueryService(tmp_path / "h.sqlite"), host=watched.watch), CollectorRegistry())

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://agent") as client:
            return await client.get("/api/v1/host")

    answer = asyncio.run(ask())
    assert answer.status_code == 200
    assert answer.json() == json.loads(json.dumps(asdict(view)))


def test_stuck(tmp_path: Path) -> None:
    """While a driver blocks the reading, no old values are shown as new: both collectors are down."""
    watched = Watched("infiniband", tmp_path)
    watched.later(1)
    assert watched.watch.counters()
    watched.now_ns += 31 * S
    assert watched.watch.counters() == []
    assert watched.watch.readings() == [("network", None), ("infiniband", None)]
    watched.later(0)
    assert all(found for _, found in watched.watch.readings())


def test_stacked_devices(tmp_path: Path) -> None:
    """What counts the same bytes again (bond, VLAN, IPoIB) is left out of the traffic; a RoCE port and its device count different ones."""
    watched = Watched("roce", tmp_path / "a")
    found = set(watched.later(1).traffic.sent_bytes)
    assert found == {"mlx5_0:1", "mlx5_1:1", "ens1f0np0", "ens1f1np1", "veth1"}
    assert set(Watched("infiniband", tmp_path / "b").later(1).traffic.sent_bytes) == {"mlx5_0:1", "mlx5_1:1", "eth0"}


@pytest.mark.parametrize(
    ("kind", "speed", "key"),
    [
        ("ethernet", 12.5e9, "eth-100g"),
        ("ethernet", 125e6, "eth-1g"),
        ("infiniband", 100e9, "ib-xdr"),
        ("roce", 50e9, "roce-400g"),
        ("roce", 3.125e9, None),
        ("infiniband", 4e9, None),
        ("virtual", 12.5e9, None),
        ("ethernet", None, None),
    ],
)
def test_entry_of_the_catalogue(kind: str, speed: float | None, key: str | None) -> None:
    """A device has the entry of the catalogue for its kind and speed, or none."""
    assert of_device(kind, speed) == key
    assert key is None or links()[key].bandwidth == speed


def test_readings_of_this_machine() -> None:
    """This machine can be looked at, twice."""
    watch = HostWatch(JobTable(), threading.RLock(), iter(range(0, 100 * S, S)).__next__)
    watch.tick()
    watch.tick()
    assert watch.view().cpu is not None
    readings: list[tuple[str, Any]] = watch.readings()
    assert {name for name, found in readings if found is None} == set()
    assert all(isinstance(each, Reading) for _, found in readings for each in found)
