"""GPUs as values: what a vendor's library measures of each card, and the metrics made of it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from commwatch_collectors.node.nvlinks import NvLink
from commwatch_collectors.registry import Reading

#: Why a card may run below its clock; NVIDIA's bits and AMD's violations share these names.
THROTTLE_REASONS = (
    "clocks_setting",
    "power_cap",
    "hardware",
    "sync_boost",
    "software_thermal",
    "hardware_thermal",
    "power_brake",
)
#: Reasons that a healthy card does not have; the power cap is normal under load.
ALARMING = ("hardware", "software_thermal", "hardware_thermal", "power_brake")
_BUS_ID = re.compile(r"(?:([0-9a-f]+):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-7]))?", re.IGNORECASE)


class NoGpus(Exception):
    """No driver, library or card was found; the message says which. Normal on most machines."""


class DriverTrouble(Exception):
    """The driver is present but does not answer, or was unloaded."""


@dataclass(frozen=True)
class MigInstance:
    """A part of a card that appears as a card of its own (NVIDIA's multi-instance GPU)."""

    uuid: str
    name: str
    gpu_instance: int | None
    compute_instance: int | None


@dataclass(frozen=True)
class Card:
    """Identity of a card."""

    #: As nvidia-smi (or amd-smi) numbered it when it was first seen.
    index: int
    #: As the vendor writes it; empty if the card stopped answering before it could be read.
    uuid: str
    #: PCI address as Linux writes it, ``0000:3b:00.0``.
    bus_id: str
    name: str
    mig: tuple[MigInstance, ...] = ()


@dataclass(frozen=True)
class Measured:
    """Measurements of a card; ``None`` or an empty mapping: card, driver or missing rights do not give the value."""

    #: 0 to 1: share of the last sample (1/6 to 1 s) in which any kernel ran, also NCCL's kernels that only wait.
    utilization: float | None = None
    #: 0 to 1: share of the sample in which memory was read or written.
    memory_utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    #: By ``sm`` and ``memory``.
    clocks_hertz: Mapping[str, float] = field(default_factory=dict)
    #: By reason from ``THROTTLE_REASONS``.
    throttled: Mapping[str, bool] = field(default_factory=dict)
    #: Counters by ``receive`` and ``transmit``, from the card's point of view.
    pcie_bytes: Mapping[str, int] = field(default_factory=dict)
    #: Where there are no counters: the rate during a short sample, by direction.
    pcie_bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    nvlink_bytes: Mapping[str, int] = field(default_factory=dict)
    #: Counters by kind of error.
    nvlink_errors: Mapping[str, int] = field(default_factory=dict)
    #: Each link by itself, read every tenth time.
    nvlinks: tuple[NvLink, ...] = ()
    pcie_replays: int | None = None
    #: ``corrected`` and ``uncorrected``, since the driver was loaded.
    ecc_errors: Mapping[str, int] = field(default_factory=dict)
    #: Since the driver was loaded.
    energy_joules: float | None = None


@dataclass(frozen=True)
class Gpu:
    """A card and its measurements."""

    card: Card
    measured: Measured = Measured()
    #: Why nothing can be read of it; ``None`` if it answers.
    lost: str | None = None


class Xid(NamedTuple):
    """An error that the NVIDIA driver reports of a card, by number."""

    uuid: str
    number: int


@dataclass(frozen=True)
class Snapshot:
    """One sample of all cards, and the Xids since the one before."""

    gpus: tuple[Gpu, ...]
    xids: tuple[Xid, ...] = ()


@dataclass(frozen=True)
class Driver:
    """The driver of the cards."""

    #: ``nvidia`` or ``amd``.
    vendor: str
    version: str
    #: The newest CUDA that the driver supports; ``None`` for other vendors.
    cuda: str | None = None


class Source(Protocol):
    """A vendor's library. One thread calls it; a call may take long if a card is faulty."""

    def open(self) -> Driver:
        """Open the library; raise ``NoGpus`` or ``DriverTrouble``. Cards keep their numbers when it is opened again."""

    def read(self) -> Snapshot:
        """Sample all cards; raise ``DriverTrouble`` if the driver was unloaded."""

    def close(self) -> None:
        """Release everything; never raises."""


@dataclass(frozen=True)
class GpuPlace:
    """The GPU that a rank reports as its own. Unknown values are empty."""

    #: Lower case, without the vendor's prefix.
    uuid: str
    bus_id: str
    #: Its number in the trainer, after ``CUDA_VISIBLE_DEVICES``; meaningless in other processes.
    index: int | None
    #: UUID of the MIG instance that ``CUDA_VISIBLE_DEVICES`` names, in lower case without prefix.
    mig: str = ""


def plain_uuid(uuid: str) -> str:
    """Normalise a UUID for comparison: torch, NVML and ``CUDA_VISIBLE_DEVICES`` write it differently.

    >>> plain_uuid("GPU-8F6D6E5C-0000-4000-8000-000000000001")
    '8f6d6e5c-0000-4000-8000-000000000001'
    """
    return re.sub(r"^(mig-)?(gpu-)?(0x)?", "", uuid.strip().lower())


def plain_bus_id(bus_id: str) -> str:
    """Return a PCI address as Linux writes it; empty if ``bus_id`` is not one.

    >>> plain_bus_id("00000000:3B:00.0")
    '0000:3b:00.0'
    """
    found = _BUS_ID.fullmatch(bus_id.strip())
    if found is None:
        return ""
    domain, bus, device, function = (int(part or "0", 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function}"


def place_of(entry: Mapping[str, object]) -> GpuPlace:
    """Parse the GPU entry of a names file; raise ``TypeError`` or ``ValueError`` if it is invalid."""
    index = entry.get("index")
    if index is not None and not isinstance(index, int):
        raise TypeError(f"index={index!r}")
    uuid, bus_id, mig = (str(entry.get(name) or "") for name in ("uuid", "bus_id", "mig"))
    return GpuPlace(plain_uuid(uuid), plain_bus_id(bus_id), index, plain_uuid(mig))


def instance_at(place: GpuPlace, gpu: Gpu) -> MigInstance | None:
    """Return the MIG instance that a rank computes on; ``None``: the whole card, or not known."""
    wanted = {place.uuid, place.mig} - {""}
    return next((part for part in gpu.card.mig if plain_uuid(part.uuid) in wanted), None)


def find(place: GpuPlace, gpus: Iterable[Gpu]) -> Gpu | None:
    """Return the card that a rank computes on, by UUID (its own or a MIG instance's), else by PCI address; ``None`` if not found."""
    gpus = list(gpus)
    for gpu in gpus:
        own = gpu.card.uuid and plain_uuid(gpu.card.uuid) == place.uuid
        if own or instance_at(place, gpu) is not None:
            return gpu
    return next((gpu for gpu in gpus if place.bus_id and gpu.card.bus_id == place.bus_id), None)


#: Metric -> field of ``Measured``.
_SINGLE = {
    "gpu_utilization_ratio": "utilization",
    "gpu_memory_utilization_ratio": "memory_utilization",
    "gpu_memory_used_bytes": "memory_used_bytes",
    "gpu_memory_total_bytes": "memory_total_bytes",
    "gpu_power_watts": "power_watts",
    "gpu_power_limit_watts": "power_limit_watts",
    "gpu_temperature_celsius": "temperature_celsius",
    "gpu_pcie_replays_total": "pcie_replays",
    "gpu_energy_joules_total": "energy_joules",
}
#: Metric with one more label -> field of ``Measured``.
_LABELLED = {
    "gpu_clock_hertz": "clocks_hertz",
    "gpu_throttled": "throttled",
    "gpu_pcie_bytes_total": "pcie_bytes",
    "gpu_pcie_bytes_per_second": "pcie_bytes_per_second",
    "gpu_nvlink_bytes_total": "nvlink_bytes",
    "gpu_nvlink_errors_total": "nvlink_errors",
    "gpu_ecc_errors_total": "ecc_errors",
}


def readings(driver: Driver, gpus: Iterable[Gpu], xids: Mapping[Xid, int]) -> Iterator[Reading]:
    """Yield the metrics of the cards.

    Args:
        xids: number of occurrences of each.
    """
    for gpu in gpus:
        card, measured, label = gpu.card, gpu.measured, str(gpu.card.index)
        yield Reading("gpu_info", (label, card.uuid, card.bus_id, card.name, driver.vendor, driver.version), 1)
        yield Reading("gpu_up", (label,), float(gpu.lost is None))
        for metric, name in _SINGLE.items():
            value = getattr(measured, name)
            if value is not None:
                yield Reading(metric, (label,), value)
        for metric, name in _LABELLED.items():
            for key, value in getattr(measured, name).items():
                yield Reading(metric, (label, key), float(value))
        for xid, count in xids.items():
            if xid.uuid == card.uuid:
                yield Reading("gpu_xid_errors_total", (label, str(xid.number)), count)
