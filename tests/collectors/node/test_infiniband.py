"""RDMA ports, from recorded ``/sys`` trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from commwatch_collectors.node.infiniband import EVENTS, HW_EVENTS, Infiniband, rate
from commwatch_collectors.node.nics import Nic, Traffic
from tests.trees import say, unpack, vanish

MLX5_0 = "sys/class/infiniband/mlx5_0/ports/1"


def ports(tree: Path) -> tuple[Infiniband, dict[str, Nic]]:
    """A reader that has looked, and what it found."""
    reader = Infiniband(tree / "sys")
    return reader, {nic.name: nic for nic in reader.nics()}


def test_infiniband(tmp_path: Path) -> None:
    """A port has NCCL's name, its rate in bytes, its place and its network device; data counters are words of four bytes."""
    reader, found = ports(unpack("infiniband", tmp_path))
    assert list(found) == ["mlx5_0:1", "mlx5_1:1"]
    first = found["mlx5_0:1"]
    assert (first.kind, first.state, first.up, first.speed, first.netdev) == (
        "infiniband",
        "active",
        True,
        50e9,
        "ibs1",
    )
    assert first.function is not None
    assert (first.function.address, first.function.numa_node) == ("0000:1a:00.0", 0)
    counts = reader.counts()["mlx5_0:1"]
    assert counts.received == Traffic(1_000_000_000_000, 1_000_000_000, 0, None)
    assert counts.sent == Traffic(2_000_000_000_000, 2_000_000_000, None, 0)


def test_events(tmp_path: Path) -> None:
    """Errors, congestion and retransmissions are there by the names of their files, and nothing that the port does not count."""
    reader, found = ports(unpack("infiniband", tmp_path))
    events = reader.events(found["mlx5_1:1"])
    assert (events["link_downed"], events["symbol_error"]) == (1, 7)
    assert set(EVENTS) <= set(events)
    assert "np_cnp_sent" not in events  # RoCE only
    assert reader.events(found["mlx5_0:1"])["port_xmit_wait"] == 123_456
    assert set(events) <= {*EVENTS, *HW_EVENTS}


def test_roce(tmp_path: Path) -> None:
    """A RoCE port has its network device and its congestion counters; one that is down has no rate, whatever its file contains."""
    reader, found = ports(unpack("roce", tmp_path))
    first, second = found["mlx5_0:1"], found["mlx5_1:1"]
    assert (first.kind, first.speed, first.netdev) == ("roce", 12.5e9, "ens1f0np0")
    events = reader.events(first)
    assert (events["np_cnp_sent"], events["np_ecn_marked_roce_packets"], events["rp_cnp_handled"]) == (5, 6, 7)
    counts = reader.counts()["mlx5_0:1"]
    assert (counts.received.errors, counts.sent.drops) == (2, 3)
    assert (second.up, second.state, second.speed) == (False, "down", None)
    # Without a GID its network device is that of its PCI function.
    assert second.netdev == "ens1f1np1"


def test_counters_missing(tmp_path: Path) -> None:
    """What is not counted, refused, or full is absent: EFA counts bytes, an old card 32 bits."""
    reader, found = ports(unpack("bare", tmp_path))
    counts = reader.counts()
    assert found["efa_0:1"].kind == "rdma"
    assert counts["efa_0:1"].received == Traffic(7000, None, None, 1)
    assert counts["efa_0:1"].sent.bytes == 8000
    assert counts["mlx4_0:1"].received.bytes is None  # stands still at 2**32 - 1
    assert counts["mlx4_0:1"].sent == Traffic(4000, None, None, None)
    assert reader.events(found["mlx4_0:1"]) == {}
    assert counts["mlx4_0:2"].sent.bytes is None
    assert (found["mlx4_0:1"].netdev, found["mlx4_0:2"].netdev) == ("ib0", "ib1")
    assert (found["mlx4_0:2"].state, found["mlx4_0:2"].up) == ("init", False)


def test_vanishes(tmp_path: Path) -> None:
    """A port that is pulled while it is watched is gone from the counters at once, and the others stay."""
    tree = unpack("infiniband", tmp_path)
    reader, _ = ports(tree)
    vanish(tree, "sys/class/infiniband/mlx5_0")
    assert set(reader.counts()) == {"mlx5_1:1"}
    assert [nic.name for nic in reader.nics()] == ["mlx5_1:1"]


def test_none(tmp_path: Path) -> None:
    """Without such devices there are none, and that is no error."""
    reader, found = ports(tmp_path)
    assert (reader.counts(), found) == ({}, {})


@pytest.mark.parametrize(
    ("words", "bits"),
    [
        ("800 Gb/sec (4X XDR)", 800e9),
        ("400 Gb/sec (4X NDR)", 400e9),
        ("200 Gb/sec (4X HDR)", 200e9),
        ("100 Gb/sec (4X EDR)", 100e9),
        ("56 Gb/sec (4X FDR)", 56e9 * 64 / 66),
        ("40 Gb/sec (4X QDR)", 32e9),
        ("2.5 Gb/sec (1X SDR)", 2e9),
        ("10 Gb/sec (4X)", 8e9),
    ],
)
def test_rates(words: str, bits: float) -> None:
    """A rate is what is left without the line code, which the kernel has taken off from EDR on."""
    assert rate(words, "infiniband") == pytest.approx(bits / 8)


def test_rates_of_roce() -> None:
    """On Ethernet the number is the rate, whatever generation of InfiniBand follows it."""
    assert rate("10 Gb/sec (1X QDR)", "roce") == 1.25e9


@pytest.mark.parametrize("words", ["", "0 Gb/sec (4X)", "unknown", "-22"])
def test_no_rate(words: str) -> None:
    """What is no rate is not known."""
    assert rate(words, "infiniband") is None


def test_state_not_told(tmp_path: Path) -> None:
    """A port without a state is neither up nor down."""
    tree = unpack("infiniband", tmp_path)
    vanish(tree, f"{MLX5_0}/state")
    say(tree, f"{MLX5_0}/link_layer", "Unknown")
    _, found = ports(tree)
    assert (found["mlx5_0:1"].up, found["mlx5_0:1"].state, found["mlx5_0:1"].kind) == (None, "unknown", "rdma")
