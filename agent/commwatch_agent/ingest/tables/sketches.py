"""Memory of the sketches of one rank's cells: how much they may take, and what becomes of durations beyond it. Pure."""

from __future__ import annotations

from collections.abc import Collection

from commwatch_agent.ingest.tables.weights import BIN, PACKED_BIN
from commwatch_agent.model.cells import Cell
from commwatch_agent.model.shares import Account

#: Most bins of the sketches of closed cells that are not packed.
_MOST_LOOSE = 1 << 16
#: Bins that share one where there is no room for more: durations are then known within a factor of 4.
_COARSE = 64


def coarse(number: int) -> int:
    """Return the bin for durations of a bin for which there is no room."""
    return number // _COARSE * _COARSE + _COARSE // 2


class Sketches:
    """Charges an account for the bins of sketches: of live cells, and of the sums of closed ones."""

    def __init__(self, account: Account) -> None:
        self._account = account
        #: What is charged for live cells, and for sums.
        self._live_bytes = self._sums_bytes = 0
        #: Number of bins in sums, and whether these are packed.
        self._bins = 0
        self._packs = False

    def take(self, number: int) -> int:
        """Return how many new bins live cells may have, ``number`` at most."""
        while number and not self._account.take(BIN * number):
            number //= 2
        self._live_bytes += BIN * number
        return number

    def give(self, number: int) -> None:
        """Give back bins that were not needed."""
        self._account.give(BIN * number)
        self._live_bytes -= BIN * number

    def add(self, total: Cell, cell: Cell) -> None:
        """Add a closed cell to the sums of its kind."""
        self._bins -= len(total.bins)
        total.add(cell)
        self._bins += len(total.bins)
        if self._packs:
            total.pack()

    def settle(self, totals: Collection[Cell]) -> None:
        """Charge the sums instead of the live cells that they now contain; pack all sums if there are too many bins."""
        self._account.give(self._live_bytes)
        self._live_bytes = 0
        loose = BIN * self._bins
        if not self._packs and self._bins <= _MOST_LOOSE and self._account.change(self._sums_bytes, loose):
            self._sums_bytes = loose
        else:
            self.pack(totals)

    def pack(self, totals: Collection[Cell]) -> None:
        """Keep the sums packed from now on."""
        if not self._packs:
            self._packs = True
            for cell in totals:
                if isinstance(cell.bins, dict):
                    cell.pack()
        packed = PACKED_BIN * self._bins
        if self._account.change(self._sums_bytes, packed):
            self._sums_bytes = packed
