"""AMD GPUs, through a stand-in for ``amdsmi``: the same values under the same names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from commwatch_collectors.node.gpu import Driver, DriverTrouble, Measured, NoGpus, find, place_of
from commwatch_collectors.node.gpu_amd import AmdSource

FAKE = Path(__file__).parents[1] / "fake_amdsmi"


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The stand-in, where ``import amdsmi`` finds it."""
    monkeypatch.syspath_prepend(FAKE)
    sys.modules.pop("amdsmi", None)
    yield importlib.import_module("amdsmi")
    sys.modules.pop("amdsmi", None)


def test_two_cards(smi: ModuleType) -> None:
    """Every value that a GPU has is in base units; N/A is absent."""
    source = AmdSource()
    assert source.open() == Driver("amd", "6.10.5")
    first, second = source.read().gpus
    assert (first.card.index, first.card.bus_id, first.card.name) == (0, "0000:05:00.0", "AMD Instinct MI300X")
    assert first.measured == Measured(
        utilization=0.97,
        memory_utilization=0.33,
        memory_used_bytes=1 << 30,
        memory_total_bytes=196592 << 20,
        power_watts=650,
        power_limit_watts=750.0,
        temperature_celsius=66,
        clocks_hertz={"sm": 2.1e9, "memory": 1.3e9},
        throttled={"power_cap": False, "hardware_thermal": True},
        nvlink_bytes={"receive": 30 * 1024, "transmit": 3 * 1024},
        pcie_replays=9,
        ecc_errors={"corrected": 4, "uncorrected": 1},
        energy_joules=15250.0,
    )
    assert (second.measured.utilization, second.measured.memory_utilization) == (0.0, None)
    assert (second.measured.power_watts, second.measured.power_limit_watts) == (140, 750)
    source.close()
    assert smi.CALLS[-1] == "shut_down"


def test_trainers_card(smi: ModuleType) -> None:
    """A rank's GPU is found by what torch on ROCm reports: the serial number, or the PCI address."""
    source = AmdSource()
    source.open()
    gpus = source.read().gpus
    assert find(place_of({"uuid": "ba03d2c48a120001"}), gpus) == gpus[1]
    assert find(place_of({"uuid": "", "bus_id": "0000:05:00.0"}), gpus) == gpus[0]


def test_not_supported(smi: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails is absent, and nothing else."""
    names = ("power", "power_cap", "temperature", "clock", "energy", "ecc", "pcie", "metrics", "violation", "vram")
    monkeypatch.setattr(smi, "FAILS", dict.fromkeys(names, smi.NOT_SUPPORTED))
    source = AmdSource()
    source.open()
    first, _ = source.read().gpus
    assert (first.measured, first.lost) == (Measured(utilization=0.97, memory_utilization=0.33), None)


def test_older_version(smi: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that this version does not have yet is an answer that does not come."""
    monkeypatch.delattr(smi, "amdsmi_get_violation_status")
    source = AmdSource()
    source.open()
    first, _ = source.read().gpus
    assert (first.measured.throttled, first.measured.power_watts) == ({}, 650)


def test_lost_card(smi: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of which every call fails is lost; once all are, the driver has gone."""
    source = AmdSource()
    source.open()
    monkeypatch.setattr(smi, "FAILS", {("*", 1): smi.UNKNOWN})
    first, second = source.read().gpus
    assert (first.lost, second.measured) == (None, Measured())
    assert "AMD SMI" in str(second.lost)
    monkeypatch.setattr(smi, "FAILS", {("*", 0): smi.UNKNOWN, ("*", 1): smi.UNKNOWN})
    with pytest.raises(DriverTrouble, match="AMD SMI"):
        source.read()


def test_violations_are_looked_at_now_and_then(smi: ModuleType) -> None:
    """A value that takes a tenth of a second is queried every tenth time, and kept in between."""
    source = AmdSource()
    source.open()
    smi.CALLS.clear()
    assert all(source.read().gpus[0].measured.throttled["hardware_thermal"] for _ in range(20))
    assert smi.CALLS.count("violation") == 2 * 2


@pytest.mark.parametrize(
    ("fails", "error", "says"),
    [
        ({"init": 34}, NoGpus, "no AMD driver is loaded"),
        ({"init": 18}, DriverTrouble, "Error code: 18"),
        ({"asic": 7}, DriverTrouble, "Error code: 7"),
    ],
)
def test_cannot_open(
    smi: ModuleType, monkeypatch: pytest.MonkeyPatch, fails: dict[str, int], error: type[Exception], says: str
) -> None:
    """Without a driver there are no GPUs; any other error is a fault."""
    monkeypatch.setattr(smi, "FAILS", fails)
    with pytest.raises(error, match=says):
        AmdSource().open()


def test_no_cards(smi: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver without a GPU counts as no GPUs."""
    monkeypatch.setattr(smi, "CARDS", 0)
    with pytest.raises(NoGpus, match="no GPU"):
        AmdSource().open()


def test_not_installed() -> None:
    """A missing ``amdsmi`` is reported."""
    sys.modules.pop("amdsmi", None)
    with pytest.raises(NoGpus, match="not installed"):
        AmdSource().open()


def test_library_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that cannot find its library, and prints that to standard output, is loaded only once."""
    (tmp_path / "amdsmi.py").write_text("raise OSError('Could not load libamd_smi.so')")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("amdsmi", None)
    source = AmdSource()
    with pytest.raises(NoGpus, match="libamd_smi"):
        source.open()
    (tmp_path / "amdsmi.py").unlink()
    (tmp_path / "amdsmi.py").write_text("raise AssertionError('loaded twice')")
    with pytest.raises(NoGpus, match="libamd_smi"):
        source.open()
