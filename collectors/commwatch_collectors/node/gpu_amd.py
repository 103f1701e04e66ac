"""AMD cards, through ``amdsmi`` if ROCm has installed it: metrics are named as for NVIDIA, XGMI counts as NVLink.

Source of names and units: AMD SMI's Python API reference, and ``amdsmi.h``.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from commwatch_collectors.node.gpu import Card, Driver, DriverTrouble, Gpu, Measured, NoGpus, Snapshot, plain_bus_id

_MIB = 1 << 20
#: Samples per query of throttling, which takes a tenth of a second.
_VIOLATIONS_EVERY = 10
_NOTHING_LOADED = {34}  # AMDSMI_STATUS_DRIVER_NOT_LOADED
#: ``power_cap`` is in microwatts on the machine itself and in watts seen from a host of virtual machines: no card takes 0.1 W.
_LEAST_MICROWATTS = 100_000


class AmdSource:
    """The cards of AMD's driver."""

    def __init__(self) -> None:
        self._smi: Any = None
        self._cards: list[tuple[Any, Card]] = []
        self._throttled: dict[int, dict[str, bool]] = {}
        self._looks = 0
        #: Why the library cannot be loaded; it is not tried again, because it prints errors to standard output.
        self._broken: str | None = None

    # -- life ---------------------------------------------------------------------------------

    def open(self) -> Driver:
        """Load the library and list the cards; raise ``NoGpus`` or ``DriverTrouble``."""
        self._smi = self._load()
        try:
            self._smi.amdsmi_init()
        except self._smi.AmdSmiException as error:
            if getattr(error, "err_code", None) in _NOTHING_LOADED:
                raise NoGpus("no AMD driver is loaded") from None
            raise DriverTrouble(_error_text(error)) from None
        try:
            handles = self._smi.amdsmi_get_processor_handles()
            self._cards = [(handle, self._identify(at, handle)) for at, handle in enumerate(handles)]
            version = str(self._smi.amdsmi_get_gpu_driver_info(handles[0])["driver_version"]) if handles else ""
        except self._smi.AmdSmiException as error:
            self.close()
            raise DriverTrouble(_error_text(error)) from None
        if not self._cards:
            self.close()
            raise NoGpus("the AMD driver shows no GPU")
        return Driver("amd", version)

    def _load(self) -> Any:
        if find_spec("amdsmi") is None:
            raise NoGpus("amdsmi is not installed")
        if self._broken is None:
            try:
                return importlib.import_module("amdsmi")
            except (
                ImportError,
                OSError,
                KeyError,
                AttributeError,
            ) as error:  # its failures without its library
                self._broken = f"amdsmi cannot be loaded: {error}"
        raise NoGpus(self._broken)

    def close(self) -> None:
        """Shut the library down."""
        self._cards = []
        with contextlib.suppress(self._smi.AmdSmiException):
            self._smi.amdsmi_shut_down()

    def _identify(self, at: int, handle: Any) -> Card:
        bus_id = plain_bus_id(self._smi.amdsmi_get_gpu_device_bdf(handle))
        about = self._smi.amdsmi_get_gpu_asic_info(handle)
        return Card(
            at, f"GPU-{str(about['asic_serial']).removeprefix('0x').lower()}", bus_id, str(about["market_name"])
        )

    # -- one sample ---------------------------------------------------------------------------

    def read(self) -> Snapshot:
        """Read every value that each card supports."""
        gpus = tuple(self._gpu(handle, card) for handle, card in self._cards)
        self._looks += 1
        if all(gpu.lost for gpu in gpus):
            raise DriverTrouble(gpus[0].lost or "")
        return Snapshot(gpus)

    def _gpu(self, handle: Any, card: Card) -> Gpu:
        trouble: list[str] = []
        measured = self._measure(handle, card, trouble)
        if trouble and replace(measured, throttled={}) == Measured():  # that may be from an earlier sample
            return Gpu(card, lost=trouble[0])
        return Gpu(card, measured)

    def _measure(self, handle: Any, card: Card, trouble: list[str]) -> Measured:
        smi, ask = self._smi, partial(self._ask, handle, trouble)
        activity, memory, power = (
            ask("amdsmi_get_gpu_activity"),
            ask("amdsmi_get_gpu_vram_usage"),
            ask("amdsmi_get_power_info"),
        )
        cap = _number(ask("amdsmi_get_power_cap_info").get("power_cap"))
        clocks = {
            name: _number(ask("amdsmi_get_clock_info", kind).get("clk"))
            for name, kind in (("sm", smi.AmdSmiClkType.GFX), ("memory", smi.AmdSmiClkType.MEM))
        }
        temperature = ask(
            "amdsmi_get_temp_metric", smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT
        )
        ecc, energy = ask("amdsmi_get_gpu_total_ecc_count"), ask("amdsmi_get_energy_count")
        links = ask("amdsmi_get_gpu_metrics_info")
        if self._looks % _VIOLATIONS_EVERY == 0:
            self._throttled[card.index] = _throttled(ask("amdsmi_get_violation_status"))
        joules = _product(energy.get("energy_accumulator"), energy.get("counter_resolution"), 1e-6)
        return Measured(
            utilization=_product(activity.get("gfx_activity"), 0.01),
            memory_utilization=_product(activity.get("umc_activity"), 0.01),
            memory_used_bytes=_integer(memory.get("vram_used"), _MIB),
            memory_total_bytes=_integer(memory.get("vram_total"), _MIB),
            power_watts=_first(power.get("current_socket_power"), power.get("average_socket_power")),
            power_limit_watts=cap if cap is None or cap < _LEAST_MICROWATTS else cap / 1e6,
            temperature_celsius=_number(temperature),
            clocks_hertz={name: value * 1e6 for name, value in clocks.items() if value is not None},
            throttled=self._throttled.get(card.index, {}),
            nvlink_bytes=_sums(
                {"receive": links.get("xgmi_read_data_acc"), "transmit": links.get("xgmi_write_data_acc")}
            ),
            pcie_replays=_integer(ask("amdsmi_get_pcie_info").get("pcie_metric", {}).get("pcie_replay_count")),
            ecc_errors={
                name: value
                for name, value in (
                    ("corrected", _integer(ecc.get("correctable_count"))),
                    ("uncorrected", _integer(ecc.get("uncorrectable_count"))),
                )
                if value is not None
            },
            energy_joules=joules,
        )

    def _ask(self, handle: Any, trouble: list[str], function: str, *arguments: Any) -> Any:
        """Call a function of a card; return an empty dict if it fails, or if this version lacks the function."""
        call = getattr(self._smi, function, None)
        try:
            return {} if call is None else call(handle, *arguments)
        except self._smi.AmdSmiException as error:
            trouble.append(_error_text(error))
            return {}


def _throttled(status: dict[str, Any]) -> dict[str, bool]:
    """Return the current violations, under NVIDIA's names."""
    heat = [status.get(f"active_{what}_thrm") for what in ("prochot", "socket", "vr", "hbm")]
    found = {"power_cap": [status.get("active_ppt_pwr")], "hardware_thermal": heat}
    known = {reason: [value for value in values if _number(value) is not None] for reason, values in found.items()}
    return {reason: any(values) for reason, values in known.items() if values}


def _sums(lists: dict[str, Any]) -> dict[str, int]:
    """Sum KiB by link to bytes over all links; unknown values are left out."""
    links = {name: [_number(value) for value in values] for name, values in lists.items() if isinstance(values, list)}
    present = {name: [value for value in values if value is not None] for name, values in links.items()}
    return {name: int(sum(values)) * 1024 for name, values in present.items() if values}


def _number(value: Any) -> float | None:
    """Return a number, ``None`` for ``N/A`` and for an answer that did not come."""
    return value if isinstance(value, (int, float)) else None


def _first(*values: Any) -> float | None:
    return next((value for value in map(_number, values) if value is not None), None)


def _product(*factors: Any) -> float | None:
    product = 1.0
    for factor in map(_number, factors):
        if factor is None:
            return None
        product *= factor
    return product


def _integer(value: Any, factor: int = 1) -> int | None:
    number = _number(value)
    return None if number is None else int(number) * factor


def _error_text(error: Any) -> str:
    return "AMD SMI: " + " ".join(str(error).split())
