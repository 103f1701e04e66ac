"""Buckets of a job for plots: their lengths, and sums over them."""

from __future__ import annotations

import pytest

from commwatch.analysis.time_buckets import Lengths, SlotSums, lengths, slots_of
from commwatch.core.cells import SLOT_NS, StepSums

S = 1_000_000_000
COARSE_NS = 300 * S


def steps(comm: float) -> StepSums:
    """Ten steps with this share of communication, a third of it exposed."""
    return StepSums(10, 10, 90.0, 90.0 * comm, 10, 90.0, 30.0 * comm)


@pytest.mark.parametrize(
    ("window_s", "steps_s"),
    [(1, 10), (3600, 10), (3601, 30), (6 * 3600, 60), (86_400, 300), (360 * 86_400, 86_400), (9e9, 86_400)],
)
def test_lengths(window_s: float, steps_s: int) -> None:
    """A plot has at most 360 points, if it covers less than a year; without bandwidths of shorter buckets than there are sums of."""
    until_ns = 10**19
    begin_ns = until_ns - int(window_s * S)
    assert lengths(begin_ns, until_ns, 0, COARSE_NS) == Lengths(steps_s * S, steps_s * S)
    assert lengths(begin_ns, until_ns, until_ns, COARSE_NS) == Lengths(steps_s * S, max(300, steps_s) * S)


def test_lengths_that_differ() -> None:
    """Shares and bandwidths of different lengths are in slots of their own, each at its end; sums of two nodes are added."""
    sums = [
        SlotSums(0, steps(0.2), {"all_reduce": (8.0, 2.0)}),
        SlotSums(SLOT_NS, steps(0.4), {}),
        SlotSums(0, steps(0.4), {"all_reduce": (4.0, 2.0)}),
    ]
    found = slots_of(sums, Lengths(SLOT_NS, COARSE_NS))
    assert [(slot.at, slot.busbw) for slot in found] == [(10.0, {}), (20.0, {}), (300.0, {"all_reduce": 3e9})]
    assert [slot.comm for slot in found[:2]] == [pytest.approx(0.3), pytest.approx(0.4)]
    assert found[2].comm is None
    same = slots_of(sums)
    assert [(slot.at, slot.busbw) for slot in same] == [(10.0, {"all_reduce": 3e9}), (20.0, {})]
    assert [slot.comm for slot in same] == [pytest.approx(0.3), pytest.approx(0.4)]
