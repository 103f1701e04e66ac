"""NVIDIA GPUs, through the real ``nvidia-ml-py`` and a stand-in for the library below it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pynvml  # type: ignore[import-untyped]
import pytest

from commwatch_collectors.node.gpu import Driver, DriverTrouble, Gpu, Measured, NoGpus, Xid
from commwatch_collectors.node.gpu_nvidia import NvidiaSource
from commwatch_collectors.node.nvlinks import NvLink
from tests.gpus import LIBRARY, UUIDS, Script, build, full
from tests.helpers import clean_env

Load = Callable[..., Script]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The stand-in, and one like drivers before 535."""
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "old").mkdir()
    return {"new": build(folder), "old": build(folder / "old", "-DBEFORE_535")}


@pytest.fixture
def load(libraries: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Make ``pynvml`` use a fresh stand-in; return the script that sets its answers."""

    def loaded(which: str = "new") -> Script:
        copy = tmp_path / f"{which}-{LIBRARY}"  # another file is another library, with a memory of its own
        shutil.copy(libraries[which], copy)
        monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(copy)))
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        monkeypatch.setenv("FAKE_NVML", str(tmp_path / "script.txt"))
        monkeypatch.setenv("FAKE_NVML_LOG", str(tmp_path / "calls"))
        return Script(tmp_path / "script.txt")

    return loaded


def opened() -> NvidiaSource:
    """The source, open."""
    source = NvidiaSource()
    source.open()
    return source


def gpus(source: NvidiaSource) -> tuple[Gpu, ...]:
    """One reading of the GPUs."""
    return source.read().gpus


def test_two_cards(load: Load) -> None:
    """Every value of two healthy cards is in base units: watts, joules, hertz, bytes (NVLink's KiB), shares of one."""
    load()
    source = NvidiaSource()
    assert source.open() == Driver("nvidia", "550.54.15", "12.4")
    first, second = gpus(source)
    assert (first.card, first.lost) == (full(0).card, None)
    assert first.measured.nvlink_bytes == {"transmit": 4_000_000_000 * 1024, "receive": 5_000_000_000 * 1024}
    assert first.measured.nvlink_errors == {"replay": 1, "recovery": 0, "crc": 12}
    expected = replace(
        full(0).measured, nvlink_bytes=first.measured.nvlink_bytes, nvlink_errors=first.measured.nvlink_errors
    )
    assert first.measured == expected
    assert (second.card.index, second.card.uuid, second.card.bus_id) == (1, UUIDS[1], "0000:43:00.0")
    assert (second.measured.utilization, second.measured.power_watts) == (0.0, 70.5)
    assert not any(second.measured.throttled.values())
    source.close()


def test_single_links(load: Load, tmp_path: Path) -> None:
    """Each NVLink is read by itself, every tenth time: whether it is up, its bytes and its errors; what a link does not count is missing."""
    script = load()
    script.say(
        "0.field.91 3",
        "0.nvmlDeviceGetNvLinkState.0 1",
        "0.nvmlDeviceGetNvLinkState.1 0",
        "0.nvmlDeviceGetNvLinkState.2 !999",
    )
    script.say(
        "0.field.138.0 7",
        "0.field.139.0 8",
        "0.field.161.0 1",
        "0.field.162.0 0",
        "0.field.163.0 12",
        "0.field.208.0 !3",
    )
    script.say("0.field.202.2 99", "0.field.138.2 !3", "0.field.215.2 4")
    source = opened()
    first, second = gpus(source)
    assert first.measured.nvlinks == (
        NvLink(0, True, {"transmit": 7 * 1024, "receive": 8 * 1024}, {"crc": 12, "replay": 1, "recovery": 0}),
        NvLink(1, False),
        NvLink(2, None, {"transmit": 99}, {"recovery": 4}),
    )
    assert second.measured.nvlinks == ()
    script.say("0.field.138.0 9")
    for _ in range(9):
        assert gpus(source)[0].measured.nvlinks == first.measured.nvlinks
    assert gpus(source)[0].measured.nvlinks[0].bytes["transmit"] == 9 * 1024
    calls = Counter((tmp_path / "calls").read_text().split())
    assert calls["nvmlDeviceGetNvLinkState.0"] == 2


def test_what_a_card_does_not_support(load: Load, tmp_path: Path) -> None:
    """A value that is not supported or not allowed is absent, the others stay; it is not queried in every reading."""
    script = load()
    script.say("0.nvmlDeviceGetPowerUsage !3", "0.nvmlDeviceGetTotalEccErrors.0 !4", "0.nvmlDeviceGetTemperature.0")
    script.say("0.field.138 !3", "0.field.202 77", "0.field.139 !2")
    source = opened()
    for _ in range(5):
        first, second = gpus(source)
        assert (first.measured.power_watts, first.measured.temperature_celsius) == (None, None)
        assert first.measured.ecc_errors == {"uncorrected": 0}
        assert first.measured.nvlink_bytes == {"transmit": 77}  # where the one counter is missing, the newer one
        assert first.measured.power_limit_watts == 700.0
        assert (second.measured.power_watts, second.lost) == (70.5, None)
    calls = Counter((tmp_path / "calls").read_text().split())
    assert calls["nvmlDeviceGetPowerUsage"] == 1 + 5
    assert calls["nvmlDeviceGetTotalEccErrors.0"] == 1 + 5
    assert calls["nvmlDeviceGetFieldValues"] == 2 * 5 + 2  # and the number of links, once


def test_asked_again_in_time(load: Load) -> None:
    """What was refused is tried again some minutes later: rights and modes change."""
    script = load()
    script.say("0.nvmlDeviceGetPowerUsage !4")
    source = opened()
    gpus(source)
    script.say("0.nvmlDeviceGetPowerUsage 100000")
    assert gpus(source)[0].measured.power_watts is None
    assert any(gpus(source)[0].measured.power_watts == 100.0 for _ in range(700))


def test_passing_errors(load: Load) -> None:
    """A temporary error leaves one value out of one reading."""
    script = load()
    source = opened()
    for code in (10, 999, 19):  # timeout, unknown, in use
        script.say(f"0.nvmlDeviceGetPowerUsage !{code}")
        assert gpus(source)[0].measured.power_watts is None
        script.say("0.nvmlDeviceGetPowerUsage 1000")
        assert gpus(source)[0].measured.power_watts == 1.0


def test_card_that_only_errs(load: Load) -> None:
    """A card of which every call fails in any other way does not count as there, and does again once it answers."""
    script = load()
    source = opened()
    script.say("1.* !999")
    assert "Unknown Error" in str(gpus(source)[1].lost)
    script.say("1.*")
    assert gpus(source)[1].lost is None


@pytest.mark.parametrize("code", [15, 16])
def test_lost_card(load: Load, code: int) -> None:
    """A card that is lost in the middle has no values any more, the other keeps its own; opened anew, it may be back."""
    script = load()
    source = opened()
    assert gpus(source)[1].lost is None
    script.say(f"1.* !{code}")
    for _ in range(2):
        first, second = gpus(source)
        assert (first.lost, first.measured.utilization) == (None, 0.98)
        assert (second.card.uuid, second.measured) == (UUIDS[1], Measured())
        assert second.lost is not None
    source.close()
    source.open()  # still lost: it cannot even be identified, and is known by its place
    assert [(gpu.card.uuid, gpu.lost is None) for gpu in gpus(source)] == [(UUIDS[0], True), (UUIDS[1], False)]
    script.say("1.*")
    source.close()
    source.open()
    assert [gpu.lost for gpu in gpus(source)] == [None, None]


def test_card_that_is_gone(load: Load) -> None:
    """A card that is not even counted any more stays in sight as lost; the others keep their numbers, and it has its own when it returns."""
    script = load()
    source = opened()
    both = [f"0.{name}" for name in ("nvmlDeviceGetUUID", "nvmlDeviceGetPciInfo")]
    script.say("count 1", f"{both[0]} {UUIDS[1]}", f"{both[1]} 00000000:43:00.0")  # the second has become the first
    source.close()
    source.open()
    first, second = gpus(source)
    assert (first.card.index, first.card.uuid, first.lost) == (0, UUIDS[0], "it is no longer present")
    assert (second.card.index, second.card.uuid, second.lost) == (1, UUIDS[1], None)
    script.say("count 2", f"{both[0]} {UUIDS[0]}", f"{both[1]} 00000000:1B:00.0")
    source.close()
    source.open()
    assert [(gpu.card.index, gpu.card.uuid, gpu.lost) for gpu in gpus(source)] == [
        (0, UUIDS[0], None),
        (1, UUIDS[1], None),
    ]


@pytest.mark.parametrize(("code", "cards"), [(15, [("", False), (UUIDS[1], True)]), (4, [(UUIDS[1], True)])])
def test_lost_before_it_was_seen(load: Load, code: int, cards: list[tuple[str, bool]]) -> None:
    """A card that was lost before we came has a number and nothing else; one that is not ours to see is left out."""
    load().say(f"0.handle !{code}")
    found = gpus(opened())
    assert [(gpu.card.uuid, gpu.lost is None) for gpu in found] == cards
    assert [gpu.card.index for gpu in found] == [0, 1][-len(cards) :]


def test_driver_restart(load: Load) -> None:
    """A driver that is unloaded or restarted ends the looking with one clear error; opened anew, all is as before."""
    script = load()
    source = opened()
    before = gpus(source)
    script.say("* !9", "init !9")
    with pytest.raises(DriverTrouble, match="Driver Not Loaded"):
        source.read()
    source.close()
    with pytest.raises(NoGpus, match="no NVIDIA driver is loaded"):
        source.open()
    script.say("*", "init", "generation 2")
    source.open()
    assert gpus(source) == before
    script.say("generation 3")
    with pytest.raises(DriverTrouble, match="Uninitialized"):
        source.read()
    source.close()
    source.open()
    assert gpus(source) == before


def test_driver_of_another_version(load: Load) -> None:
    """A library that does not go with the driver (after an update) is trouble, not absence."""
    load().say("init !18")
    with pytest.raises(DriverTrouble, match="mismatch"):
        NvidiaSource().open()


def test_no_cards(load: Load) -> None:
    """A driver without a GPU counts as no GPUs."""
    load().say("count 0")
    with pytest.raises(NoGpus, match="no GPU"):
        NvidiaSource().open()


def test_xids(load: Load) -> None:
    """Xids come with the next reading, each once, with their GPU; also those from before a GPU was lost."""
    script = load()
    source = opened()
    assert source.read().xids == ()
    script.say("event 1 1 31", "event 2 0 79", "event 3 1 31", "0.* !15")
    snapshot = source.read()
    assert snapshot.xids == (Xid(UUIDS[1], 31), Xid(UUIDS[0], 79), Xid(UUIDS[1], 31))
    assert snapshot.gpus[0].lost is not None
    assert source.read().xids == ()


@pytest.mark.parametrize("refusal", ["nvmlEventSetCreate", "1.nvmlDeviceRegisterEvents"])
def test_no_events(load: Load, refusal: str) -> None:
    """Where events are not to be had, all else is."""
    load().say(f"{refusal} !3")
    snapshot = opened().read()
    assert [gpu.lost for gpu in snapshot.gpus] == [None, None]
    assert snapshot.xids == ()


def test_mig(load: Load) -> None:
    """A card in MIG mode names its instances, and has no utilisation; instances that are made later are found."""
    script = load()
    script.say("0.nvmlDeviceGetMigMode 1", "0.nvmlDeviceGetMaxMigDeviceCount 7", "0.nvmlDeviceGetUtilizationRates !3")

    def instance(at: int) -> list[str]:
        uuid = f"{at}.nvmlDeviceGetUUID MIG-0000000{at}-0000-4000-8000-000000000000"
        name = f"{at}.nvmlDeviceGetName NVIDIA H100 80GB HBM3 MIG 3g.40gb"
        return [uuid, name, f"{at}.nvmlDeviceGetGpuInstanceId {at - 99}", f"{at}.nvmlDeviceGetComputeInstanceId 0"]

    script.say(*instance(100))
    source = opened()
    first, second = gpus(source)
    assert [(part.uuid[:12], part.gpu_instance, part.compute_instance) for part in first.card.mig] == [
        ("MIG-00000001"[:12], 1, 0)
    ]
    assert (first.measured.utilization, first.measured.memory_total_bytes) == (None, 85_520_809_984)
    assert second.card.mig == ()
    script.say(*instance(102))
    assert any(len(gpus(source)[0].card.mig) == 2 for _ in range(40))


def test_old_driver(load: Load) -> None:
    """Of a driver before 535 the reasons are read under their old name; without field values PCIe is looked at now and then."""
    script = load("old")
    script.say("0.nvmlDeviceGetCurrentClocksThrottleReasons 0xa8", "0.nvmlDeviceGetFieldValues")
    script.say("0.nvmlDeviceGetPcieThroughput.0 250000", "0.nvmlDeviceGetPcieThroughput.1 1250")
    source = opened()
    first = gpus(source)[0].measured
    assert {reason for reason, on in first.throttled.items() if on} == {"hardware", "software_thermal", "power_brake"}
    assert (first.pcie_bytes, first.nvlink_bytes) == ({}, {})
    assert first.pcie_bytes_per_second == {"transmit": 250e6, "receive": 1.25e6}
    script.say("0.nvmlDeviceGetPcieThroughput.0 1")
    assert gpus(source)[0].measured.pcie_bytes_per_second["transmit"] == 250e6
    assert any(gpus(source)[0].measured.pcie_bytes_per_second["transmit"] == 1e3 for _ in range(12))


def test_older_bindings(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that the bindings do not have yet is a value that is absent."""
    load()
    monkeypatch.delattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons")
    monkeypatch.delattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption")
    first = gpus(opened())[0].measured
    assert (first.throttled, first.energy_joules, first.power_watts) == ({}, None, 612.0)


def test_library_is_found_by_name(libraries: dict[str, Path], tmp_path: Path) -> None:
    """In a separate process ``nvidia-ml-py`` finds the library by its name; without one it reports that there is no driver."""
    Script(tmp_path / "script.txt")
    program = (
        "from commwatch_collectors.node.gpu_nvidia import NvidiaSource; from commwatch_collectors.node.gpu import NoGpus\n"
        "source = NvidiaSource()\n"
        "try: print(source.open().version, len(source.read().gpus))\n"
        "except NoGpus as error: print(error)\n"
    )
    said = []
    for folder in (libraries["new"].parent, tmp_path):
        env = clean_env(FAKE_NVML=str(tmp_path / "script.txt"), LD_LIBRARY_PATH=str(folder))
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
        said.append(done.stdout.strip())
    assert said[0] == "550.54.15 2"
    if not os.path.exists("/dev/nvidiactl"):  # noqa: PTH110 - a machine with a card has a library elsewhere
        assert "no NVIDIA driver is installed" in said[1]


def test_import_is_lazy() -> None:
    """Neither the package nor the collector brings in ``pynvml`` before it is opened."""
    code = "import sys, commwatch, commwatch_collectors.node.gpu_nvidia; print('pynvml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
