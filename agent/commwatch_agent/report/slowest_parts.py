"""The buckets and units of a model whose collectives take the most time, for the report of a job. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType

from commwatch.wire.events import SYMMETRIC
from commwatch_agent.history.operations import Operation
from commwatch_agent.reference.efficiency import expected
from commwatch_agent.reference.references import Reference
from commwatch_agent.text.units import percent, rate, seconds, size

#: Most operations that are looked at, the latest; and most rows.
MOST_OPERATIONS, MOST_ROWS = 10_000, 10
#: What is left out in a narrow terminal, the least important first.
LESS = ("count", "size")
LEGEND = (
    f"Of the latest {MOST_OPERATIONS:,} operations, those with the most time without the wait first. Mean, wait: of an operation, the wait for late ranks; "
    "busbw: all bus bytes by all time. Mean and busbw include the wait; efficiency, where a reference is known, does not."
)


@dataclass(frozen=True)
class PartFigures:
    """The collectives of one kind that carry a part of the model, of all ranks."""

    part: str
    group: str
    op: str
    size_bytes: int
    count: int
    mean_s: float
    #: Mean seconds of an operation in which it waited for late ranks; ``None``: not known for more than one in ten.
    wait_s: float | None
    #: All bus bytes by all time, in bytes per second; ``None``: not defined.
    busbw: float | None
    #: Expected time / mean time without the wait, as of ``Row``; ``None``: no reference, or the wait is not known.
    efficiency: float | None = None

    @property
    def transfer_s(self) -> float:
        """Seconds of all operations without the wait, where it is known."""
        return self.count * (self.mean_s - (self.wait_s or 0.0))


def slowest(
    operations: Iterable[Operation], references: Mapping[tuple[str, str], Sequence[Reference]] = MappingProxyType({})
) -> list[PartFigures]:
    """Return the figures of each part, that with the most time without waits first; operations without a part or a duration are left out.

    Args:
        references: by group label and op, as in ``Totals``.
    """
    known = [one for one in operations if one.part is not None and one.duration_s is not None]
    transfers = _transfers(known)
    found: dict[tuple[str, str, str, int], list[Operation]] = {}
    for one in known:
        found.setdefault((str(one.part), one.group, one.op, one.size_bytes or 0), []).append(one)
    figures = (_figures(of_kind, transfers, references.get(kind[1:3], ())) for kind, of_kind in found.items())
    return sorted(figures, key=lambda each: -each.transfer_s)


def _figures(
    of_kind: list[Operation], transfers: Mapping[tuple[str, int, int], float], references: Sequence[Reference]
) -> PartFigures:
    """Return the figures of operations that carry one part; where waits are known, of the operations that have one, so that the values agree."""
    first = of_kind[0]
    joined = [one for one in of_kind if _place(one) in transfers]
    is_joined = 10 * len(joined) >= 9 * len(of_kind)
    judged = joined if is_joined else of_kind
    time_s = sum(map(_duration, judged))
    bus_bytes = [one.busbw * _duration(one) for one in judged if one.busbw is not None]
    transfer_s = fmean(transfers[_place(one)] for one in joined) if is_joined else None
    by = expected(references, first.op, first.group_size, first.size_bytes or 0)
    return PartFigures(
        part=str(first.part),
        group=first.group,
        op=first.op,
        size_bytes=first.size_bytes or 0,
        count=len(of_kind),
        mean_s=time_s / len(judged),
        wait_s=fmean(_duration(one) - transfers[_place(one)] for one in joined) if is_joined else None,
        busbw=sum(bus_bytes) / time_s if bus_bytes else None,
        efficiency=by[1] / transfer_s if by is not None and transfer_s else None,
    )


def _place(one: Operation) -> tuple[str, int, int]:
    return one.group_id, one.restart, one.seq


def _duration(one: Operation) -> float:
    assert one.duration_s is not None
    return one.duration_s


def _transfers(operations: Iterable[Operation]) -> dict[tuple[str, int, int], float]:
    """Return the transfer in seconds of the collectives of which all ranks are there: the shortest duration."""
    durations: dict[tuple[str, int, int], list[float]] = {}
    sizes: dict[tuple[str, int, int], int] = {}
    for one in operations:
        if one.op in SYMMETRIC and one.aligned:
            durations.setdefault(_place(one), []).append(_duration(one))
            sizes[_place(one)] = one.group_size
    return {place: min(found) for place, found in durations.items() if len(found) == sizes[place]}


def table(found: Sequence[PartFigures]) -> tuple[tuple[str, ...], list[tuple[str, ...]], int]:
    """Return the head of the table, its rows, and how many columns at their begin say what a row is about; groups only if there are several."""
    grouped = len({each.group for each in found}) > 1
    keys = ("part", "op", *(("group",) if grouped else ()))
    is_judged = any(each.efficiency is not None for each in found)
    rows = [
        (
            each.part, each.op, *((each.group,) if grouped else ()),
            size(each.size_bytes), str(each.count), seconds(each.mean_s), seconds(each.wait_s), rate(each.busbw),
            *((percent(each.efficiency),) if is_judged else ()),
        )
        for each in found
    ]  # fmt: skip
    return (*keys, "size", "count", "mean", "wait", "busbw", *(("efficiency",) if is_judged else ())), rows, len(keys)
