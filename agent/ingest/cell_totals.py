"""Live cells, and what the ranks of a collective must agree on. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commwatch.collectors.wire import events as ev
from commwatch.core.cells import Cell, CellKey, Compared
from commwatch.core.intervals import Intervals
from commwatch.ingest.collective_join import GroupJoin, Part

if TYPE_CHECKING:
    from commwatch.ingest.rank_totals import RankTotals


class CellTotals:
    """A live cell with all that counting its records needs."""

    __slots__ = (
        "bins", "busy", "cell", "compared", "factor", "is_message", "join", "joinable", "key", "live", "number", "op", "owner", "symmetric", "union",
    )  # fmt: skip

    def __init__(
        self,
        owner: RankTotals,
        key: CellKey,
        op: str,
        factor: float,
        *,
        number: int,
        join: GroupJoin | None,
        union: Intervals | None,
    ) -> None:
        self.owner, self.key, self.op, self.factor = owner, key, op, factor
        #: Place among the rank's live cells.
        self.number = number
        #: Of collectives whose ranks are joined.
        self.join, self.joinable = join, join is not None
        #: Of messages: when some of their group and op were under way.
        self.union, self.is_message = union, union is not None
        self.symmetric = op in ev.SYMMETRIC
        self.busy = owner.steps.busy(owner.group(key.group).label)
        self.cell, self.compared = Cell(), owner.compared.setdefault(key.group, Compared())
        #: The cell's bins, while it is live.
        self.bins: dict[int, int] = {}
        self.cell.bins = self.bins
        #: False once the cell's slot has ended.
        self.live = True

    def close(self) -> None:
        """Stop counting and save memory, because incomplete collectives may keep this object for long."""
        self.bins = {}
        self.cell.pack()


def op_of(part: Part) -> tuple[str, int, str | None]:
    """Return op name, size in bytes and dtype name of a part."""
    sums: CellTotals = part.totals
    return sums.owner.op_name(part.op), part.size, part.dtype


def must_be_equal(part: Part) -> tuple[str, int | None, str | None]:
    """Return what must be equal on all ranks of a collective."""
    name, size, dtype = op_of(part)
    return name, size if name in ev.SAME_SIZE else None, dtype
