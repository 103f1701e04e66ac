"""What advice and the split of the communication share take from the steps of a job."""

from __future__ import annotations

import pytest

from commwatch.analysis.advice_input import Counts, Sums, longer_of_groups
from commwatch.core.api_views import Row
from commwatch.core.views import StepView

USUAL_S, LONG_S = 0.1, 1.1


def step(rank: int, seq: int, comm_s: float, long: bool = False) -> StepView:
    """A step whose communication is all in one group."""
    took_s = LONG_S if long else USUAL_S
    share = comm_s / took_s
    return StepView("job", rank, seq, 0.0, took_s, took_s, comm_s, share, None, None, {"data": share}, None, long)


def of_rank(rank: int, wait_s: float) -> Row:
    """What a rank waited in all."""
    return Row({"rank": rank}, 1, None, 1, 1, 1.0, None, None, None, None, None, wait_s, None, 0, 0, None, None)


def counts(long: int, waits_s: dict[int, float]) -> Counts:
    """Two ranks with ten usual steps each; rank 1 also has long ones, in which it communicates for a second more."""
    steps = {rank: [step(rank, seq, 0.05) for seq in range(10)] for rank in (0, 1)}
    usual = {rank: list(of) for rank, of in steps.items()}
    steps[1] += [step(1, 10 + seq, 1.05, long=True) for seq in range(long)]
    sums = Sums([], [of_rank(rank, wait_s) for rank, wait_s in waits_s.items()])
    return Counts(0, steps, usual, sums, sums, {"data": 0.5})


@pytest.mark.parametrize(("waits_s", "waited_s"), [({0: 9.0, 1: 0.5}, 0.5), ({0: 0.5, 1: 9.0}, 4.0), ({0: 9.0}, 0.0)])
def test_no_more_than_it_waited(waits_s: dict[int, float], waited_s: float) -> None:
    """Long communication of a rank in its long steps is waiting only as far as this rank waited: the rest is not taken from what others waited."""
    assert longer_of_groups(counts(4, waits_s))["data"] == pytest.approx((4.0, waited_s))


def test_without_long_steps() -> None:
    """Without long steps there is nothing to leave out."""
    assert longer_of_groups(counts(0, {0: 9.0, 1: 0.5})) == {}
