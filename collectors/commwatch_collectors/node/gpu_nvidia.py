"""NVIDIA cards, through NVML (``nvidia-ml-py``, the module ``pynvml``).

Cards support different calls: one that a card refuses for good is not repeated for a while, and its value is absent.
Source of names and units: NVIDIA's NVML API Reference Guide, and ``nvml.h``.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from commwatch_collectors.node.gpu import (
    Card,
    Driver,
    DriverTrouble,
    Gpu,
    Measured,
    MigInstance,
    NoGpus,
    Snapshot,
    Xid,
    plain_bus_id,
)
from commwatch_collectors.node.nvlinks import NvLink, read_links

_LIBRARY = "libnvidia-ml.so.1"
# Errors by consequence. Numbers of nvmlReturn_t, because older versions of pynvml do not name all.
_NOBODY = {9: "no NVIDIA driver is loaded", 12: f"no NVIDIA driver is installed ({_LIBRARY} is not found)"}
# Uninitialized; driver not loaded; library not found; library of another version than the driver.
_GONE = {1, 9, 12, 18}
# GPU is lost; reset required; GPU not found.
_LOST = {15, 16, 28}
# Invalid argument; not supported; no permission; no such function; no ECC on a virtual GPU; another version; deprecated.
_NEVER = {2, 3, 4, 13, 22, 25, 26}
_NO_PERMISSION = 4
#: Scope of a field value: all links of the card together.
_ALL_LINKS = 0xFFFFFFFF
_XID_EVENT = 8
#: Samples of a card between two reads of its MIG instances, and between two retries of the calls that it refused.
_MIG_EVERY, _RETRY_EVERY = 30, 600
#: Samples per read of PCIe rates on cards without counters, which blocks the driver for 20 ms a direction; and of the single NVLinks.
_PCIE_EVERY, _LINKS_EVERY = 10, 10
_MOST_EVENTS = 64

_REASONS = {
    "clocks_setting": 0x2,
    "power_cap": 0x4,
    "hardware": 0x8,
    "sync_boost": 0x10,
    "software_thermal": 0x20,
    "hardware_thermal": 0x40,
    "power_brake": 0x80,
}
#: Field values: (field of ``Measured``, label) -> candidates (field id, scope, factor); the first that the card supports is used.
#: 197, 198: PCIE_COUNT_TX/RX_BYTES. 138, 139: NVLINK_THROUGHPUT_DATA_TX/RX, in KiB. 202, 204: NVLINK_COUNT_XMIT/RCV_BYTES.
#: 38, 45, 52, 59: NVLINK_{CRC_FLIT,CRC_DATA,REPLAY,RECOVERY}_ERROR_COUNT_TOTAL. 161 to 163: NVLINK_ERROR_DL_{REPLAY,RECOVERY,CRC}.
#: 208, 215: NVLINK_COUNT_RCV_ERRORS, NVLINK_COUNT_LINK_RECOVERY_EVENTS.
_FIELDS: dict[tuple[str, str], tuple[tuple[int, int, int], ...]] = {
    ("pcie_bytes", "transmit"): ((197, 0, 1),),
    ("pcie_bytes", "receive"): ((198, 0, 1),),
    ("nvlink_bytes", "transmit"): ((138, _ALL_LINKS, 1024), (202, _ALL_LINKS, 1)),
    ("nvlink_bytes", "receive"): ((139, _ALL_LINKS, 1024), (204, _ALL_LINKS, 1)),
    ("nvlink_errors", "crc_flit"): ((38, 0, 1),),
    ("nvlink_errors", "crc_data"): ((45, 0, 1),),
    ("nvlink_errors", "crc"): ((163, _ALL_LINKS, 1),),
    ("nvlink_errors", "replay"): ((52, 0, 1), (161, _ALL_LINKS, 1)),
    ("nvlink_errors", "recovery"): ((59, 0, 1), (162, _ALL_LINKS, 1), (215, _ALL_LINKS, 1)),
    ("nvlink_errors", "receive"): ((208, _ALL_LINKS, 1),),
}
#: By ``valueType`` of a field value: the member of the union that holds it.
_UNION = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class _Lost(Exception):
    """A single card does not answer any more."""


@dataclass
class _Watched:
    """A card for which NVML gives, or once gave, a handle."""

    card: Card
    handle: Any = None
    lost: str | None = None
    #: Calls and fields that it has refused for good.
    refused: set[Any] = field(default_factory=set)
    looks: int = 0
    pcie: dict[str, float] = field(default_factory=dict)
    nvlinks: tuple[NvLink, ...] = ()
    #: The latest error of a call that may succeed next time.
    error: str = ""


class NvidiaSource:
    """The cards of NVIDIA's driver."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._cards: list[_Watched] = []
        self._events: Any = None
        #: Every card ever seen, by UUID, with its latest place in NVML's list. It keeps its first number.
        self._known: dict[str, tuple[int, Card]] = {}

    # -- life ---------------------------------------------------------------------------------

    def open(self) -> Driver:
        """Load the library and list the cards; raise ``NoGpus`` or ``DriverTrouble``."""
        if "pynvml" not in sys.modules:  # importing it takes 3.5 MB, which a node without a driver saves
            try:
                ctypes.CDLL(_LIBRARY)
            except OSError:
                raise NoGpus(_NOBODY[12]) from None
        try:
            self._nvml = importlib.import_module("pynvml")
        except ImportError:
            raise NoGpus("nvidia-ml-py is not installed") from None
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            if error.value in _NOBODY:
                raise NoGpus(_NOBODY[error.value]) from None
            raise DriverTrouble(_error_text(error)) from None
        try:
            version, cuda = self._nvml.nvmlSystemGetDriverVersion(), self._nvml.nvmlSystemGetCudaDriverVersion()
            self._take_up()
        except self._nvml.NVMLError as error:
            self.close()
            raise DriverTrouble(_error_text(error)) from None
        if not self._cards:
            self.close()
            raise NoGpus("the NVIDIA driver shows no GPU")
        self._watch_xids()
        return Driver("nvidia", str(version), f"{cuda // 1000}.{cuda % 1000 // 10}")

    def close(self) -> None:
        """Shut the library down, as far as the driver still allows."""
        if self._events is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(self._events)
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()
        self._cards, self._events = [], None

    def _take_up(self) -> None:
        """List all cards, and those that were known before and are gone."""
        silent: dict[int, str] = {}
        found: list[_Watched] = []
        for at in range(self._nvml.nvmlDeviceGetCount()):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(at)
                card = self._identify(at, handle)
            except self._nvml.NVMLError as error:
                if error.value in _GONE:
                    raise
                if error.value != _NO_PERMISSION:  # a card that we may not see is not lost
                    silent[at] = _error_text(error)
                continue
            self._known[card.uuid] = at, card
            found.append(_Watched(card, handle))
        present = {watched.card.uuid for watched in found}
        for place, card in self._known.values():
            if card.uuid not in present:
                found.append(_Watched(card, lost=silent.pop(place, "it is no longer present")))
        taken = {watched.card.index for watched in found}
        found += [_Watched(Card(at, "", "", ""), lost=why) for at, why in silent.items() if at not in taken]
        self._cards = sorted(found, key=lambda watched: watched.card.index)

    def _identify(self, at: int, handle: Any) -> Card:
        nvml = self._nvml
        bus_id = plain_bus_id(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
        uuid = nvml.nvmlDeviceGetUUID(handle)
        taken = {card.index for _, card in self._known.values()}
        free = at if at not in taken else max(taken) + 1
        index = self._known[uuid][1].index if uuid in self._known else free
        return Card(index, uuid, bus_id, nvml.nvmlDeviceGetName(handle), self._instances(handle))

    def _instances(self, device: Any) -> tuple[MigInstance, ...]:
        """Return the MIG instances of a card; empty without MIG mode."""
        nvml, found = self._nvml, []
        try:
            if nvml.nvmlDeviceGetMigMode(device)[0] != 1:
                return ()
            for at in range(nvml.nvmlDeviceGetMaxMigDeviceCount(device)):
                try:
                    handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, at)
                except nvml.NVMLError as error:
                    if error.value in _GONE | _LOST:
                        raise
                    continue  # no instance at this place
                numbers = nvml.nvmlDeviceGetGpuInstanceId(handle), nvml.nvmlDeviceGetComputeInstanceId(handle)
                found.append(MigInstance(nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle), *numbers))
        except nvml.NVMLError as error:
            if error.value in _GONE | _LOST:
                raise
        return tuple(found)

    # -- one sample ---------------------------------------------------------------------------

    def read(self) -> Snapshot:
        """Read every value that each card supports; raise ``DriverTrouble`` if the driver is gone."""
        xids = self._xids()
        return Snapshot(tuple(self._gpu(watched) for watched in self._cards), xids)

    def _gpu(self, watched: _Watched) -> Gpu:
        if watched.lost is None:
            try:
                measured = self._measure(watched)
            except _Lost as error:
                watched.lost = str(error)
            else:
                silent = watched.error if measured == Measured() else None
                return Gpu(watched.card, measured, silent or None)
        return Gpu(watched.card, lost=watched.lost)

    def _measure(self, watched: _Watched) -> Measured:
        watched.error = ""
        if watched.looks % _RETRY_EVERY == _RETRY_EVERY - 1:
            watched.refused.clear()
        if watched.looks % _MIG_EVERY == _MIG_EVERY - 1:
            self._renew_instances(watched)
        rates, memory = (
            self._ask(watched, "nvmlDeviceGetUtilizationRates"),
            self._ask(watched, "nvmlDeviceGetMemoryInfo"),
        )
        power, limit = (
            self._ask(watched, "nvmlDeviceGetPowerUsage"),
            self._ask(watched, "nvmlDeviceGetEnforcedPowerLimit"),
        )
        energy = self._ask(watched, "nvmlDeviceGetTotalEnergyConsumption")
        clocks = {name: self._ask(watched, "nvmlDeviceGetClockInfo", kind) for name, kind in (("sm", 1), ("memory", 2))}
        ecc = {
            name: self._ask(watched, "nvmlDeviceGetTotalEccErrors", kind, 0)
            for name, kind in (("corrected", 0), ("uncorrected", 1))
        }
        fields = self._fields(watched)
        rates_of_pcie = {} if fields.get("pcie_bytes") else self._pcie(watched)
        if watched.looks % _LINKS_EVERY == 0 and fields.get("nvlink_bytes"):
            watched.nvlinks = read_links(
                partial(self._values, watched), partial(self._ask, watched, "nvmlDeviceGetNvLinkState")
            )
        watched.looks += 1
        return Measured(
            utilization=None if rates is None else rates.gpu / 100,
            memory_utilization=None if rates is None else rates.memory / 100,
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            power_watts=_scaled(power, 1e-3),
            power_limit_watts=_scaled(limit, 1e-3),
            temperature_celsius=self._ask(watched, "nvmlDeviceGetTemperature", 0),
            clocks_hertz={name: value * 1e6 for name, value in clocks.items() if value is not None},
            throttled=self._throttled(watched),
            pcie_bytes=fields.get("pcie_bytes", {}),
            pcie_bytes_per_second=rates_of_pcie,
            nvlink_bytes=fields.get("nvlink_bytes", {}),
            nvlink_errors=fields.get("nvlink_errors", {}),
            nvlinks=watched.nvlinks,
            pcie_replays=self._ask(watched, "nvmlDeviceGetPcieReplayCounter"),
            ecc_errors={name: value for name, value in ecc.items() if value is not None},
            energy_joules=_scaled(energy, 1e-3),
        )

    def _throttled(self, watched: _Watched) -> dict[str, bool]:
        bits = self._ask(watched, "nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:  # drivers before 535 have only the old name
            bits = self._ask(watched, "nvmlDeviceGetCurrentClocksThrottleReasons")
        return {} if bits is None else {reason: bool(bits & bit) for reason, bit in _REASONS.items()}

    def _pcie(self, watched: _Watched) -> dict[str, float]:
        """Return the latest rates over PCIe, in bytes per second; NVML gives KB/s over 20 ms."""
        if (watched.looks + watched.card.index) % _PCIE_EVERY == 0 or not watched.looks:
            both = {
                name: self._ask(watched, "nvmlDeviceGetPcieThroughput", counter)
                for name, counter in (("transmit", 0), ("receive", 1))
            }
            watched.pcie = {name: value * 1e3 for name, value in both.items() if value is not None}
        return watched.pcie

    def _fields(self, watched: _Watched) -> dict[str, dict[str, int]]:
        """Read all field values in one call."""
        wanted = [
            (key, *candidate)
            for key, candidates in _FIELDS.items()
            for candidate in candidates
            if candidate[:2] not in watched.refused
        ]
        pairs = [(number, scope) for _, number, scope, _ in wanted]
        values = self._ask(watched, "nvmlDeviceGetFieldValues", pairs) if pairs else None
        found: dict[str, dict[str, int]] = {}
        for ((name, label), number, scope, factor), value in zip(wanted, values or (), strict=False):
            known = found.setdefault(name, {})
            if value.nvmlReturn in _NEVER or label in known:
                watched.refused.add((number, scope))  # not supported, or a better candidate is
            elif (number_of := _number(value)) is not None:
                known[label] = number_of * factor
        return found

    def _values(self, watched: _Watched, pairs: Sequence[tuple[int, int]]) -> list[int | None]:
        """Return field values by id and scope; ``None``: not supported, or not now."""
        wanted = [pair for pair in pairs if pair not in watched.refused]
        values = self._ask(watched, "nvmlDeviceGetFieldValues", wanted) if wanted else None
        found = dict(zip(wanted, values or (), strict=False))
        watched.refused.update(pair for pair, value in found.items() if value.nvmlReturn in _NEVER)
        return [_number(found[pair]) if pair in found else None for pair in pairs]

    def _renew_instances(self, watched: _Watched) -> None:
        try:
            mig = self._instances(watched.handle)
        except self._nvml.NVMLError as error:
            self._judge(error)
        else:
            if mig != watched.card.mig:
                watched.card = replace(watched.card, mig=mig)

    def _ask(self, watched: _Watched, function: str, *arguments: Any) -> Any:
        """Call a function of a card; return ``None`` if it fails."""
        call = (function, arguments) if function != "nvmlDeviceGetFieldValues" else (function,)
        known = getattr(self._nvml, function, None)  # an older pynvml may be installed
        if known is None or call in watched.refused:
            return None
        try:
            return known(watched.handle, *arguments)
        except self._nvml.NVMLError as error:
            self._judge(error)
            if error.value in _NEVER:
                watched.refused.add(call)
            else:
                watched.error = _error_text(error)
            return None

    def _judge(self, error: Any) -> None:
        """Raise ``DriverTrouble`` or ``_Lost`` for errors of the driver or card; return for errors of a call."""
        if error.value in _GONE:
            raise DriverTrouble(_error_text(error)) from None
        if error.value in _LOST:
            raise _Lost(_error_text(error)) from None

    # -- Xids ---------------------------------------------------------------------------------

    def _watch_xids(self) -> None:
        """Register for Xid events, except on cards and drivers without them."""
        with contextlib.suppress(self._nvml.NVMLError):
            self._events = self._nvml.nvmlEventSetCreate()
            for watched in self._cards:
                if watched.handle is not None:
                    with contextlib.suppress(self._nvml.NVMLError):
                        self._nvml.nvmlDeviceRegisterEvents(watched.handle, _XID_EVENT, self._events)

    def _xids(self) -> tuple[Xid, ...]:
        """Return the Xids since the last sample, without waiting."""
        found: list[Xid] = []
        owners = {_address(watched.handle): watched.card.uuid for watched in self._cards if watched.handle is not None}
        while self._events is not None and len(found) < _MOST_EVENTS:
            try:
                event = self._nvml.nvmlEventSetWait(self._events, 0)
            except self._nvml.NVMLError as error:
                if error.value in _GONE:
                    raise DriverTrouble(_error_text(error)) from None
                break  # no more events; or a card is lost, which its own calls will show
            uuid = owners.get(_address(event.device))
            if uuid is not None and event.eventType == _XID_EVENT:
                found.append(Xid(uuid, int(event.eventData)))
        return tuple(found)


def _number(value: Any) -> int | None:
    """Return the number of a field value; ``None``: there is none."""
    if value.nvmlReturn != 0 or value.valueType >= len(_UNION):
        return None
    return int(getattr(value.value, _UNION[value.valueType]))


def _error_text(error: Any) -> str:
    return f"NVML: {error}"


def _address(handle: Any) -> int | None:
    """Return the address that a handle points to, to compare handles."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _text(text: bytes | str) -> str:
    return text.decode("ascii", "replace") if isinstance(text, bytes) else text


def _scaled(value: int | None, factor: float) -> float | None:
    return None if value is None else value * factor
