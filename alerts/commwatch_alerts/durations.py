"""Durations as people write them: ``90s``, ``5m``, ``1h30m``. Pure."""

from __future__ import annotations

import re

_DURATION = re.compile(r"(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?", re.ASCII)


def seconds(text: str) -> float | None:
    """Return the seconds of a duration such as ``90s``, ``5m`` or ``1h30m``; ``None`` if ``text`` is not a duration."""
    found = _DURATION.fullmatch(text)
    if not text or found is None:
        return None
    hours, minutes, rest = (int(part or 0) for part in found.groups())
    return float(hours * 3600 + minutes * 60 + rest)


def duration(duration_s: float) -> str:
    """Return seconds in the form that ``seconds`` reads, such as ``5m``."""
    whole = int(duration_s)
    parts = ((whole // 3600, "h"), (whole % 3600 // 60, "m"), (whole % 60, "s"))
    return "".join(f"{number}{unit}" for number, unit in parts if number) or "0s"
