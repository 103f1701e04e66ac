"""GPUs made by hand, a vendor's library with set answers, and the stand-in for NVIDIA's, built and scripted."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from commwatch_collectors.node.gpu import Card, Driver, DriverTrouble, Gpu, Measured, NoGpus, Snapshot
from tests.helpers import needs

FAKE = Path(__file__).parent / "collectors" / "fake_nvml"
LIBRARY = "libnvidia-ml.so.1"
DRIVER = Driver("nvidia", "550.54.15", "12.4")
UUIDS = [f"GPU-5a0e1f2c-3b4d-4e6f-8a9b-{n:012d}" for n in range(8)]


def card(index: int) -> Card:
    """One of eight like cards."""
    return Card(index, UUIDS[index], f"0000:{0x1B + index:02x}:00.0", "NVIDIA H100 80GB HBM3")


def full(index: int) -> Gpu:
    """A card that supports everything that one card ever does."""
    return Gpu(
        card(index),
        Measured(
            utilization=0.98,
            memory_utilization=0.41,
            memory_used_bytes=65_000_000_000,
            memory_total_bytes=85_520_809_984,
            power_watts=612.0,
            power_limit_watts=700.0,
            temperature_celsius=61,
            clocks_hertz={"sm": 1.98e9, "memory": 2.619e9},
            throttled={
                "clocks_setting": False, "power_cap": True, "hardware": False, "sync_boost": False, "software_thermal": False,
                "hardware_thermal": False, "power_brake": False,
            },
            pcie_bytes={"transmit": 10**12, "receive": 2 * 10**12},
            nvlink_bytes={"transmit": 4 * 10**12, "receive": 5 * 10**12},
            nvlink_errors={"crc": 12, "replay": 1, "recovery": 0, "receive": 0},
            pcie_replays=3,
            ecc_errors={"corrected": 7, "uncorrected": 0},
            energy_joules=123456.789,
        ),
    )  # fmt: skip


def lost(index: int) -> Gpu:
    """A card that has fallen off the bus."""
    return Gpu(card(index), lost="NVML: GPU is lost")


class ToldSource:
    """A vendor's library: does what the next entry of its script says."""

    def __init__(self, *script: Snapshot | NoGpus | DriverTrouble) -> None:
        self.script = list(script)
        self.opened = self.closed = 0

    def open(self) -> Driver:
        """Fails if a failure is next."""
        self.opened += 1
        if isinstance(self.script[0], Exception):
            failure = self.script[0]
            self.script = self.script[1:] or [failure]
            raise failure
        return DRIVER

    def read(self) -> Snapshot:
        """The next reading; the last entry stays."""
        entry = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(entry, Exception):
            raise DriverTrouble(str(entry))
        return entry

    def close(self) -> None:
        """Counted."""
        self.closed += 1


def build(directory: Path, *flags: str) -> Path:
    """The stand-in, built into ``directory`` under the library's own name."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    needs(compiler, "a C compiler")
    assert compiler is not None
    made = directory / LIBRARY
    command = [compiler, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *flags]
    built = subprocess.run(
        [*command, str(FAKE / "nvml.c"), "-o", str(made)], capture_output=True, text=True, timeout=100, check=False
    )
    assert built.returncode == 0, built.stderr
    return made


class Script:
    """The content of the stand-in's script: a recorded script, with changes."""

    def __init__(self, path: Path, recorded: str = "two_h100.txt") -> None:
        self.path, self._lines = path, (FAKE / recorded).read_text().splitlines()
        self.say()

    def say(self, *lines: str) -> None:
        """From now on these lines hold: they replace those with the same key. A key alone takes its line away."""
        for line in lines:
            words = line.split()
            key = " ".join(words[:2] if words[0] == "event" else words[:1])
            self._lines = [old for old in self._lines if not old.startswith(f"{key} ")]
            if len(words) > 1:
                self._lines.append(line)
        hidden = self.path.with_suffix(".new")
        hidden.write_text("\n".join(self._lines) + "\n")
        hidden.replace(self.path)
