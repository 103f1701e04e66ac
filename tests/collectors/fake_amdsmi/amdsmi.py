"""A stand-in for AMD's module of this name: two MI300X, with the fields and units of its version 7.

``FAILS`` maps a function, or a function and the number of a card, to the status it fails with.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

NOT_SUPPORTED, DRIVER_NOT_LOADED, UNKNOWN = 2, 34, 0xFFFFFFFF
FAILS: dict[str | tuple[str, int], int] = {}
CARDS = 2
CALLS: list[str] = []


class AmdSmiException(Exception):
    """What everything here raises."""


class AmdSmiLibraryException(AmdSmiException):
    """A status other than success."""

    def __init__(self, err_code: int) -> None:
        super().__init__(f"Error code:\n\t{err_code}")
        self.err_code = err_code


class AmdSmiClkType(IntEnum):
    """Clocks."""

    GFX = 0
    MEM = 4


class AmdSmiTemperatureType(IntEnum):
    """Sensors."""

    HOTSPOT = 1


class AmdSmiTemperatureMetric(IntEnum):
    """What to tell of a sensor."""

    CURRENT = 0


def _answer(function: str, card: int, *values: Any) -> Any:
    CALLS.append(function)
    code = FAILS.get(function) or FAILS.get((function, card)) or FAILS.get(("*", card))
    if code:
        raise AmdSmiLibraryException(code)
    return values[min(card, len(values) - 1)] if values else None


def amdsmi_init() -> None:
    """Begin."""
    _answer("init", 0)


def amdsmi_shut_down() -> None:
    """End."""
    _answer("shut_down", 0)


def amdsmi_get_processor_handles() -> list[int]:
    """All cards."""
    _answer("handles", 0)
    return list(range(CARDS))


def amdsmi_get_gpu_driver_info(card: int) -> Any:
    """The driver."""
    return _answer("driver", card, {"driver_name": "amdgpu", "driver_version": "6.10.5", "driver_date": "N/A"})


def amdsmi_get_gpu_device_bdf(card: int) -> Any:
    """The PCI address."""
    return _answer("bdf", card, "0000:05:00.0", "0000:26:00.0")


def amdsmi_get_gpu_asic_info(card: int) -> Any:
    """Which card it is."""
    serial = f"0x{0xBA03D2C48A120000 + card:016X}"
    return _answer("asic", card, {"market_name": "AMD Instinct MI300X", "asic_serial": serial})


def amdsmi_get_gpu_activity(card: int) -> Any:
    """In per cent."""
    busy = {"gfx_activity": 97, "umc_activity": 33, "mm_activity": "N/A"}
    return _answer("activity", card, busy, {"gfx_activity": 0, "umc_activity": "N/A", "mm_activity": "N/A"})


def amdsmi_get_gpu_vram_usage(card: int) -> Any:
    """In MiB."""
    return _answer("vram", card, {"vram_total": 196592, "vram_used": 1024})


def amdsmi_get_power_info(card: int) -> Any:
    """In watts; which of the two a card knows depends on its generation."""
    newer = {"current_socket_power": 650, "average_socket_power": "N/A", "power_limit": 750}
    return _answer("power", card, newer, {"current_socket_power": "N/A", "average_socket_power": 140})


def amdsmi_get_power_cap_info(card: int) -> Any:
    """In microwatts, or in watts."""
    return _answer("power_cap", card, {"power_cap": 750_000_000}, {"power_cap": 750})


def amdsmi_get_temp_metric(card: int, sensor: AmdSmiTemperatureType, metric: AmdSmiTemperatureMetric) -> Any:
    """In degrees."""
    assert (sensor, metric) == (AmdSmiTemperatureType.HOTSPOT, AmdSmiTemperatureMetric.CURRENT)
    return _answer("temperature", card, 66)


def amdsmi_get_clock_info(card: int, clock: AmdSmiClkType) -> Any:
    """In MHz."""
    return _answer(
        "clock", card, {"clk": 2100 if clock is AmdSmiClkType.GFX else 1300, "min_clk": 500, "max_clk": 2100}
    )


def amdsmi_get_energy_count(card: int) -> Any:
    """A counter and what one of it is in microjoules."""
    return _answer("energy", card, {"energy_accumulator": 1_000_000_000, "counter_resolution": 15.25, "timestamp": 1})


def amdsmi_get_gpu_total_ecc_count(card: int) -> Any:
    """Memory errors."""
    return _answer("ecc", card, {"correctable_count": 4, "uncorrectable_count": 1, "deferred_count": 0})


def amdsmi_get_pcie_info(card: int) -> Any:
    """PCIe."""
    return _answer("pcie", card, {"pcie_static": {}, "pcie_metric": {"pcie_replay_count": 9}})


def amdsmi_get_gpu_metrics_info(card: int) -> Any:
    """Among others XGMI in KiB by link; links there are not say nothing."""
    read, written = [10, 20, *["N/A"] * 6], [1, 2, *["N/A"] * 6]
    return _answer("metrics", card, {"xgmi_read_data_acc": read, "xgmi_write_data_acc": written})


def amdsmi_get_violation_status(card: int) -> Any:
    """What holds the card back right now."""
    active = {
        "active_prochot_thrm": False,
        "active_socket_thrm": True,
        "active_vr_thrm": "N/A",
        "active_hbm_thrm": False,
    }
    return _answer("violation", card, {**active, "active_ppt_pwr": False})
