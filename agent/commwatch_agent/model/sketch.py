"""A mergeable sketch of durations: logarithmic bins, quantiles within 2.2% of the true value. Pure."""

from __future__ import annotations

import math
import struct
from collections.abc import ItemsView, Iterable, Iterator, Mapping
from itertools import chain

#: 32 bins per doubling: a bin spans 2.2%, and its middle is at most 1.1% off.
BINS_PER_E = 32 / math.log(2)
_PAIR = struct.Struct("<hI")


def bin_of(value_ns: int) -> int:
    """Return the bin of a duration in ns; durations up to 1 ns share bin 0."""
    return int(math.log(value_ns) * BINS_PER_E) if value_ns > 1 else 0


def value_of(bin_number: int) -> float:
    """Return the middle of a bin in ns."""
    return math.exp((bin_number + 0.5) / BINS_PER_E)


def quantile(bins: Mapping[int, int], q: float) -> float | None:
    """Return the ``q``-quantile in ns by nearest rank, as in nccl-tests; ``None`` if empty."""
    total = sum(bins.values())
    rank = max(1, math.ceil(q * total))
    for number in sorted(bins):
        rank -= bins[number]
        if rank <= 0:
            return value_of(number)
    return None


def merge(into: dict[int, int], other: Mapping[int, int]) -> None:
    """Add the counts of ``other`` to ``into``."""
    for number, count in other.items():
        into[number] = into.get(number, 0) + count


def merged(sketches: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """Return the sum of the counts; many packed sketches take a tenth of the time of ``merge``."""
    import numpy as np  # here, as commands that only ask an agent begin without it

    packed, total = list[bytes](), dict[int, int]()
    for each in sketches:
        if isinstance(each, Packed):
            packed.append(each.data)
        else:
            merge(total, each)
    pairs = np.frombuffer(b"".join(packed), [("bin", "<i2"), ("count", "<u4")])
    if len(pairs):
        bins, least = pairs["bin"].astype(np.int64), int(pairs["bin"].min())
        # Sums of floats are exact up to 2**53, which no count reaches.
        counts = np.bincount(bins - least, pairs["count"])
        some = np.flatnonzero(counts)
        merge(total, dict(zip((some + least).tolist(), counts[some].astype(np.int64).tolist(), strict=True)))
    return total


def encode(bins: Mapping[int, int]) -> bytes:
    """Return the bins as bytes for the history."""
    if isinstance(bins, Packed):
        return bins.data
    return struct.pack("<" + "hI" * len(bins), *chain.from_iterable(sorted(bins.items())))


def decode(data: bytes) -> dict[int, int]:
    """Return the bins from the bytes of ``encode``."""
    return dict(_PAIR.iter_unpack(data))


class Packed(Mapping[int, int]):
    """Immutable bins in the form of ``encode``, which takes a tenth of the memory of a dictionary."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __getitem__(self, number: int) -> int:
        return decode(self.data)[number]

    def __iter__(self) -> Iterator[int]:
        return (number for number, _ in _PAIR.iter_unpack(self.data))

    def __len__(self) -> int:
        return len(self.data) // _PAIR.size

    def items(self) -> ItemsView[int, int]:
        """Return the items; decodes once, not once per bin."""
        return decode(self.data).items()
