"""Parts of collectives as a table, for those that are joined part by part, and perhaps much later. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from commwatch.wire import events as ev
from commwatch_agent.ingest.collective_join import NOT_KNOWN_NS, Part
from commwatch_agent.ingest.columns import Columns, Ints
from commwatch_agent.ingest.own_time import NO_RUN
from commwatch_agent.ingest.rank_totals import CellTotals

_FIELDS = ("seq", "op", "launch", "end", "start", "size", "dtype", "peer")
#: Place of the row, and of the number, among the fields of a table.
_ROW, _SEQ = 0, 1


def blocked_ns(columns: Columns) -> Ints:
    """Return how long a thread was blocked in each collective, as ``Part.blocked_ns``."""
    return np.where(columns.flags & ev.WAIT_SEEN, columns.waited * 1000, NOT_KNOWN_NS)


class PartTable:
    """Some parts, in the order in which they were read.

    Args:
        cells: the live cells by row.
        fields: [fields, parts]: row, fields of the record, blocked time (``Part``), own time and run (``own_time``).
    """

    def __init__(self, cells: Mapping[int, CellTotals], fields: Ints) -> None:
        self._cells, self._fields = cells, fields

    @staticmethod
    def of(cells: Sequence[CellTotals], columns: Columns, row: Ints, own: Ints, run: Ints) -> PartTable:
        """Return records as a table, with the ``row`` of each in ``cells``."""
        fields = np.stack((row, *(getattr(columns, name) for name in _FIELDS), blocked_ns(columns), own, run))
        return PartTable(dict(enumerate(cells)), fields)

    def some(self, since: int, until: int) -> PartTable:
        """Return the parts at some places as a table of its own, which keeps no others in memory."""
        fields = self._fields[:, since:until].copy()
        return PartTable({row: self._cells[row] for row in set(fields[_ROW].tolist())}, fields)

    @property
    def rows(self) -> Ints:
        """The row of each part."""
        rows: Ints = self._fields[_ROW]
        return rows

    def __len__(self) -> int:
        return len(self.rows)

    def numbers(self) -> set[int]:
        """Return the numbers of the collectives whose ranks end together."""
        symmetric = [row for row, cell in self._cells.items() if cell.symmetric]
        return set(self._fields[_SEQ, np.isin(self.rows, symmetric)].tolist())

    def __iter__(self) -> Iterator[tuple[int, Part]]:
        """Yield number and part of each collective; a root that is not known is negative."""
        for row, seq, op, launch, end, start, size, dtype, peer, blocked, own_ns, run in zip(
            *self._fields.tolist(), strict=True
        ):
            cell = self._cells[row]
            owner, of_run = cell.owner, None if run == NO_RUN else run
            data, root = (size, owner.dtypes.get(dtype)), None if cell.symmetric else peer
            yield seq, Part(owner.rank, op, launch, end, end - start, cell, *data, own_ns, of_run, root, blocked)
