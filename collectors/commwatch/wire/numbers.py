"""The order of sequence numbers, and ranks as text. Pure.

Sequence numbers have 32 bits in a record, so 0 follows 4,294,967,295 (serial numbers, RFC 1982).
Numbers are compared that are less than 2**31 apart; wider numbers that do not begin again compare as usual then.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

#: So many numbers there are, from 0; and the distance from which on their order is not known.
NUMBERS, HALF = 1 << 32, 1 << 31
#: Most ranks in a text.
_MOST_RANKS = 1 << 12
_RANKS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?:/([0-9]{1,9}))?)?")


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


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as a short text.

    >>> ranks_text([0, 1, 2, 3, 8]), ranks_text(range(0, 64, 8))
    ('0-3,8', '0-56/8')
    """
    parts: list[str] = []
    left = sorted(set(ranks))
    while left:
        step = left[1] - left[0] if len(left) > 1 else 1
        length = next((at for at, rank in enumerate(left) if rank != left[0] + at * step), len(left))
        if length < 3 and step > 1:
            length = 1
        last = left[length - 1]
        parts.append(str(last) if length == 1 else f"{left[0]}-{last}{f'/{step}' if step > 1 else ''}")
        left = left[length:]
    return ",".join(parts)


def ranks_in(text: str) -> list[int] | None:
    """Return the ranks of a text that ``ranks_text`` has made; ``None`` if it is none, or was cut short.

    >>> ranks_in("0-3,8"), ranks_in("0-56/8"), ranks_in("3-")
    ([0, 1, 2, 3, 8], [0, 8, 16, 24, 32, 40, 48, 56], None)
    """
    found: list[int] = []
    for part in text.split(","):
        match = _RANKS.fullmatch(part)
        if match is None:
            return None
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if last < first or step < 1 or len(found) + (last - first) // step >= _MOST_RANKS:
            return None
        found += range(first, last + 1, step)
    return found
