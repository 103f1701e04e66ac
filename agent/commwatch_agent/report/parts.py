"""The parts of a report: one that fails leaves the others."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import TypeVar

from commwatch.wire.errors import CommwatchError

_Part = TypeVar("_Part")
#: What a part raises that cannot be made: its data cannot be read, or are not what it expects.
_FAILURES = (
    CommwatchError,
    sqlite3.Error,
    OSError,
    ValueError,
    LookupError,
    ArithmeticError,
    TypeError,
    AttributeError,
)


class ReportParts:
    """Makes parts; ``missing`` has why some are not available, by name."""

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}

    def part(self, name: str, function: Callable[[], _Part], otherwise: _Part) -> _Part:
        """Return what a function returns; ``otherwise`` if it fails."""
        try:
            return function()
        except _FAILURES as error:
            kind = "" if isinstance(error, CommwatchError) else f"{type(error).__name__}: "
            self.missing[name] = f"not available: {kind}{error}"
            return otherwise
