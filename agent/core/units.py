"""Numbers for people: durations, sizes, rates and shares with a fitting unit. Pure."""

from __future__ import annotations

import time


def seconds(value: float | None) -> str:
    """Format a duration in seconds; ``–`` for ``None``."""
    if value is None:
        return "–"
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1, 1e3, "ms")):
        if value < limit:
            return f"{value * factor:.3g} {unit}" if value * factor < 100 else f"{value * factor:.0f} {unit}"
    if value < 120:
        return f"{value:.2f} s"
    return (
        f"{int(value // 3600)}h{int(value % 3600 // 60):02d}m"
        if value >= 3600
        else f"{int(value // 60)}m{int(value % 60):02d}s"
    )


def moment(at_s: float) -> str:
    """Format Unix seconds as date and time of this machine's time zone, with its name."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at_s))


def size(value: float | None) -> str:
    """Format a number of bytes in powers of 1024."""
    if value is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def rate(value: float | None) -> str:
    """Format bytes per second in powers of ten: GB/s, MB/s, kB/s."""
    if value is None:
        return "–"
    for limit, unit in ((1e9, "GB/s"), (1e6, "MB/s")):
        if value >= limit:
            return f"{value / limit:.3g} {unit}" if value < 100 * limit else f"{value / limit:.0f} {unit}"
    return f"{value / 1e3:.3g} kB/s"


def percent(value: float | None) -> str:
    """Format a share (0 to 1) in percent."""
    return "–" if value is None else f"{100 * value:.0f} %"
