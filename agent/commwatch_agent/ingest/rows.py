"""The live cells that some records belong to, and the sums that the records add to them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import NamedTuple

import numpy as np

from commwatch.wire import events as ev
from commwatch_agent.ingest.columns import Codes, Columns, Ints, classes, combined, counts, distinct, first_of, sums
from commwatch_agent.ingest.rank_totals import CellTotals, RankTotals
from commwatch_agent.ingest.tables.bins import bins_of, buckets_of, codes_of
from commwatch_agent.model.cells import DURATION_BOUNDS_NS, CellKey

_BUCKETS = len(DURATION_BOUNDS_NS) + 1


class SlotBoundary(NamedTuple):
    """The end of a rank's slot."""

    #: Place of the first record after it.
    place: int
    #: Index of the rank, and wall time of that record.
    ring: int
    wall_ns: int


class Rows:
    """The live cells of some records, one row for each.

    Args:
        columns: the operations.
        at: [operations]: the place of each in the section.
        ranks: the totals, by index of the batch.
        cuts: where slots end, in order.
        marked: [ranks]: where the first step of each rank begins, -1 if it did before this section; ``None``: it did for all.
    """

    def __init__(
        self, columns: Columns, at: Ints, ranks: Sequence[RankTotals], cuts: Sequence[SlotBoundary], marked: Ints | None
    ) -> None:
        groups, kinds = columns.cell_group, classes(columns.size)
        more = [np.searchsorted([cut.place for cut in cuts], at, side="right")] if cuts else []
        startup = columns.flags & ev.BESIDE != 0
        if marked is not None:
            startup |= at < marked[columns.ring]
        more += [startup.astype(np.int64)] if startup.any() else []
        found, self.of = distinct(combined(columns.ring, groups, columns.op, kinds, *more))
        number = len(found)
        first = first_of(self.of, number)
        rings, codes = columns.ring[first].tolist(), columns.op[first].tolist()
        group_list, kind_list = groups[first].tolist(), kinds[first].tolist()
        early = startup[first].tolist()
        places, waiting = at[first].tolist(), list(reversed(cuts))
        cells: list[CellTotals | None] = [None] * number
        for row in np.argsort(first).tolist():  # the first come first: the number of cells is limited
            while waiting and waiting[-1].place <= places[row]:
                cut = waiting.pop()
                ranks[cut.ring].begin_slot(cut.wall_ns)
            key = CellKey(group_list[row], codes[row], kind_list[row] - 1, early[row])
            cells[row] = ranks[rings[row]].live(key)
        for cut in reversed(waiting):
            ranks[cut.ring].begin_slot(cut.wall_ns)
        self.cells = [cell for cell in cells if cell is not None]
        flags = [(cell.symmetric, cell.is_message, cell.joinable) for cell in self.cells]
        self.symmetric, self.p2p, self.joinable = np.array(flags, np.bool_).reshape(-1, 3).T
        self.numbers = np.array([cell.number for cell in self.cells], np.int64)

    def count_unmeasured(self, columns: Columns, of: Ints) -> None:
        """Count operations without a duration."""
        failed = columns.flags & ev.FAILED != 0
        for flags, raised in ((failed, True), (~failed, False)):
            if flags.any():
                rows, at = distinct(of[flags])
                number, size = counts(at, len(rows)).tolist(), sums(at, len(rows), columns.size[flags]).tolist()
                for row, count, total in zip(rows.tolist(), number, size, strict=True):
                    self.cells[row].cell.count_unmeasured(total, failed=raised, number=count)

    def count(self, columns: Columns, of: Ints, busy_ns: Sequence[int]) -> Codes:
        """Count operations with a duration; return for each the number of the cell and the bin, as ``counted_bins`` takes them.

        Args:
            of: the row of each operation.
            busy_ns: [rows]: how much longer the messages of a row were under way.
        """
        number, duration = len(self.cells), columns.end - columns.start
        bins = bins_of(duration)
        buckets = of * _BUCKETS + buckets_of(duration, bins)
        histogram = counts(buckets, number * _BUCKETS).reshape(number, _BUCKETS)
        totals = histogram.sum(axis=1)
        total, size = sums(of, number, duration).tolist(), sums(of, number, columns.size).tolist()
        waited = sums(of, number, columns.waited).tolist()
        some = np.flatnonzero(totals)
        for row, count, durations in zip(some.tolist(), totals[some].tolist(), histogram[some].tolist(), strict=True):
            at = self.cells[row]
            cell = at.cell
            cell.count += count
            cell.bytes += size[row]
            cell.duration_ns += total[row]
            cell.timed_bytes += size[row]
            cell.bus_bytes += size[row] * at.factor
            cell.durations = list(map(add, cell.durations, durations))
            if at.is_message:
                cell.p2p_wait_ns += waited[row] * 1000
                cell.busy_ns += busy_ns[row]
            else:
                cell.busy_ns += total[row]
        return codes_of(self.numbers[of], bins)

    def count_nccl(self, columns: Columns, of: Ints) -> None:
        """Count the operations that NCCL timed, by what it chose; and which of their channels ended last."""
        at = np.flatnonzero((columns.timing == ev.BY_NCCL) & (columns.aux & ev.SHARED_KERNEL == 0))
        if not len(at):
            return
        kinds, which = distinct(combined(of[at], columns.aux[at]))
        first = first_of(which, len(kinds))
        size, duration = columns.size[at], (columns.end - columns.start)[at]
        queued = np.maximum(columns.start - columns.launch, 0)[at]
        each = zip(
            of[at][first].tolist(), columns.aux[at][first].tolist(), counts(which, len(kinds)).tolist(),
            sums(which, len(kinds), size).tolist(), sums(which, len(kinds), duration).tolist(),
            sums(which, len(kinds), queued).tolist(), strict=True,
        )  # fmt: skip
        for _, (row, choice, count, total, total_ns, queued_ns) in sorted(zip(first.tolist(), each, strict=True)):
            cell = self.cells[row]
            cell.owner.ran_of(cell.key, choice).add(total, total * cell.factor, total_ns, queued_ns, count)
        at = at[(columns.tag[at] > 0) & ~self.p2p[of[at]]]
        if len(at):
            self._count_ends(of[at], columns.aux[at], columns.tag[at])

    def _count_ends(self, of: Ints, aux: Ints, tag: Ints) -> None:
        last = (tag & ev.CHANNEL) - 1
        kinds, which = distinct(combined(of, aux, last))
        first = first_of(which, len(kinds))
        each = zip(
            of[first].tolist(), aux[first].tolist(), last[first].tolist(), counts(which, len(kinds)).tolist(),
            sums(which, len(kinds), tag >> ev.CHANNEL_BITS).tolist(), strict=True,
        )  # fmt: skip
        for row, choice, channel, count, apart_us in each:
            cell = self.cells[row]
            cell.owner.ran_of(cell.key, choice).add_ends(channel, apart_us, count)
