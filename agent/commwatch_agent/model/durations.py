"""Lengths of time as people write them: ``90s``, ``15m``, ``2h``, ``7d``. Pure."""

from __future__ import annotations

import re
from contextlib import suppress

#: Default part of a job's end that advice is based on.
LAST = "5m"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_age(text: str) -> float:
    """Return an age such as ``15m`` in seconds; raise ``ValueError`` for other text."""
    age = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])", text)
    if age is None:
        raise ValueError(f"{text}: give an age such as 90s, 15m, 2h or 7d")
    return float(age[1]) * _SECONDS[age[2]]


def parse_last(text: str) -> float | None:
    """Return an age above 0 in seconds; ``None`` for ``all``, the whole job. Raises ``ValueError``."""
    if text == "all":
        return None
    with suppress(ValueError):
        if seconds := parse_age(text):
            return seconds
    raise ValueError(f"{text}: give an age such as 90s, 5m or 2h, or all")
