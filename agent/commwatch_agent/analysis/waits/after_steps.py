"""Operations after the last step of a rank, such as those of a final evaluation: they are in no step. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from commwatch.wire import events as ev
from commwatch_agent.history.operations import Operation
from commwatch_agent.model.api_views import Row


class After(NamedTuple):
    """An operation after the last step of its rank."""

    operation: Operation
    #: How long the rank waited for late ranks, or may have: all of its duration if not all ranks are known to be after their steps.
    waited_s: float


def after_steps(operations: Iterable[Operation], ended_at: Mapping[int, float]) -> list[After]:
    """Return the operations that ended after the last step of their rank.

    Args:
        ended_at: when the last step of each rank ended, in s of Unix time; operations of other ranks are left out.
    """
    after = [each for each in operations if each.rank in ended_at and each.end_at > ended_at[each.rank]]
    together: dict[tuple[str, int], list[float]] = {}
    for each in after:
        if each.op not in ev.P2P:
            together.setdefault((each.group_id, each.seq), []).append(each.duration_s or 0.0)
    found = []
    for each in after:
        parts = together.get((each.group_id, each.seq), [])
        shortest_s = min(parts) if len(parts) == each.group_size else 0.0
        found.append(After(each, 0.0 if each.op in ev.P2P else (each.duration_s or 0.0) - shortest_s))
    return found


def rows_without(rows: Iterable[Row], after: Iterable[After]) -> list[Row]:
    """Return sums of operations, by group and op or by rank, without some of these operations."""
    of_rows: dict[tuple[str | int | None, ...], list[After]] = {}
    left = list(rows)
    names = [name for name in ("rank", "group", "op") if left and name in left[0].by]
    for each in after:
        of_rows.setdefault(tuple(getattr(each.operation, name) for name in names), []).append(each)
    less = (_less(row, of_rows.get(tuple(row.by[name] for name in names), [])) for row in left)
    return [row for row in less if row.count + row.failed > 0]


def _less(row: Row, after: list[After]) -> Row:
    if not after:
        return row
    counted = [each for each in after if not each.operation.failed]
    return replace(
        row,
        count=max(0, row.count - len(counted)),
        bytes=max(0, row.bytes - sum(each.operation.size_bytes or 0 for each in counted)),
        seconds=max(0.0, row.seconds - sum(each.operation.duration_s or 0.0 for each in after)),
        wait_s=_rest(row.wait_s, sum(each.waited_s for each in after)),
        p2p_wait_s=_rest(row.p2p_wait_s, sum(each.operation.p2p_wait_s or 0.0 for each in after)),
    )


def _rest(all_s: float | None, less_s: float) -> float | None:
    return None if all_s is None else max(0.0, all_s - less_s)
