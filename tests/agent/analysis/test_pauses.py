"""Rare pauses of one rank: it is named if the others wait for it in long steps, and only it."""

from __future__ import annotations

import pytest

from commwatch_agent.analysis.advice_facts import Pauses
from commwatch_agent.analysis.waits.pauses import pauses_of
from commwatch_agent.analysis.waits.uneven_work import Comm, beyond_usual
from commwatch_agent.model.views import StepView

#: Every 20th of 100 steps is long: 2 s, where the others take 0.1 s, 10 ms of it communication.
LONG, STEPS = range(10, 100, 20), 100


def steps(rank: int, comm_s: float | None, long_comm_s: float | None = None, long: range = LONG) -> list[StepView]:
    """Steps of a rank with its communication in usual and in long ones; as much in both unless another one is given."""
    found = []
    for seq in range(STEPS):
        is_long = seq in long
        took, comm = (2.0, comm_s if long_comm_s is None else long_comm_s) if is_long else (0.1, comm_s)
        found.append(StepView("job", rank, seq, 0.0, 0.0, took, comm, None, None, None, {}, None, is_long))
    return found


def pauses(ranks: dict[int, list[StepView]]) -> Pauses | None:
    """What the steps of these ranks show."""
    known = {rank: [Comm(step.seq, step.comm_s, step.long) for step in of_rank] for rank, of_rank in ranks.items()}
    return pauses_of(ranks, beyond_usual(known))


def test_one_pauses() -> None:
    """Of five pauses of 1.9 s, each other rank waits 1.9 s: 9.5 of 19.5 s."""
    found = pauses({0: steps(0, 0.01, 1.91), 1: steps(1, 0.01), 2: steps(2, 0.01, 1.91)})
    assert found is not None
    assert found[:4] == (1, 5, 100, 2.0)
    assert found.cost == pytest.approx(5 * 1.9 / 19.5)


@pytest.mark.parametrize(
    "ranks",
    [
        {0: steps(0, 0.01, 1.91), 1: steps(1, 0.01, 1.91)},
        {0: steps(0, 0.01, 1.91), 1: steps(1, 0.01), 2: steps(2, 0.01)},
        {0: steps(0, 0.01, 1.91, LONG[:2]), 1: steps(1, 0.01, None, LONG[:2])},
        {0: steps(0, 0.01, 1.91), 1: steps(1, None)},
        {0: steps(0, 0.01, 1.91)},
        {0: steps(0, 0.01, 1.91), 1: []},
        {0: steps(0, 0.01, long=range(0)), 1: steps(1, 0.01, long=range(0))},
        {},
    ],
    ids=[
        "a transfer of all",
        "two of three",
        "two pauses",
        "not known",
        "one rank",
        "no steps",
        "no long steps",
        "nothing",
    ],
)
def test_none_pauses(ranks: dict[int, list[StepView]]) -> None:
    """No rank is named for what all do in long steps, for what more than one of them does, for too few pauses, or where it is not known."""
    assert pauses(ranks) is None


def test_others_wait_in_other_steps() -> None:
    """A rank whose long steps are others than those in which the rest waits does not pause: the rest may be without inputs."""
    waiting = steps(0, 0.01, 1.91, range(15, 100, 20))
    assert pauses({0: waiting, 1: steps(1, 0.01)}) is None
