"""Expected times of operations: the α-β model of docs/references.md. Pure.

A ring operation of S bytes among n ranks takes T = a(n)·α + b(n)·β·S: it sends a(n) messages one after another, each with
latency α, and moves b(n)·S bytes over every link at β seconds per byte. b(n) is the bus factor of nccl-tests, so 1/β is the
bus bandwidth of large operations; for all_reduce T is 2(n−1)(α + β·S/n).

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import NamedTuple

from commwatch.wire.events import P2P
from commwatch_agent.model.bandwidth import bus_factor

#: Least number of sizes for a fit, and least ratio of the largest size to the smallest.
LEAST_SIZES, LEAST_SPAN = 3, 8


def messages(op: str, group_size: int) -> int:
    """Return a(n): how many messages of an operation are sent one after another."""
    if op in P2P:
        return 1
    return (2 if op == "all_reduce" else 1) * (group_size - 1)


class Curve(NamedTuple):
    """α in seconds, β in seconds per byte."""

    alpha_s: float
    beta_s: float

    @property
    def bandwidth(self) -> float | None:
        """Bus bandwidth of large operations in bytes per second; ``None``: time does not depend on size."""
        return 1 / self.beta_s if self.beta_s > 0 else None

    def latency_s(self, op: str, group_size: int) -> float:
        """Return the part of the time, in seconds, that does not depend on the size."""
        return messages(op, group_size) * self.alpha_s

    def time_s(self, op: str, group_size: int, size_bytes: float) -> float | None:
        """Expected time in seconds; ``None`` for operations without a size or a bandwidth (barrier, one rank).

        >>> Curve(alpha_s=10e-6, beta_s=1e-10).time_s("all_reduce", 4, 100_000_000)
        0.01506
        """
        factor = bus_factor(op, group_size)
        if factor is None or size_bytes <= 0:
            return None
        return self.latency_s(op, group_size) + factor * self.beta_s * size_bytes


class Fit(NamedTuple):
    """A curve fitted to measurements."""

    curve: Curve
    #: Root mean square of the relative deviations of the measurements from the curve.
    error: float
    #: Number and range of the measured sizes.
    sizes: int
    smallest_bytes: int
    largest_bytes: int


def fit(op: str, group_size: int, times_s: Mapping[int, float]) -> Fit | None:
    """Fit a curve to times in seconds by size in bytes; ``None`` if the sizes are too few or too close.

    Least squares of the relative deviations, so that a microsecond of a small operation weighs as much as a millisecond of
    a large one. α and β are not negative.
    """
    factor, points = bus_factor(op, group_size), [(size, time) for size, time in times_s.items() if size > 0 < time]
    sizes = [size for size, _ in points]
    if factor is None or len(points) < LEAST_SIZES or max(sizes) < LEAST_SPAN * min(sizes):
        return None
    rows = [(messages(op, group_size), factor * size, time) for size, time in points]
    curve = through(rows)
    error = sqrt(sum((1 - (curve.alpha_s * a + curve.beta_s * b) / time) ** 2 for a, b, time in rows) / len(rows))
    return Fit(curve, error, len(points), min(sizes), max(sizes))


def through(rows: Sequence[tuple[float, float, float]]) -> Curve:
    """Return the curve with the least squares of relative deviations; α and β are not negative.

    Args:
        rows: at least two that tell α from β, each with messages one after another, bytes over a link, and a time in seconds, above 0.
    """
    x, y = [messages / time for messages, _, time in rows], [size / time for _, size, time in rows]
    xx, yy = sum(v * v for v in x), sum(v * v for v in y)
    xy = sum(a * b for a, b in zip(x, y, strict=True))
    determinant = xx * yy - xy * xy
    alpha, beta = (sum(x) * yy - sum(y) * xy) / determinant, (sum(y) * xx - sum(x) * xy) / determinant
    if alpha < 0:
        return Curve(0.0, sum(y) / yy)
    return Curve(sum(x) / xx, 0.0) if beta < 0 else Curve(alpha, beta)
