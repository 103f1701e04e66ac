"""GPUs as values: what a vendor's library says of each card, and the readings this makes. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from commwatch.collectors.registry import Reading

#: Why a card may run below its clock; NVIDIA's bits and AMD's violations under the same names.
THROTTLE_REASONS = (
    "clocks_setting",
    "power_cap",
    "hardware",
    "sync_boost",
    "software_thermal",
    "hardware_thermal",
    "power_brake",
)
#: Those a healthy card in a healthy rack does not have; at its power cap it may well be, under load.
ALARMING = ("hardware", "software_thermal", "hardware_thermal", "power_brake")
_BUS_ID = re.compile(r"(?:([0-9a-f]+):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-7]))?", re.IGNORECASE)


class NoGpus(Exception):
    """There is no driver, no library or no card here; the message says which. The normal case on most machines."""


class DriverTrouble(Exception):
    """The driver is there and does not answer, or has gone away."""


@dataclass(frozen=True)
class MigInstance:
    """A part of a card that looks like a card of its own (NVIDIA's multi-instance GPU)."""

    uuid: str
    name: str
    gpu_instance: int | None
    compute_instance: int | None


@dataclass(frozen=True)
class Card:
    """Which card it is."""

    #: As nvidia-smi (or amd-smi) numbered it when it was first seen here.
    index: int
    #: As the vendor writes it; empty where the card fell silent before it could be asked.
    uuid: str
    #: PCI address as Linux writes it, ``0000:3b:00.0``.
    bus_id: str
    name: str
    mig: tuple[MigInstance, ...] = ()


@dataclass(frozen=True)
class Measured:
    """What was read of a card; ``None`` or an empty mapping: the card, the driver or our rights do not give it."""

    #: 0 to 1: share of the last moments (1/6 to 1 s) in which any kernel ran. NCCL's kernels count, those that only wait included.
    utilization: float | None = None
    #: 0 to 1: share of them in which memory was read or written.
    memory_utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    #: ``sm`` and ``memory``.
    clocks_hertz: Mapping[str, float] = field(default_factory=dict)
    #: By reason, of ``THROTTLE_REASONS``.
    throttled: Mapping[str, bool] = field(default_factory=dict)
    #: Counters by ``receive`` and ``transmit``, as the card sees it.
    pcie_bytes: Mapping[str, int] = field(default_factory=dict)
    #: Where there are no counters: what moved during a short look, by direction.
    pcie_bytes_per_second: Mapping[str, float] = field(default_factory=dict)
    nvlink_bytes: Mapping[str, int] = field(default_factory=dict)
    #: Counters by kind of error.
    nvlink_errors: Mapping[str, int] = field(default_factory=dict)
    pcie_replays: int | None = None
    #: ``corrected`` and ``uncorrected``, since the driver was loaded.
    ecc_errors: Mapping[str, int] = field(default_factory=dict)
    #: Since the driver was loaded.
    energy_joules: float | None = None


@dataclass(frozen=True)
class Gpu:
    """A card and what was read of it."""

    card: Card
    measured: Measured = Measured()
    #: Why nothing can be read of it; ``None`` while it answers.
    lost: str | None = None


class Xid(NamedTuple):
    """An error the NVIDIA driver reports of a card; the number says which."""

    uuid: str
    number: int


@dataclass(frozen=True)
class Snapshot:
    """One look at all cards, and what has happened since the one before."""

    gpus: tuple[Gpu, ...]
    xids: tuple[Xid, ...] = ()


@dataclass(frozen=True)
class Driver:
    """What reads the cards."""

    #: ``nvidia`` or ``amd``.
    vendor: str
    version: str
    #: The newest CUDA the driver knows; ``None``: not of that kind.
    cuda: str | None = None


class Source(Protocol):
    """A vendor's library. One thread calls it; a call may take long where a card is sick."""

    def open(self) -> Driver:
        """Begin; raises ``NoGpus`` or ``DriverTrouble``. Cards keep the number they had when it was open before."""

    def read(self) -> Snapshot:
        """Look at all cards; raises ``DriverTrouble`` once the driver has gone away."""

    def close(self) -> None:
        """Let go of everything; never raises."""


@dataclass(frozen=True)
class GpuPlace:
    """Where a rank says that it computes. What it does not know is empty."""

    #: Lower case, without the vendor's prefix.
    uuid: str
    bus_id: str
    #: Its number in the trainer, after ``CUDA_VISIBLE_DEVICES``; says nothing outside.
    index: int | None
    #: UUID of the MIG instance that ``CUDA_VISIBLE_DEVICES`` names, likewise.
    mig: str = ""


def plain_uuid(uuid: str) -> str:
    """A UUID as it compares: torch, NVML and ``CUDA_VISIBLE_DEVICES`` write the same one differently.

    >>> plain_uuid("GPU-8F6D6E5C-0000-4000-8000-000000000001")
    '8f6d6e5c-0000-4000-8000-000000000001'
    """
    return re.sub(r"^(mig-)?(gpu-)?(0x)?", "", uuid.strip().lower())


def plain_bus_id(bus_id: str) -> str:
    """A PCI address as Linux writes it; empty if it is none.

    >>> plain_bus_id("00000000:3B:00.0")
    '0000:3b:00.0'
    """
    found = _BUS_ID.fullmatch(bus_id.strip())
    if found is None:
        return ""
    domain, bus, device, function = (int(part or "0", 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function}"


def place_of(entry: Mapping[str, object]) -> GpuPlace:
    """What a trainer has left in its names file; raises ``TypeError`` or ``ValueError`` on nonsense."""
    index = entry.get("index")
    if index is not None and not isinstance(index, int):
        raise TypeError(f"index={index!r}")
    uuid, bus_id, mig = (str(entry.get(name) or "") for name in ("uuid", "bus_id", "mig"))
    return GpuPlace(plain_uuid(uuid), plain_bus_id(bus_id), index, plain_uuid(mig))


def instance_at(place: GpuPlace, gpu: Gpu) -> MigInstance | None:
    """The MIG instance of a card that a rank computes on; ``None``: the whole card, or not known which."""
    wanted = {place.uuid, place.mig} - {""}
    return next((part for part in gpu.card.mig if plain_uuid(part.uuid) in wanted), None)


def find(place: GpuPlace, gpus: Iterable[Gpu]) -> Gpu | None:
    """The card a rank computes on: by UUID (its own or a MIG instance's), else by PCI address; ``None``: not among these."""
    gpus = list(gpus)
    for gpu in gpus:
        own = gpu.card.uuid and plain_uuid(gpu.card.uuid) == place.uuid
        if own or instance_at(place, gpu) is not None:
            return gpu
    return next((gpu for gpu in gpus if place.bus_id and gpu.card.bus_id == place.bus_id), None)


#: Metric -> the field of ``Measured`` it shows.
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
#: Likewise, with one more label.
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
    """What the cards are to ``/metrics``.

    Args:
        xids: how often each was seen.
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
