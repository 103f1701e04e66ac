"""Summarises cells as rows: counts, percentiles, bandwidths. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from commwatch.wire.events import OPS
from commwatch_agent.history.rows import RingRow
from commwatch_agent.model.api_views import Row
from commwatch_agent.model.cells import UNKNOWN_GROUP, Cell, CellKey, Counted, GroupInfo, counted, sum_of
from commwatch_agent.model.sketch import quantile

#: What a summary can be split by; ``startup``: whether operations were before the first step of their rank, or beside its training.
DIMENSIONS = ("job_id", "rank", "group", "group_id", "op", "size", "startup")
#: Cells that are added up at once; more would take much memory.
_AT_ONCE = 16


def identify(
    cells: Iterable[tuple[int, CellKey, Cell]],
    rings: Mapping[int, RingRow],
    groups: Mapping[tuple[int, int], GroupInfo],
    ops: Mapping[tuple[int, int], str],
) -> Iterable[Counted]:
    """Yield stored cells (ring, key, cell) with their names; cells of rings not in ``rings`` are left out."""
    for ring, key, cell in cells:
        row = rings.get(ring)
        if row is not None:
            op = OPS[key.op - 1] if 1 <= key.op <= len(OPS) else ops.get((ring, key.op), "unknown")
            yield counted(row.job, row.rank, groups.get((ring, key.group), UNKNOWN_GROUP), op, key=key, cell=cell)


def merged(cells: Iterable[Counted]) -> list[Counted]:
    """Merge cells over time: return one for each job, rank, group, op and size, those of the startup apart."""
    found: dict[tuple[str | int | None, ...], tuple[Counted, list[Cell]]] = {}
    for one in cells:
        _, parts = found.setdefault((one.job_id, one.rank, one.group_id, one.op, one.size, one.startup), (one, []))
        parts.append(one.cell)
        if len(parts) >= _AT_ONCE:
            parts[:] = [sum_of(parts)]
    return [first._replace(cell=sum_of(parts)) for first, parts in found.values()]


def summarise(
    cells: Iterable[Counted],
    by: Sequence[str],
    efficiency: Callable[[list[Counted]], tuple[float, str] | None] = lambda cells: None,
) -> list[Row]:
    """Add up cells by the given dimensions; return rows, most time first.

    Args:
        efficiency: returns the efficiency of cells together, and the kind of reference.
    """
    kinds: dict[tuple[str | int | None, ...], list[Counted]] = {}
    for item in cells:
        kinds.setdefault(tuple(getattr(item, dimension) for dimension in by), []).append(item)
    rows = [_row(dict(zip(by, key, strict=True)), items, efficiency(items)) for key, items in kinds.items()]
    return sorted(rows, key=lambda row: (-row.seconds, str(row.by)))


def _row(by: dict[str, str | int | None], items: list[Counted], efficiency: tuple[float, str] | None) -> Row:
    cell, sizes = sum_of(item.cell for item in items), {item.group_size for item in items}
    seconds = cell.busy_ns / 1e9
    p50, p95, p99 = (quantile(cell.bins, q) for q in (0.5, 0.95, 0.99))
    return Row(
        by=by,
        ranks=len({(item.job_id, item.rank) for item in items}),
        group_size=sizes.pop() if len(sizes) == 1 else None,
        count=cell.count,
        bytes=cell.bytes,
        seconds=seconds,
        p50_s=None if p50 is None else p50 / 1e9,
        p95_s=None if p95 is None else p95 / 1e9,
        p99_s=None if p99 is None else p99 / 1e9,
        algbw=cell.timed_bytes / seconds if seconds and cell.timed_bytes else None,
        busbw=cell.bus_bytes / seconds if seconds and cell.bus_bytes else None,
        wait_s=cell.wait_ns / 1e9 if cell.joined else None,
        p2p_wait_s=cell.p2p_wait_ns / 1e9 if cell.p2p_wait_ns else None,
        failed=cell.failed,
        untimed=cell.untimed,
        efficiency=None if efficiency is None else efficiency[0],
        reference=None if efficiency is None else efficiency[1],
    )
