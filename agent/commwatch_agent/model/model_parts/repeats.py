"""Finds what the steps of a rank communicate more than once, from the names of the parts that its collectives carry. Pure."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from commwatch.wire import events as ev
from commwatch_agent.model.model_parts.joining import parts_of
from commwatch_agent.model.model_parts.tables import PartTable

#: Fewest steps that show it.
_LEAST_STEPS = 3
_GATHER, _SCATTER, _REDUCE = (ev.OP_CODE[op] for op in ("all_gather", "reduce_scatter", "all_reduce"))
#: What FSDP2 does with a unit in a backward pass of its own: it gathers the unit for the forward and for the backward pass, and reduces its gradients.
_PASSES = re.compile("(GGR)+")
#: Group and code of an operation.
_Kind = tuple[int, int]


class Repeat(NamedTuple):
    """What the operations of one kind repeat in a step."""

    #: Backward passes of a step; 1: nothing more is certain.
    passes: int = 1
    #: The part (0 to 1) of the bytes that was communicated before: of gradients, in the passes but the last; of parameters, in the forward pass.
    again: float = 0.0


def repeats_of(
    records: Iterable[ev.Record], tables: Sequence[PartTable], dtypes: Mapping[int, str]
) -> dict[_Kind, Repeat]:
    """Return what each kind of operation repeats in all steps, where that is certain; the other kinds are left out.

    It is not certain with several optimizers, with steps that the user marks, where an optimizer makes backward passes itself, and where two
    models have equal parts.

    Args:
        records: some successive records of one ring, in their order.
        dtypes: names of dtypes by code.
    """
    records = list(records)
    marks = sorted((each for each in records if each.op == ev.STEP_MARK), key=lambda each: each.end_ns)
    known = Counter(kind for table in tables for kind in table.order)
    if len({mark.peer for mark in marks}) != 1 or marks[0].peer < 0 or max(known.values(), default=0) != 1:
        return {}
    names = parts_of(records, tables, dtypes)
    launched = sorted((each for each in records if each.op != ev.STEP_MARK), key=lambda each: each.launch_ns)
    launches = [each.launch_ns for each in launched]
    steps = []
    for before, mark in pairwise(marks):
        step = launched[bisect_left(launches, before.end_ns) : bisect_left(launches, mark.end_ns)]
        named = [each for each in step if each.stamp in names]
        if any(each.launch_ns >= mark.launch_ns for each in named):
            return {}
        if any(each.op in (_SCATTER, _REDUCE) for each in named):
            steps.append(_of_step(step, names))
    if len(steps) < _LEAST_STEPS:
        return {}
    kinds = set.intersection(*(set(step) for step in steps))
    return {kind: Repeat(*map(min, zip(*(step[kind] for step in steps), strict=True))) for kind in kinds}


def _of_step(step: Sequence[ev.Record], names: Mapping[int, str]) -> dict[_Kind, Repeat]:
    """Return what the operations of one step repeat, by kind."""
    units: dict[str, str] = {}
    for each in step:
        if each.stamp in names and each.op in (_GATHER, _SCATTER):
            units[names[each.stamp]] = units.get(names[each.stamp], "") + ("G" if each.op == _GATHER else "R")
    regathered = {unit for unit, order in units.items() if _PASSES.fullmatch(order)}
    found: dict[_Kind, Repeat] = {}
    for kind in {(each.group, each.op) for each in step if each.stamp in names}:
        of_kind = [each for each in step if (each.group, each.op) == kind]
        named = [(names[each.stamp], each.size_bytes) for each in of_kind if each.stamp in names]
        # DDP asks for handles for all of its buckets, or for none: an operation of the user's may have the size of the only bucket.
        is_alike = len({each.flags & ev.ASYNC for each in of_kind if each.stamp in names}) == 1
        total = sum(each.size_bytes for each in of_kind)
        times = Counter(name for name, _ in named)
        if kind[1] == _GATHER:
            again = sum(size for name, size in named if name in regathered) / 2
            found[kind] = Repeat(1, again / total)
        elif len(set(times.values())) == 1 and (regathered & set(times) if set(times) & set(units) else is_alike):
            passes = min(times.values())
            found[kind] = Repeat(passes, sum(size for _, size in named) * (1 - 1 / passes) / total)
    return {kind: each for kind, each in found.items() if each.again}
