"""Whole numbers for people."""

from __future__ import annotations

from collections.abc import Iterable


def spans(numbers: Iterable[int]) -> str:
    """Runs of numbers as such: ``0-3, 7``."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)
