"""The links between GPUs, from the names that drivers give."""

from __future__ import annotations

import pytest

from commwatch_agent.reference.hardware import GpuLink, link_of
from commwatch_agent.reference.links import links


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("Tesla V100-SXM2-16GB", "nvlink2"),
        ("Tesla V100-SXM3-32GB", "nvlink2"),
        ("NVIDIA A100-SXM4-40GB", "nvlink3"),
        ("NVIDIA A100-SXM4-80GB", "nvlink3"),
        ("NVIDIA H100 80GB HBM3", "nvlink4"),
        ("NVIDIA H200", "nvlink4"),
        ("NVIDIA H20", "nvlink4"),
        ("NVIDIA B200", "nvlink5"),
        ("NVIDIA GB200", "nvlink5"),
        ("AMD Instinct MI300X", "if-mi300x"),
    ],
)
def test_known(name: str, key: str) -> None:
    """GPUs that are only built with one kind of link have it; the catalogue has the link."""
    assert link_of([name] * 8) == GpuLink(key, 8)
    assert key in links()


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["NVIDIA H100 80GB HBM3"],
        ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"],
        ["NVIDIA H100 80GB HBM3", ""],
        *(
            [name] * 2
            for name in (
                "NVIDIA H100 PCIe",
                "NVIDIA H100 NVL",
                "NVIDIA H200 NVL",
                "NVIDIA A100-PCIE-40GB",
                "NVIDIA A100 80GB PCIe",
                "Tesla V100-PCIE-16GB",
                "NVIDIA A800-SXM4-80GB",
                "NVIDIA H800",
                "NVIDIA GH200 480GB",
                "NVIDIA L40S",
                "Tesla T4",
                "NVIDIA GeForce RTX 4090",
                "AMD Instinct MI250X",
                "",
            )
        ),
    ],
)
def test_not_known(names: list[str]) -> None:
    """One GPU, different ones, and those whose link their name does not tell have none."""
    assert link_of(names) is None


@pytest.mark.parametrize(
    ("ports", "nic"),
    [
        (["ib-ndr"] * 8, "ib-ndr"),
        (["roce-400g"] * 8 + ["roce-100g"] * 2, "roce-400g"),  # two for storage
        (["ib-ndr"] * 10, None),
        (["ib-ndr"] * 4, None),
        (["ib-ndr"] * 7 + ["roce-400g"], None),
        (["ib-ndr"] * 8 + [None], None),
        ([], None),
    ],
)
def test_network_card_of_each_gpu(ports: list[str | None], nic: str | None) -> None:
    """Each GPU has a network card of its own if there are as many fast ones as GPUs, and all alike."""
    assert link_of(["NVIDIA H200"] * 8, ports) == GpuLink("nvlink4", 8, nic)
