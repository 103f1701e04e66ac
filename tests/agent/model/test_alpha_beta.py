"""The α-β model: expected times worked by hand, and curves found again in what was made from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_agent.model.alpha_beta import Curve, fit
from commwatch_agent.model.bandwidth import BUS_FACTOR, busbw_of_one
from tests.helpers import examples

MICRO = 1e-6


@pytest.mark.parametrize(
    ("op", "n", "size", "expected"),
    [
        # 2(n-1) messages of S/n: 6 x (10 us + 1e-9 x 1 MB / 4).
        ("all_reduce", 4, 1_000_000, 6 * (10 * MICRO + 1e-9 * 250_000)),
        ("all_gather", 4, 1_000_000, 3 * (10 * MICRO + 1e-9 * 250_000)),
        ("reduce_scatter", 8, 8_000, 7 * (10 * MICRO + 1e-9 * 1_000)),
        ("all_to_all", 2, 2_000, 10 * MICRO + 1e-9 * 1_000),
        # Down a chain in pieces: n-1 messages until the last rank has the first, then the rest at the link's pace.
        ("broadcast", 4, 1_000_000, 3 * 10 * MICRO + 1e-9 * 1_000_000),
        ("send", 16, 1_000_000, 10 * MICRO + 1e-3),
    ],
)
def test_expected_times(op: str, n: int, size: int, expected: float) -> None:
    """The formulas of the ring, worked by hand."""
    assert Curve(10 * MICRO, 1e-9).time_s(op, n, size) == pytest.approx(expected)


@pytest.mark.parametrize(("op", "n", "size"), [("barrier", 4, 0), ("all_reduce", 1, 100), ("magic", 4, 100)])
def test_absent(op: str, n: int, size: int) -> None:
    """Where there is no size, no other rank or no formula, there is no expected time."""
    assert Curve(1, 1).time_s(op, n, size) is None
    assert fit(op, n, {1_000: 1.0, 10_000: 2.0, 100_000: 3.0}) is None


@pytest.mark.parametrize("op", sorted(BUS_FACTOR))
def test_large_operations_come_to_the_bandwidth(op: str) -> None:
    """Of large operations the expected bus bandwidth is 1/β, whatever the operation."""
    time = Curve(10 * MICRO, 1e-9).time_s(op, 8, 10**12)
    assert time is not None
    assert busbw_of_one(op, 10**12, time, 8) == pytest.approx(1e9, rel=1e-3)


@examples(100)
@given(
    op=st.sampled_from(sorted(BUS_FACTOR)),
    n=st.integers(2, 1024),
    alpha=st.floats(1e-7, 1e-3),
    bandwidth=st.floats(1e7, 1e12),
    smallest=st.integers(1, 1 << 20),
)
def test_recovered(op: str, n: int, alpha: float, bandwidth: float, smallest: int) -> None:
    """A curve is found again in the times that it gave."""
    curve = Curve(alpha, 1 / bandwidth)
    sizes = [smallest << k for k in range(0, 12, 3)]
    times = {size: time for size in sizes if (time := curve.time_s(op, n, size)) is not None}
    found = fit(op, n, times)
    assert found is not None
    assert (found.sizes, found.smallest_bytes, found.largest_bytes) == (4, sizes[0], sizes[-1])
    assert found.error < 1e-6
    for size, time in times.items():
        assert found.curve.time_s(op, n, size) == pytest.approx(time, rel=1e-5)


def test_noise_shows_in_the_error() -> None:
    """A measurement that is 30% off shows in the error, and the curve stays between the points."""
    curve = Curve(20 * MICRO, 1e-9)
    times = {size: (curve.time_s("all_reduce", 4, size) or 0) for size in (1_000, 10_000, 100_000, 1_000_000)}
    times[100_000] *= 1.3
    found = fit("all_reduce", 4, times)
    assert found is not None
    assert 0.05 < found.error < 0.2
    assert found.curve.beta_s == pytest.approx(1e-9, rel=0.25)


@pytest.mark.parametrize(
    "times",
    [
        {},
        {1_000: 1e-3, 1_000_000: 2e-3},
        {1_000: 1e-3, 2_000: 2e-3, 4_000: 3e-3, 7_999: 4e-3},
        {0: 1e-3, 1_000: 1e-3, 1_000_000: 2e-3},
        {1_000: 0.0, 10_000: 1e-3, 1_000_000: 2e-3},
    ],
    ids=["none", "two sizes", "too alike", "no size", "no time"],
)
def test_no_fit(times: dict[int, float]) -> None:
    """Too few sizes, or too little between them, give no curve."""
    assert fit("all_reduce", 4, times) is None


def test_never_negative() -> None:
    """Times that fall with the size, or grow faster than it, give an edge of what is possible: never a negative price."""
    falling = fit("all_reduce", 2, {1_000: 3e-3, 10_000: 2e-3, 100_000: 1e-3})
    assert falling is not None
    assert falling.curve.beta_s == 0
    assert falling.curve.bandwidth is None
    steep = fit("all_reduce", 2, {1_000: 1e-6, 10_000: 1e-4, 100_000: 1e-2})
    assert steep is not None
    assert steep.curve.alpha_s == 0
