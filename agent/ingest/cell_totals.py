"""Live cells, and what the join of a collective adds to those of its ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from commwatch.collectors.wire import events as ev
from commwatch.core.cells import Cell, CellKey, Compared
from commwatch.core.intervals import Intervals
from commwatch.ingest.collective_join import GroupJoin, Part, Waits, own_lateness_at_root, waits_at_root

if TYPE_CHECKING:
    from commwatch.ingest.rank_totals import RankTotals


class CellTotals:
    """A live cell with all that counting a record needs, for one lookup per record."""

    __slots__ = ("bins", "busy", "cell", "compared", "factor", "join", "key", "live", "op", "owner", "p2p", "symmetric")

    def __init__(
        self, owner: RankTotals, key: CellKey, op: str, factor: float, *, join: GroupJoin | None, p2p: Intervals | None
    ) -> None:
        self.owner, self.key, self.op, self.factor, self.join, self.p2p = owner, key, op, factor, join, p2p
        self.symmetric = op in ev.SYMMETRIC
        self.busy = owner.steps.busy(owner.group(key.group).label)
        self.cell, self.compared = Cell(), owner.compared.setdefault(key.group, Compared())
        #: The cell's bins, while it is live.
        self.bins: dict[int, int] = {}
        self.cell.bins = self.bins
        #: False once the cell has been closed.
        self.live = True

    def close(self) -> None:
        """Stop counting and save memory, because incomplete collectives may keep this object for long."""
        self.live, self.bins = False, {}
        self.cell.pack()


def compare(sums: CellTotals, join: GroupJoin, seq: int, part: Part, root: int) -> None:
    """Join a rank's part with those of the other ranks."""
    if not sums.symmetric:
        parts, to_root = join.add_rooted(seq, part, root), sums.op in ev.TO_ROOT
        if parts is not None:
            _write(zip(parts.values(), waits_at_root(parts, root, to_root).values(), strict=True))
            join.window.add(part.end_ns, own_lateness_at_root(parts, root, to_root))
        return
    sums.compared.count += 1
    sums.compared.duration_ns += part.duration_ns
    joined = join.add(seq, part)
    if joined is not None:
        _settle(joined, join)


def _settle(joined: Waits, join: GroupJoin) -> None:
    """Add a complete collective to the totals of its ranks."""
    _write(joined.waits)
    late: CellTotals = joined.late.totals
    lateness = late.owner.lateness_ns
    lateness[late.key.group] = lateness.get(late.key.group, 0) + joined.lateness_ns
    join.window.add(joined.late.end_ns, join.own_lateness.of(joined))


def _write(waits: Iterable[tuple[Part, int]]) -> None:
    for part, wait in waits:
        sums: CellTotals = part.totals
        cell = sums.cell if sums.live else sums.owner.cell(sums.key)
        cell.wait_ns += wait
        cell.joined += 1
        if sums.owner.messages and part.run is None:
            sums.owner.add_wait(part.end_ns, wait)


def op_of(part: Part) -> tuple[str, int, str | None]:
    """Return op name, size in bytes and dtype name of a part."""
    sums: CellTotals = part.totals
    return sums.owner.op_name(part.op), part.size, part.dtype


def must_be_equal(part: Part) -> tuple[str, int | None, str | None]:
    """Return what must be equal on all ranks of a collective."""
    name, size, dtype = op_of(part)
    return name, size if name in ev.SAME_SIZE else None, dtype
