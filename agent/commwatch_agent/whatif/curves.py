"""The α-β curve of each group's link, from its recorded transfers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from commwatch_agent.model.alpha_beta import Curve, messages, through
from commwatch_agent.model.bandwidth import bus_factor
from commwatch_agent.whatif.model import Op

#: α and β can be told apart if the bytes per message of the periods differ by this factor.
_LEAST_SPAN = 4
#: A time counts if so many periods were alike.
_LEAST_SAMPLES = 3
#: Where they cannot, operations up to this size in bytes are all latency, and larger ones all bandwidth.
_SMALL = 16 << 10


#: Median times in seconds of a group's link, by messages one after another, and bytes over the link.
Points = Mapping[tuple[float, float], float]


def points_of(ops: Mapping[int, Op], times: Mapping[int, tuple[float, float]]) -> dict[str, Points]:
    """Return the times of the link of each label of a group.

    Args:
        ops: the operations by number, in the order of their group.
        times: when operations could begin and when they ended, for those with known transfers.
    """
    return {
        label: _points({number: op for number, op in ops.items() if op.group == label and op.n > 1}, times)
        for label in sorted({op.group for op in ops.values()})
    }


def curves_of(ops: Mapping[int, Op], points: Mapping[str, Points]) -> tuple[dict[str, Curve], list[str]]:
    """Return a curve for each label of a group, and what was assumed."""
    curves: dict[str, Curve] = {}
    assumed = []
    for label, of_label in points.items():
        ratios = [y / x for x, y in of_label if x]
        if len(of_label) > 1 and max(ratios) >= _LEAST_SPAN * max(min(ratios), 1e-9):
            curves[label] = through([(x, y, time) for (x, y), time in of_label.items()])
            continue
        large = any(op.size_bytes > _SMALL for op in ops.values() if op.group == label and op.n > 1)
        curves[label] = _of_one(of_label, large=large)
        if of_label:
            what = "bandwidth, none is latency" if large else "latency"
            assumed.append(
                f"group {label}: its operations are too much alike to tell latency from bandwidth: all of their time is {what}"
            )
    return curves, assumed


def _of_one(points: Mapping[tuple[float, float], float], *, large: bool) -> Curve:
    """Return the curve if all time is bandwidth (``large``) or latency."""
    per = [time / at[large] for at, time in points.items() if at[large]]
    if not per:
        return Curve(0.0, 0.0)
    return Curve(0.0, median(per)) if large else Curve(median(per), 0.0)


def _points(ops: Mapping[int, Op], times: Mapping[int, tuple[float, float]]) -> dict[tuple[float, float], float]:
    """Return the median time in seconds of periods in which the group was busy, by messages one after another, and bytes over a link.

    Operations that overlap share the link, so only their periods have known times.
    """
    found: dict[tuple[float, float], list[float]] = {}
    for period in _periods(ops, times):
        x = sum(messages(_kind(ops[number]), ops[number].n) for number in period)
        y = sum((bus_factor(_kind(ops[number]), ops[number].n) or 0.0) * ops[number].size_bytes for number in period)
        time_s = sum(ops[number].work_s for number in period)
        if time_s > 0:
            found.setdefault((x, y), []).append(time_s)
    often = {at: median(times_s) for at, times_s in found.items() if len(times_s) >= _LEAST_SAMPLES}
    return often or {at: median(times_s) for at, times_s in found.items()}


def _kind(op: Op) -> str:
    return "all_reduce" if op.op == "reduce_scatter" and op.backend == "gloo" else op.op


def _periods(ops: Mapping[int, Op], times: Mapping[int, tuple[float, float]]) -> Iterator[list[int]]:
    """Yield the numbers of operations that overlap."""
    by_group: dict[str, list[int]] = {}
    for number, op in ops.items():
        if number in times:
            by_group.setdefault(op.group_id, []).append(number)
    for numbers in by_group.values():
        period: list[int] = []
        until_s = 0.0
        for number in numbers:
            ready_s, end_s = times[number]
            if period and ready_s >= until_s:
                yield period
                period = []
            period.append(number)
            until_s = max(until_s, end_s)
        yield period
