"""Ranks that meet the others in many of their steps and mark none meanwhile, as with DDP's ``Join``: they have run out of inputs. Pure.

They compute nothing, so they wait in each step for those that do. None of those is late by what all of them take.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from commwatch_agent.ingest.stragglers import BIN_NS, Late, LateBins

#: Least steps of another rank, with a collective before and after them, in which a rank that marks none has none.
_LEAST = 3


class Span(NamedTuple):
    """The time in which a rank has no steps, in ns on the clock of the steps."""

    rank: int
    start_ns: int
    end_ns: int


def without_steps(ends: Mapping[int, Sequence[int]], met: Collection[int], now_ns: int) -> list[Span]:
    """Return when ranks had no steps while others did, and met them.

    Args:
        ends: when steps of each rank ended, in order.
        met: numbers of the bins in which the ranks met in collectives.
    """
    spans = []
    numbers = sorted(met)
    for rank, own in ends.items():
        if not own or not numbers:
            continue
        others = [each for other, each in ends.items() if other != rank and each]
        # Most gaps are a step long: longer ones have several steps of others, if any of them steps meanwhile. So may the time before the first mark.
        moments = np.array([min(numbers[0] * BIN_NS, own[0]), *own, now_ns], np.int64)
        usual = np.median(np.diff(own)) if len(own) > 1 else 0
        for at in np.flatnonzero(np.diff(moments) > _LEAST * usual).tolist():
            start_ns, end_ns = int(moments[at]), int(moments[at + 1])
            first, last = bisect_right(numbers, start_ns // BIN_NS), bisect_left(numbers, end_ns // BIN_NS) - 1
            if first < last and any(_between(each, numbers[first], numbers[last]) >= _LEAST for each in others):
                spans.append(Span(rank, start_ns, end_ns))
    return spans


def _between(ends: Sequence[int], first: int, last: int) -> int:
    """Return how many steps ended between two bins."""
    return bisect_left(ends, last * BIN_NS) - bisect_left(ends, (first + 1) * BIN_NS)


def confirmed(
    judge: Callable[..., list[Late]], ends: Mapping[int, Sequence[int]], met: Collection[int], now_ns: int
) -> list[Late]:
    """Return the stragglers that ``judge`` finds (``stragglers_in``), once it knows when ranks had no steps; parameters as for ``without_steps``."""
    found = judge()
    spans = without_steps(ends, met, now_ns) if found else ()
    return judge(without=spans) if spans else found


def among_those_with_steps(late: LateBins, spans: Collection[Span]) -> LateBins:
    """Return lateness in which, while a rank has no steps, the others are late by what they are later than the first of them."""
    without = np.zeros(late.late_ns.shape, np.bool_)
    rows = {rank: row for row, rank in enumerate(late.ranks)}
    for span in spans:
        if span.rank in rows:
            within = (late.numbers >= span.start_ns // BIN_NS) & (late.numbers <= span.end_ns // BIN_NS)
            without[rows[span.rank]] |= within
    first_ns = np.where(without, np.iinfo(np.int64).max, late.late_ns).min(axis=0)
    late_ns = np.where(without.any(axis=0) & ~without, late.late_ns - first_ns, late.late_ns)
    return late._replace(late_ns=late_ns)
