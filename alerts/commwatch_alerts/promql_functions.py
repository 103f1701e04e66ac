"""The functions and aggregations of PromQL that rules may use, over plain numbers, computed as in Prometheus 2.42.

Source: prometheus/prometheus v2.42.0, promql/functions.go, promql/engine.go and promql/quantile.go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from itertools import pairwise

from commwatch_alerts.series import Window

#: A function of a window of ``range_s`` seconds that ends at ``at_ms``; the result ``None``: no element.
RangeFunction = Callable[[Window, int, float], float | None]


# -- arithmetic as in Go ----------------------------------------------------------------------


def divide(left: float, right: float) -> float:
    """Return ``left / right`` as in IEEE 754, without exceptions.

    >>> divide(-1, 0), divide(0, 0)
    (-inf, nan)
    """
    if right:
        return left / right
    if not left or math.isnan(left) or math.isnan(right):
        return math.nan
    return math.copysign(math.inf, left) * math.copysign(1, right)


def modulo(left: float, right: float) -> float:
    """Return the remainder of ``left / right``, with the sign of ``left``; NaN if there is none."""
    if math.isinf(left) or not right:
        return math.nan
    return math.fmod(left, right)


def power(left: float, right: float) -> float:
    """Return ``left`` to the power of ``right``: NaN if it is not real, infinite if it is too large."""
    try:
        return math.pow(left, right)
    except OverflowError:
        return -math.inf if left < 0 and right % 2 == 1 else math.inf
    except ValueError:
        if left:
            return math.nan  # the root of a negative number
        return math.copysign(math.inf, left) if right % 2 == 1 else math.inf


def larger(left: float, right: float) -> float:
    """Return the larger number: infinity if one is infinity, else NaN if one is NaN."""
    if math.inf in (left, right):
        return math.inf
    return math.nan if math.isnan(left) or math.isnan(right) else max(left, right)


def smaller(left: float, right: float) -> float:
    """Return the smaller number: minus infinity if one is minus infinity, else NaN if one is NaN."""
    return -larger(-left, -right)


def rounded(value: float, to: float) -> float:
    """Return the nearest multiple of ``to``; ties round up."""
    inverse = divide(1, to)
    scaled = value * inverse + 0.5
    return divide(math.floor(scaled) if math.isfinite(scaled) else scaled, inverse)


def text_of(value: float) -> str:
    """Return a value as the label that ``count_values`` makes of it, without exponent.

    >>> text_of(3.0), text_of(1e-7), text_of(-math.inf)
    ('3', '0.0000001', '-Inf')
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return format(Decimal(repr(value)), "f").removesuffix(".0")


def _compensated(total: float, error: float, value: float) -> tuple[float, float]:
    """Add ``value`` to a sum with compensation for rounding (Kahan and Neumaier); return the new sum and error."""
    new = total + value
    lost = (total - new) + value if abs(total) >= abs(value) else (value - new) + total
    return new, error + lost


def quantile(q: float, values: Sequence[float]) -> float:
    """Return the ``q`` quantile with linear interpolation; NaNs sort first. Infinite if ``q`` is outside of 0 to 1."""
    if math.isnan(q) or not values:
        return math.nan
    if not 0 <= q <= 1:
        return math.inf if q > 1 else -math.inf
    ordered = sorted(values, key=lambda value: (not math.isnan(value), value))
    place = q * (len(ordered) - 1)
    lower = math.floor(place)
    weight = place - lower
    return ordered[lower] * (1 - weight) + ordered[min(len(ordered) - 1, lower + 1)] * weight


#: Functions of an element's value and a number, which is 1 if it is not given.
INSTANT_FUNCTIONS: dict[str, Callable[[float, float], float]] = {
    "abs": lambda value, _: abs(value),
    "round": rounded,
    "clamp_min": larger,
    "clamp_max": smaller,
}


# -- aggregations -----------------------------------------------------------------------------


def maximum(values: Sequence[float]) -> float:
    """Return the largest value; NaN only if all are NaN."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def minimum(values: Sequence[float]) -> float:
    """Return the smallest value; NaN only if all are NaN."""
    return min((value for value in values if not math.isnan(value)), default=math.nan)


def _mean(values: Sequence[float]) -> float:
    mean = 0.0
    for count, value in enumerate(values, start=1):
        if math.isinf(mean) and (math.isfinite(value) or value == mean):
            continue
        mean += value / count - mean / count
    return mean


AGGREGATIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    "min": minimum,
    "max": maximum,
    "avg": _mean,
    "count": lambda values: float(len(values)),
    "group": lambda values: 1.0,
}


# -- over time --------------------------------------------------------------------------------


def _extrapolated(window: Window, at_ms: int, range_s: float, *, counter: bool) -> float | None:
    """Return the change of a series over a range, extrapolated from the change between its first and last sample.

    The extrapolation reaches the ends of the range; but only half a sample interval if an end is more than 1.1 intervals
    away (the series began or ended inside), and not back beyond the point where a counter was zero.
    """
    times, values = window.times_ms, window.values
    if len(values) < 2:
        return None
    change = values[-1] - values[0]
    if counter:
        for before, after in pairwise(values):
            if after < before:
                change += before
    to_start, to_end = (times[0] - (at_ms - range_s * 1000)) / 1000, (at_ms - times[-1]) / 1000
    covered = (times[-1] - times[0]) / 1000
    interval = covered / (len(values) - 1)
    if counter and change > 0 and values[0] >= 0:
        to_start = min(to_start, covered * (values[0] / change))
    most = interval * 1.1
    reached = covered + (to_start if to_start < most else interval / 2) + (to_end if to_end < most else interval / 2)
    return change * (reached / covered)


def _increase(window: Window, at_ms: int, range_s: float) -> float | None:
    return _extrapolated(window, at_ms, range_s, counter=True)


def _rate(window: Window, at_ms: int, range_s: float) -> float | None:
    change = _extrapolated(window, at_ms, range_s, counter=True)
    return None if change is None else change / range_s


def _delta(window: Window, at_ms: int, range_s: float) -> float | None:
    return _extrapolated(window, at_ms, range_s, counter=False)


def _over(function: Callable[[Sequence[float]], float]) -> RangeFunction:
    return lambda window, at_ms, range_s: function(window.values)


def _changes(values: Sequence[float]) -> float:
    return float(sum(a != b and not (math.isnan(a) and math.isnan(b)) for a, b in pairwise(values)))


def _resets(values: Sequence[float]) -> float:
    return float(sum(after < before for before, after in pairwise(values)))


def _sum_over_time(values: Sequence[float]) -> float:
    total = error = 0.0
    for value in values:
        total, error = _compensated(total, error, value)
    return total if math.isinf(total) else total + error


def _avg_over_time(values: Sequence[float]) -> float:
    mean = error = 0.0
    for count, value in enumerate(values, start=1):
        if math.isinf(mean) and (math.isfinite(value) or value == mean):
            continue
        mean, error = _compensated(mean, error, value / count - mean / count)
    return mean if math.isinf(mean) else mean + error


RANGE_FUNCTIONS: dict[str, RangeFunction] = {
    "rate": _rate,
    "increase": _increase,
    "delta": _delta,
    "changes": _over(_changes),
    "resets": _over(_resets),
    "avg_over_time": _over(_avg_over_time),
    "max_over_time": _over(maximum),
    "min_over_time": _over(minimum),
    "sum_over_time": _over(_sum_over_time),
    "count_over_time": _over(lambda values: float(len(values))),
    "last_over_time": _over(lambda values: values[-1]),
}
