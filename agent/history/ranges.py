"""Ranges of the fields in a run of raw records. Pure. Import it only where there are records, because it brings in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from commwatch.collectors.wire.events import COUNTED, FAILED, MAX_PLAUSIBLE, STEP_MARK, UNTIMED
from commwatch.core.records import RECORD
from commwatch.history.extents import BITS, Extent

_BIT = 1 << np.arange(BITS, dtype=np.int64)


class Ranges:
    """Ranges in whole records, at least one."""

    def __init__(self, records: bytes | bytearray) -> None:
        self._all = np.frombuffer(records, RECORD)
        self._operations = np.flatnonzero(self._all["op"] != STEP_MARK)

    def times(self, offset_ns: int) -> tuple[int, int]:
        """Return the first and the last end of a record, plus ``offset_ns``; without implausible ones, as 0 if all are."""
        ends = self._all["end"]
        if int(ends.max()) + offset_ns >= MAX_PLAUSIBLE:
            ends = ends[ends < MAX_PLAUSIBLE - offset_ns]
        first, last = (int(ends.min()), int(ends.max())) if len(ends) else (0, 0)
        return first + offset_ns, last + offset_ns

    def extent(self) -> Extent:
        """Return the extent of the operations that are recorded one by one."""
        single = self._of("timing") != COUNTED
        if not single.any():
            return Extent(0, 0, 0, 0, 0)
        start, end, seqs = self._of("start"), self._of("end"), self._of("seq")[single]
        # Times may be anything.
        timed = single & (self._of("flags") & (UNTIMED | FAILED) == 0) & (end >= start)
        longest = int((end - start)[timed].max()) if timed.any() else -1
        bits = (int(np.bitwise_or.reduce(_BIT[self._of(name)[single] % BITS])) for name in ("op", "group"))
        return Extent(*bits, min(longest, MAX_PLAUSIBLE - 1), int(seqs.min()), int(seqs.max()))

    def _of(self, name: str) -> npt.NDArray[Any]:
        """Return a field of the operations."""
        return self._all[name].take(self._operations)

    def spans(self) -> list[tuple[int, int, int]]:
        """Return each group with the range of its sequence numbers; a step mark has no group."""
        groups, seqs = self._of("group"), self._of("seq")
        if not len(groups):
            return []
        order = np.argsort(groups, kind="stable")
        groups, seqs = groups[order], seqs[order]
        first = np.flatnonzero(np.append(True, groups[1:] != groups[:-1]))
        lowest, highest = np.minimum.reduceat(seqs, first), np.maximum.reduceat(seqs, first)
        return list(zip(groups[first].tolist(), lowest.tolist(), highest.tolist(), strict=True))
