"""Sets of whole numbers as short text for people."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def spans(numbers: Iterable[int]) -> str:
    """Return numbers as text, in runs: ``0-3, 7``."""
    runs: list[range] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1].stop:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return _written(runs)


def ranks(numbers: Collection[int]) -> str:
    """Return ranks as text: ``rank 2``, ``ranks 1, 3``."""
    return f"rank{'s' * (len(numbers) > 1)} {spans(numbers)}"


def gaps(numbers: Iterable[int], size: int) -> list[range]:
    """Return the runs of 0 to ``size`` - 1 that are not in ``numbers`` (a size read from a file may be huge)."""
    found, begin = [], 0
    for number in sorted({number for number in numbers if 0 <= number < size}):
        if number > begin:
            found.append(range(begin, number))
        begin = number + 1
    if begin < size:
        found.append(range(begin, size))
    return found


def missing_ranks(numbers: Iterable[int], size: int) -> str:
    """Return the ranks that ``gaps`` finds as text, as ``ranks`` does; empty if there are none."""
    found = gaps(numbers, size)
    many = len(found) > 1 or any(run.start + 1 < run.stop for run in found)  # the length of a huge run is no int of C
    return f"rank{'s' * many} {_written(found)}" if found else ""


def _written(runs: Iterable[range]) -> str:
    return ", ".join(str(run.start) if run.start + 1 == run.stop else f"{run.start}-{run.stop - 1}" for run in runs)
