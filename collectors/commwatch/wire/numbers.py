"""The order of sequence numbers. They have 32 bits in a record, so 0 follows 4,294,967,295 (serial numbers, RFC 1982). Pure.

Numbers are compared that are less than 2**31 apart; wider numbers that do not begin again compare as usual then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

#: So many numbers there are, from 0; and the distance from which on their order is not known.
NUMBERS, HALF = 1 << 32, 1 << 31


def ahead(number: int, other: int) -> int:
    """Return how far a number is ahead of another one; negative if it is behind."""
    return (number - other + HALF) % NUMBERS - HALF


def in_order(numbers: Collection[int]) -> list[int]:
    """Return numbers in their order."""
    some = next(iter(numbers), 0)
    return sorted(numbers, key=lambda number: ahead(number, some))


def latest(numbers: Collection[int]) -> int:
    """Return the latest of some numbers, one at least."""
    return in_order(numbers)[-1]


def hull(ranges: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return first and last number of a range that has those of some ranges, one at least. The last number of a range may be the smaller one."""
    every = list(ranges)
    some = every[0][0]
    begins = [ahead(first, some) for first, _ in every]
    low = min(begins)
    high = max(begin + (last - first) % NUMBERS for begin, (first, last) in zip(begins, every, strict=True))
    return ((some + low) % NUMBERS, (some + high) % NUMBERS) if high - low < NUMBERS else (0, NUMBERS - 1)
