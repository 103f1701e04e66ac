"""Numbers for people: durations, sizes, rates and shares with a fitting unit. Pure.

All texts have their numbers from here, and the page from ``web/static/words.js``, which rounds in the same way: halves up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal

#: Shares below the first have one decimal, below the second two.
_SMALL, _TINY = 0.00995, 0.000995
#: The part of a unit from which on a number is written in it, as three digits would round it to one.
_ONE = 0.9995


def _fixed(value: float, decimals: int) -> str:
    """Format a number with so many decimals; exact halves are rounded up."""
    return f"{Decimal(value).quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP):f}"


def short(value: float) -> str:
    """Format a number with three significant digits; digits before the point are never dropped.

    >>> [short(value) for value in (0.12345, 1.5, 99.94, 1023.4)]
    ['0.123', '1.5', '99.9', '1023']
    """
    if value >= 99.95:
        return _fixed(value, 0)
    exact = Decimal(value)
    text = _fixed(value, 2 - exact.adjusted()) if exact else "0"
    return text.rstrip("0").rstrip(".") if "." in text else text


def counted(number: int, thing: str) -> str:
    """Return a number of things as text.

    >>> [counted(number, "step") for number in (0, 1, 2)]
    ['0 steps', '1 step', '2 steps']
    """
    return f"{number} {thing}{'s' * (number != 1)}"


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Format a number in the largest unit of which it is one or more, as rounded, else in the smallest; ``units``: their sizes, the largest first."""
    of, unit = next((each for each in units if value >= _ONE * each[0]), units[-1])
    return f"{short(value / of)} {unit}"


def seconds(value: float | None) -> str:
    """Format a duration in seconds; ``–`` for ``None``."""
    if value is None:
        return "–"
    if not value:
        return "0 s"
    if value < _ONE:
        return _scaled(value, ((1e-3, "ms"), (1e-6, "µs")))
    if value < 119.5:
        return f"{_fixed(value, 2 if value < 9.995 else 1 if value < 99.95 else 0)} s"
    whole = int(_fixed(value, 0))
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = int(_fixed(value / 60, 0))
    return f"{minutes // 60}h{minutes % 60:02d}m"


def rank_time(hours: float) -> str:
    """Format the time of ranks together: as a duration, from an hour on in hours, as GPU time is counted."""
    return seconds(hours * 3600) if hours < 1 else f"{hours:,.1f} hours"


def moment(at_s: float) -> str:
    """Format Unix seconds as date and time of this machine's time zone, with its name."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at_s))


def day_time(at_s: float) -> str:
    """Format Unix seconds as ``moment`` does, without year, seconds and time zone, for tables."""
    return time.strftime("%m-%d %H:%M", time.localtime(at_s))


def zone(at_s: float) -> str:
    """Return the name of this machine's time zone at a time, which differs in summer."""
    return time.strftime("%Z", time.localtime(at_s))


def time_of_day(at_s: float) -> str:
    """Format Unix seconds as the time of this machine's time zone, with its name."""
    return time.strftime("%H:%M:%S %Z", time.localtime(at_s))


def size(value: float | None) -> str:
    """Format a number of bytes of a buffer, a message or a memory in powers of 1024."""
    if value is None:
        return "–"
    if value < _ONE * (1 << 10):
        return f"{_fixed(value, 0)} B"
    return _scaled(value, ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")))


def rate(value: float | None) -> str:
    """Format bytes per second in powers of ten: GB/s, MB/s, kB/s, B/s."""
    if value is None:
        return "–"
    return _scaled(value, ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1, "B/s")))


def line_rate(value: float) -> str:
    """Format bytes per second as the rate of a link: Gbit/s."""
    return f"{short(value * 8 / 1e9)} Gbit/s"


def percent(value: float | None) -> str:
    """Format a share (0 to 1) in percent.

    >>> [percent(value) for value in (0.125, 0.004, 0.0002, 0.0, None)]
    ['13%', '0.4%', '0.02%', '0%', '–']
    """
    if value is None:
        return "–"
    size = abs(value)
    text = _fixed(100 * value, 0 if size >= _SMALL else 1 if size >= _TINY else 2)
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0%" if text in ("-0", "") else f"{text}%"


def in_hundredths(value: float) -> int:
    """Return a share (0 to 1) in whole percent, rounded as ``percent`` does."""
    return int(_fixed(100 * value, 0))


#: Formats of fields in the texts of incidents and notifications (``commwatch_alerts.text``).
IN_TEXTS: Mapping[str, Callable[[float], str]] = {
    "percent": percent,
    "seconds": seconds,
    "bytes": lambda value: rate(value).removesuffix("/s"),
    "number": lambda value: short(value) if value < 1000 else f"{_fixed(value, 0)}",
}
