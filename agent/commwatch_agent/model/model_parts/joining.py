"""Finds the part of a model that a collective carries, by its place in the step. Pure.

A step is what a rank launched between two step marks that follow one another. In it, the kinds of collectives in a table must occur as often as a
whole number of passes needs, the same number for all kinds; otherwise nothing in it is named: a collective of the user's may have the
size of a bucket, a pass may lack its gradients, or records are missing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from commwatch.wire import events as ev
from commwatch.wire.ring import STAMP_MASK
from commwatch_agent.model.model_parts.tables import Kind, PartTable

#: Bytes of an element, by the name of its dtype.
_BYTES = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
    "complex128": 16,
}
#: Launch in ns, stamp and kind of a collective.
_Launched = tuple[int, int, Kind]


def parts_of(
    records: Iterable[ev.Record], tables: Sequence[PartTable], dtypes: Mapping[int, str], *, whole: bool = False
) -> dict[int, str]:
    """Return the names of the parts that operations carry, by the stamps of their records; those of which it is not sure are left out.

    Args:
        records: some successive records of one ring, in their order.
        dtypes: names of dtypes by code.
        whole: the first record is the first of the ring, so the first step has its begin.
    """
    sizes = {code: _BYTES.get(name, 0) for code, name in dtypes.items()}
    wanted = {(kind.group, kind.op) for table in tables for kind in table.order}
    found: dict[int, str] = {}
    for run in _successive(records):
        marks = sorted(record.end_ns for record in run if record.op == ev.STEP_MARK)
        if whole and run[0].stamp == 1:
            marks.insert(0, 0)
        launched = sorted(
            (record.launch_ns, record.stamp, Kind(record.group, record.op, record.size_bytes // sizes[record.dtype]))
            for record in run
            if (record.group, record.op) in wanted and record.timing != ev.COUNTED and sizes.get(record.dtype)
        )
        at = [bisect_right(launched, (mark, STAMP_MASK + 1)) for mark in marks]
        for begin, end in pairwise(at):
            found |= _of_step(launched[begin:end], tables)
    return found


def _successive(records: Iterable[ev.Record]) -> Iterator[list[ev.Record]]:
    """Yield runs of records of which none is missing."""
    run: list[ev.Record] = []
    for record in records:
        if run and record.stamp != (run[-1].stamp + 1) & STAMP_MASK:
            yield run
            run = []
        run.append(record)
    if run:
        yield run


def _of_step(launched: Sequence[_Launched], tables: Sequence[PartTable]) -> dict[int, str]:
    """Return the names for the collectives of a step; without those for which two tables have different names."""
    found: dict[int, str] = {}
    unsure: set[int] = set()
    for table in tables:
        for stamp, name in _by_table(launched, table):
            if found.setdefault(stamp, name) != name:
                unsure.add(stamp)
    return {stamp: name for stamp, name in found.items() if stamp not in unsure}


def _by_table(launched: Sequence[_Launched], table: PartTable) -> Iterator[tuple[int, str]]:
    of_kind: dict[Kind, list[int]] = {}
    for launch_ns, stamp, kind in launched:
        if launch_ns >= table.since_ns and kind in table.order:
            of_kind.setdefault(kind, []).append(stamp)
    passes = {len(of_kind.get(kind, ())) / len(parts) for kind, parts in table.order.items()}
    if len(passes) != 1 or not min(passes).is_integer():
        return
    for kind, stamps in of_kind.items():
        parts = table.order[kind]
        yield from ((stamp, table.names[parts[n % len(parts)]]) for n, stamp in enumerate(stamps))
