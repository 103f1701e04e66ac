"""Joins the collectives of some records over their ranks, and adds waits and lateness to the totals. Pure.

Collectives whose parts all came with these records are joined as tables. The rest goes to ``GroupJoin`` part by part: the ones that wait
for a rank, have a root, or look as if ranks disagree. Parts in groups with ranks on other nodes are only kept.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from commwatch.wire import events as ev
from commwatch_agent.ingest.collective_join import (
    NOT_KNOWN_NS,
    GroupJoin,
    Part,
    Waits,
    own_lateness_at_root,
    waits_at_root,
)
from commwatch_agent.ingest.columns import Columns, Flags, Ints, by_index, combined, counts, distinct, first_of, sums
from commwatch_agent.ingest.joining import Parts, complete
from commwatch_agent.ingest.lateness import Collectives, add_late, lost, of_waits, own_lateness, split
from commwatch_agent.ingest.own_time import NO_RUN
from commwatch_agent.ingest.part_table import PartTable, blocked_ns
from commwatch_agent.ingest.rank_totals import CellTotals, RankTotals
from commwatch_agent.ingest.rows import Rows
from commwatch_agent.ingest.stragglers import BIN_NS


class BatchJoins:
    """The joins of one section.

    Args:
        rows: the live cells.
        first_message: place of the first message of each rank; -1: it is in an earlier section.
        slots: places where the slots of a rank end.
    """

    def __init__(
        self,
        rows: Rows,
        ranks: Sequence[RankTotals],
        first_message: Mapping[RankTotals, int],
        slots: Mapping[RankTotals, list[int]],
    ) -> None:
        self._rows, self._ranks, self._first_message, self._slots = rows, ranks, first_message, slots
        index: dict[int, int] = {}
        self._joins: list[GroupJoin] = []
        self._of_row = np.zeros(len(rows.cells), np.int64)
        for row, cell in enumerate(rows.cells):
            if cell.join is not None:
                if id(cell.join) not in index:
                    index[id(cell.join)] = len(self._joins)
                    self._joins.append(cell.join)
                self._of_row[row] = index[id(cell.join)]

    def join(self, columns: Columns, of: Ints, at: Ints, own: Ints, run: Ints) -> None:
        """Join collectives.

        Args:
            columns: the parts.
            of, at: [parts]: row and place in the section of each.
            own, run: [parts]: as in ``own_time``.
        """
        if not len(of):
            return
        symmetric = self._rows.symmetric[of]
        self._compare(columns, of, symmetric)
        here = np.array([join.is_here for join in self._joins], np.bool_)[self._of_row[of]]

        def some(wanted: Ints) -> PartTable:
            return PartTable.of(self._rows.cells, columns.of(wanted), of[wanted], own[wanted], run[wanted])

        # Where the root is not known, neither are the waits for it.
        apart = np.flatnonzero(~here & (symmetric | (columns.peer >= 0)))
        if len(apart):
            self._keep(some(apart[by_index(self._of_row[of[apart]])]))
        mine = np.flatnonzero(symmetric & here)
        parts = self._parts(columns.of(mine), of[mine], own[mine], run[mine])
        repeated = len({totals.rank for totals in self._ranks}) < len(self._ranks)
        tables, left = complete(parts, self._joins, repeated)
        here[mine] = left
        rest = np.flatnonzero(here)
        joined = self._one_by_one(some(rest), at[rest])
        made = [self._of_table(parts, table, at[mine], joined.pop(table.shape[1], [])) for table in tables]
        made += [self._of_waits(others) for others in joined.values()]
        if made:
            add_late(made, own_lateness(made, self._joins), self._joins)

    def _compare(self, columns: Columns, of: Ints, symmetric: Flags) -> None:
        duration, of = (columns.end - columns.start)[symmetric], of[symmetric]
        number = counts(of, len(self._rows.cells))
        total = sums(of, len(self._rows.cells), duration).tolist()
        for row in np.flatnonzero(number).tolist():
            compared = self._rows.cells[row].compared
            compared.count += int(number[row])
            compared.duration_ns += total[row]

    def _parts(self, columns: Columns, of: Ints, own: Ints, run: Ints) -> Parts:
        ranks = np.array([totals.rank for totals in self._ranks], np.int64)
        return Parts(
            self._of_row[of], columns.ring, ranks[columns.ring], of, columns.op, columns.size, self._dtypes(columns), columns.seq,
            columns.launch, columns.end, columns.end - columns.start, own, run, blocked_ns(columns),
        )  # fmt: skip

    def _dtypes(self, columns: Columns) -> Ints:
        """Return the same number for the same name: each ring has its own numbers."""
        known = [totals.dtypes for totals in self._ranks]
        if all(each == known[0] for each in known):
            return np.array([code if code in known[0] else 256 for code in range(256)])[columns.dtype]
        names: dict[str | None, int] = {None: 0}
        table = np.zeros((len(known), 256), np.int64)
        for ring, each in enumerate(known):
            for code, name in each.items():
                if code < 256:
                    table[ring, code] = names.setdefault(name, len(names))
        return table[columns.ring, columns.dtype]

    # -- part by part ---------------------------------------------------------------------------

    def _keep(self, parts: PartTable) -> None:
        """Pass parts of collectives that cannot be complete to their joins; ``parts`` has those of each join together."""
        index = self._of_row[parts.rows]
        bounds = [0, *(np.flatnonzero(index[1:] != index[:-1]) + 1).tolist(), len(index)]
        for since, until in pairwise(bounds):
            self._joins[index[since]].keep(parts.some(since, until))

    def _one_by_one(self, parts: PartTable, at: Ints) -> dict[int, list[tuple[int, GroupJoin, Waits]]]:
        """Pass parts to their joins; return what became complete, by size of the group, with the place of its last part."""
        found: dict[int, list[tuple[int, GroupJoin, Waits]]] = {}
        for (seq, part), place in zip(parts, at.tolist(), strict=True):
            cell: CellTotals = part.totals
            join = cell.join
            assert join is not None
            if part.root is not None:
                self._add_rooted(join, seq, part, part.root, place)
                continue
            waits = join.add(seq, part)
            if waits is not None:
                self._write(waits.waits, place)
                late: CellTotals = waits.late.totals
                late.owner.add_lateness(late.key.group, waits.lateness_ns)
                found.setdefault(join.size, []).append((place, join, waits))
        return found

    def _add_rooted(self, join: GroupJoin, seq: int, part: Part, root: int, place: int) -> None:
        if root < 0:  # not known, so neither are the waits for it
            return
        to_root = part.totals.op in ev.TO_ROOT
        parts = join.add_rooted(seq, part)
        if parts is not None:
            self._write(zip(parts.values(), waits_at_root(parts, root, to_root).values(), strict=True), place)
            late = own_lateness_at_root(parts, root, True) if to_root else _late_root(join, parts, root)
            join.window.add(part.end_ns, join.own_lateness.once(parts, late))

    def _write(self, waits: Iterable[tuple[Part, int]], place: int) -> None:
        for part, wait in waits:
            sums: CellTotals = part.totals
            slot = bisect_right(self._slots.get(sums.owner, ()), place)
            cell = sums.cell if sums.live else sums.owner.cell(sums.key, slot)
            cell.wait_ns += wait
            cell.joined += 1
            first = self._first_message.get(sums.owner)
            if part.run is None and (first < place if first is not None else sums.owner.messages):
                sums.owner.add_wait(part.end_ns, wait)

    # -- tables ---------------------------------------------------------------------------------

    def _of_table(self, parts: Parts, table: Ints, at: Ints, rest: list[tuple[int, GroupJoin, Waits]]) -> Collectives:
        """Add the waits of complete collectives of groups of one size; return these collectives and others.

        Args:
            table: [collectives, ranks]: places in ``parts``.
            at: [parts]: their places in the section.
            rest: more collectives, whose waits are added already.
        """
        wait, late, lateness = split(parts.duration[table])
        last = table[np.arange(len(table)), late]
        self._add_waits(parts, table, wait, at[table[:, -1]])
        rows, which = distinct(parts.row[last])
        for row, total in zip(rows.tolist(), sums(which, len(rows), lateness).tolist(), strict=True):
            cell = self._rows.cells[row]
            cell.owner.add_lateness(cell.key.group, total)
        lost_ns = lost(parts.duration[table], parts.blocked[table])
        of_ranks = parts.rank[table], wait, parts.own[table], parts.run[table]
        made = Collectives(parts.join[table[:, 0]], parts.end[last], *of_ranks, lost_ns)
        if rest:
            places = np.append(at[table[:, -1]], [place for place, _, _ in rest])
            order = np.argsort(places, kind="stable")
            both = zip(made, self._of_waits(rest), strict=True)
            made = Collectives(*(np.concatenate(pair)[order] for pair in both))
        return made

    def _of_waits(self, found: Sequence[tuple[int, GroupJoin, Waits]]) -> Collectives:
        index = {id(join): at for at, join in enumerate(self._joins)}
        return of_waits([waits for _, _, waits in found], [index[id(join)] for _, join, _ in found])

    def _add_waits(self, parts: Parts, table: Ints, wait: Ints, completed: Ints) -> None:
        rows, waits, ring = parts.row[table].ravel(), wait.ravel(), parts.ring[table]
        slot = np.zeros(len(rows), np.int64)
        for index, totals in enumerate(self._ranks if self._slots else ()):
            if totals in self._slots:
                mine = np.flatnonzero(ring.ravel() == index)
                slot[mine] = np.searchsorted(
                    self._slots[totals], np.repeat(completed, table.shape[1])[mine], side="right"
                )
        self._add_to_cells(rows, slot, waits)
        first = np.array([self._first_message[totals] for totals in self._ranks], np.int64)
        blocked = (parts.run[table] == NO_RUN) & (first[ring] < completed[:, None])
        if blocked.any():
            add_waits(self._ranks, ring[blocked], parts.end[table][blocked], wait[blocked])

    def _add_to_cells(self, rows: Ints, slots: Ints, waits: Ints) -> None:
        """Add waits to the cells of rows, in the slot of the rank that was live when the collective was complete."""
        found, which = distinct(combined(rows, slots))
        first = first_of(which, len(found))
        number, total = counts(which, len(found)).tolist(), sums(which, len(found), waits).tolist()
        for row, slot, count, wait in zip(rows[first].tolist(), slots[first].tolist(), number, total, strict=True):
            at = self._rows.cells[row]
            cell = at.owner.cell(at.key, slot) if at.owner in self._slots else at.cell
            cell.wait_ns += wait
            cell.joined += count


def _late_root(join: GroupJoin, parts: Mapping[int, Part], root: int) -> dict[int, int]:
    """Return the own lateness in ns by rank in an operation in which all wait for the root.

    A root that marks no steps may wait for requests. One that does is late for the others that do, by more than usual.
    """
    late = dict.fromkeys(parts, 0)
    stepping = {rank: part for rank, part in parts.items() if not part.totals.key.startup}
    compared = stepping if len(stepping) > 1 else parts
    if root in stepping and all(part.own_ns != NOT_KNOWN_NS for part in compared.values()):
        late[root] = join.usual_lateness.beyond(parts[root], own_lateness_at_root(compared, root, False)[root])
    return late


def add_waits(ranks: Sequence[RankTotals], ring: Ints, end: Ints, waited_ns: Ints) -> None:
    """Add the waits of ranks that have messages, by their ends."""
    if not len(ring):
        return
    bins = end // BIN_NS
    found, which = distinct(combined(ring, bins - bins.min()))
    first, total = first_of(which, len(found)), sums(which, len(found), waited_ns).tolist()
    for at in np.argsort(first).tolist():
        ranks[int(ring[first[at]])].add_wait(int(end[first[at]]), total[at])
