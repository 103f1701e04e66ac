"""PCI functions: GPUs by their class, links, and how far two functions are from each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from commwatch_agent.reference.links import links
from commwatch_collectors.node.pci import Function, PciLink, address, distance, function_of, gpus, numa_nodes
from tests.trees import unpack


def placed(path: str, numa_node: int | None = 0) -> Function:
    """A function at a place."""
    parts = tuple(path.split("/"))
    return Function(parts[-1], parts, numa_node, None, None, None, None)


def test_gpus(tmp_path: Path) -> None:
    """GPUs are found without a driver, with place, model and link; the board's own VGA is none."""
    found = gpus(unpack("infiniband", tmp_path) / "sys")
    assert [gpu.address for gpu in found] == ["0000:19:00.0", "0000:49:00.0", "0000:99:00.0"]
    assert [gpu.numa_node for gpu in found] == [0, 0, 1]
    assert found[0].path == ("pci0000:16", "0000:16:01.0", "0000:17:00.0", "0000:18:00.0", "0000:19:00.0")
    assert (found[0].vendor, found[0].model, found[0].link) == (0x10DE, 0x2330, PciLink(32.0, 16))


def test_accelerator(tmp_path: Path) -> None:
    """An MI300X calls itself a processing accelerator, and is a GPU."""
    (gpu,) = gpus(unpack("roce", tmp_path) / "sys")
    assert (gpu.vendor, gpu.address) == (0x1002, "0000:22:00.0")


def test_numa_nodes(tmp_path: Path) -> None:
    """NUMA nodes are counted; if the kernel does not list them there is one."""
    assert numa_nodes(unpack("infiniband", tmp_path / "a") / "sys") == 2
    assert numa_nodes(unpack("bare", tmp_path / "b") / "sys") == 1


def test_link_not_told(tmp_path: Path) -> None:
    """A link that is down or virtual is not known."""
    function = function_of(str(unpack("bare", tmp_path) / "sys/class/net/ib0"))
    assert function is not None
    assert (function.link, function.most, function.numa_node) == (None, None, None)


def test_no_function(tmp_path: Path) -> None:
    """A virtual device has no PCI function."""
    assert function_of(str(unpack("roce", tmp_path) / "sys/class/net/bond0")) is None


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("pci0000:16/r/u/d0/gpu", "pci0000:16/r/u/d1/nic", "PIX"),  # one switch
        ("pci0000:16/r/dev.0", "pci0000:16/r/dev.1", "PIX"),  # two functions of one card
        ("pci0000:16/r/u/d0/u2/d2/gpu", "pci0000:16/r/u/d1/nic", "PXB"),  # a switch below a switch
        ("pci0000:16/r0/gpu", "pci0000:16/r1/nic", "PHB"),  # two ports of one host bridge
        ("pci0000:16/r/gpu", "pci0000:48/r/nic", "NODE"),
    ],
)
def test_distances(one: str, other: str, expected: str) -> None:
    """Distances are NCCL's, by what the paths of two functions have in common; the order of the two does not matter."""
    assert distance(placed(one), placed(other), 2) == expected
    assert distance(placed(other), placed(one), 2) == expected


def test_across_numa_nodes() -> None:
    """In different NUMA nodes it is SYS; where the firmware names no node, it is not known, but on a machine with one."""
    one, other = "pci0000:16/r/gpu", "pci0000:97/r/nic"
    assert distance(placed(one, 0), placed(other, 1), 2) == "SYS"
    assert distance(placed(one, None), placed(other, 1), 2) is None
    assert distance(placed(one, None), placed(other, None), 1) == "NODE"


@pytest.mark.parametrize(
    ("gts", "lanes", "key"),
    [
        (8.0, 8, "pcie3-x8"),
        (16.0, 16, "pcie4-x16"),
        (32.0, 8, "pcie5-x8"),
        (32.0, 16, "pcie5-x16"),
        (64.0, 16, "pcie6-x16"),
    ],
)
def test_bandwidth(gts: float, lanes: int, key: str) -> None:
    """The bandwidth of a link is that of the link catalogue."""
    assert PciLink(gts, lanes).bandwidth == pytest.approx(links()[key].bandwidth, rel=1e-3)


def test_old_links() -> None:
    """Up to 5 GT/s a fifth goes to the line code."""
    assert PciLink(5.0, 4).bandwidth == 2e9


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("00000000:17:00.0", "0000:17:00.0"),  # NVML
        ("0000:C1:00.0", "0000:c1:00.0"),
        ("c1:00.1", "0000:c1:00.1"),  # lspci
        ("00010000:01:00.0", "10000:01:00.0"),
        ("GPU-1234", None),
        ("", None),
    ],
)
def test_addresses(told: str, expected: str | None) -> None:
    """An address is understood in any spelling."""
    assert address(told) == expected
