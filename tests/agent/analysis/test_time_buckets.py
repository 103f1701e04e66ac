"""Buckets of a job for plots: their lengths, and sums over them."""

from __future__ import annotations

import pytest

from commwatch_agent.analysis.time_buckets import Lengths, SlotSums, lengths, slots_of
from commwatch_agent.model.cells import NO_WAITS, SLOT_NS, StepSums, WaitSums, added

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


WAITS = WaitSums(covered=20.0, waited=4.0, symmetric=100, joined=100, broken=0)


@pytest.mark.parametrize(
    ("sums", "comm", "share"),
    [
        (WAITS, 0.5, 0.2),
        (WAITS, 0.19, 0.19),
        (WAITS, 0.1, None),
        (WAITS, None, None),
        (WAITS._replace(broken=1), 0.5, None),
        (WAITS._replace(joined=91), 0.5, 0.2),
        (WAITS._replace(joined=89), 0.5, None),
        (WAITS._replace(joined=111), 0.5, None),
        (WAITS._replace(waited=0.0), 0.5, 0.0),
        (WAITS._replace(symmetric=0, joined=0), 0.5, 0.2),
        (WAITS._replace(symmetric=0, joined=0, waited=0.0), 0.5, None),
        (NO_WAITS, 0.5, None),
    ],
)
def test_waiting(sums: WaitSums, comm: float | None, share: float | None) -> None:
    """Waiting is a share of the ranks' time and a part of communication; it is not known where waits or whole slots are missing."""
    assert sums.share(comm) == (None if share is None else pytest.approx(share))


def test_waiting_of_two_nodes() -> None:
    """Waits of nodes are added; if one node's are not known, neither are those of the job."""
    both = added([WAITS, WAITS._replace(waited=0.0)], NO_WAITS)
    assert both.share(0.5) == pytest.approx(0.1)
    (slot,) = slots_of([SlotSums(0, steps(0.3), {}, WAITS), SlotSums(0, steps(0.5), {}, WAITS)])
    assert slot.comm == pytest.approx(0.4)
    assert slot.waiting == pytest.approx(0.2)
    (slot,) = slots_of([SlotSums(0, steps(0.3), {}, WAITS), SlotSums(0, steps(0.5), {}, WAITS._replace(joined=0))])
    assert slot.waiting is None
