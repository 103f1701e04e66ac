"""The bins of a sketch for many durations at a time. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from commwatch_agent.ingest.columns import Codes, Ints, counts, distinct
from commwatch_agent.model.cells import DURATION_BOUNDS_NS
from commwatch_agent.model.sketch import BINS_PER_E, bin_of

#: More than the bins of a sketch of durations in 64 bits.
_BINS = 2048


def _least_of_bins() -> Ints:
    """Return the least duration of each bin (``sketch.bin_of``), in ns; numpy's logarithm may differ from Python's in the last digit."""
    least, value = [0], 1
    for number in range(1, bin_of((1 << 63) - 1) + 1):
        low, high = value, min(2 * value + 2, (1 << 63) - 1)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if bin_of(middle) >= number else (middle + 1, high)
        value = low
        least.append(value)
    return np.array(least, np.int64)


_LEAST = _least_of_bins()
#: Of each bin: the bucket of its shortest durations in ``Cell.durations``, and the longest duration that is still in it.
_BUCKET_OF = np.searchsorted(DURATION_BOUNDS_NS, _LEAST)
_BUCKET_UPTO = np.array([*DURATION_BOUNDS_NS, 1 << 62], np.int64)[_BUCKET_OF]


def bins_of(durations: Ints) -> Ints:
    """Return the bin of each duration in ns (``sketch.bin_of``)."""
    about = np.log(np.maximum(durations, 1)) * BINS_PER_E
    bins = about.astype(np.int64)
    bins += durations >= _LEAST[bins + 1]  # numpy's logarithm may be off by its last digit
    bins -= durations < _LEAST[bins]
    return bins


def buckets_of(durations: Ints, bins: Ints) -> Ints:
    """Return the bucket in ``Cell.durations`` of each duration in ns, given its bin."""
    buckets: Ints = _BUCKET_OF[bins] + (durations > _BUCKET_UPTO[bins])
    return buckets


def codes_of(numbers: Ints, bins: Ints) -> Codes:
    """Return one code for the number of a cell and a bin, as ``counted_bins`` takes them."""
    return (numbers * _BINS + bins).astype(np.int32)


def counted_bins(codes: Sequence[Codes]) -> Iterator[tuple[int, int, int]]:
    """Yield number of the cell, bin and how many durations are in it, from codes (``codes_of``)."""
    each = np.concatenate(codes).astype(np.int64)
    found, which = distinct(each)
    return zip((found // _BINS).tolist(), (found % _BINS).tolist(), counts(which, len(found)).tolist(), strict=True)
