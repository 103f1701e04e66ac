"""How much is recorded, by what it costs."""

from __future__ import annotations

import pytest

from commwatch.probe.governor import COST_BOUND, CostTurns, Counts, Governor, UsualCost, budget_of, is_sampled
from commwatch.wire.modes import COUNTERS, FULL, SAMPLING

DEAR, CHEAP = 0.02, 0.001


def after(governor: Governor, *shares: float) -> int:
    """The mode after these windows."""
    for share in shares:
        governor.window(share)
    return governor.mode


def test_sheds() -> None:
    """Above the budget for two windows less is recorded, and again less after two more; one alone is forgiven."""
    governor = Governor(0.005)
    assert after(governor, DEAR, CHEAP, DEAR, CHEAP) == FULL
    assert after(governor, DEAR, DEAR) == SAMPLING
    assert after(governor, DEAR) == SAMPLING
    assert after(governor, DEAR) == COUNTERS
    assert after(governor, *[DEAR] * 50) == COUNTERS


def test_recovers() -> None:
    """Within the budget for four windows the richer mode is tried again; after twice as many each time it was too much."""
    governor = Governor(0.005)
    after(governor, DEAR, DEAR)
    waited = []
    for _ in range(9):
        windows = 0
        while governor.mode == SAMPLING:
            governor.window(CHEAP)
            windows += 1
        waited.append(windows)
        assert after(governor, DEAR, DEAR) == SAMPLING
    assert waited == [4, 8, 16, 32, 64, 128, 256, 512, 512]
    assert after(governor, *[CHEAP] * 512) == FULL
    assert after(governor, *[CHEAP] * 512, DEAR, DEAR, *[CHEAP] * 4) == FULL, "what has held for as long is forgiven"


def test_windows() -> None:
    """A window lasts a second, and longer until there are measurements enough, but for ten; without an operation there are none to wait for."""
    over = [(ms, n) for ms in (500, 1000, 5000, 10_000) for n in (0, 3, 4) if Governor.is_over(ms * 1_000_000, n)]
    assert over == [(1000, 0), (1000, 4), (5000, 0), (5000, 4), (10_000, 0), (10_000, 3), (10_000, 4)]


def test_no_budget() -> None:
    """With a budget of 0 everything is recorded, whatever it costs."""
    assert after(Governor(0), *[1.0] * 100) == FULL


@pytest.mark.parametrize(
    ("said", "budget"),
    [("", 0.005), ("0", 0), ("0.02", 0.02), ("1", 1), ("2", 0.005), ("-1", 0.005), ("nan", 0.005), ("half", 0.005)],
)
def test_budget(said: str, budget: float) -> None:
    """A value that is not a share of the time is not accepted as a budget."""
    assert budget_of({"COMMWATCH_BUDGET": said}, "native") == budget


def test_budget_of_the_python_hook() -> None:
    """The hook that costs more has a larger budget by default; a budget in the setting applies to either hook."""
    assert [budget_of({}, hook) for hook in ("native", "python")] == [0.005, 0.02]
    assert budget_of({"COMMWATCH_BUDGET": "0.01"}, "python") == 0.01


@pytest.mark.parametrize("burst", [1, 2, 24, 100])
def test_measured_operations(burst: int) -> None:
    """What is measured of some operations is what all of them cost, though the first after a pause costs twenty times as much."""
    turns, spent, measured = CostTurns(), 0.0, 0
    dear, cheap = 20, 1
    for step in range(20_000):
        for place in range(burst):
            of = turns.next(1 + step * 60_000_000 + place * 100_000)
            measured += of > 0
            spent += of * (cheap if place else dear)
    assert spent == pytest.approx(20_000 * (dear + (burst - 1) * cheap), rel=0.1)
    assert measured >= 20_000 / 2.5, "about one in each pause of 60 ms"


def test_measured_in_a_row() -> None:
    """Operations without a pause are measured about once in 64 to 128, and each counts for those since the one before."""
    turns = CostTurns()
    counted = [of for n in range(100_000) if (of := turns.next(1 + n * 1000))]
    assert 100_000 - 128 < sum(counted) <= 100_000
    assert (min(counted), max(counted)) >= (64, 64)
    assert max(counted) <= 128


def test_usual_cost() -> None:
    """A measurement far above the usual ones is bounded; what is dear in every third operation, or from now on, counts in full."""
    usual = UsualCost()
    assert [usual.bound(100) for _ in range(20)] == [100] * 20
    assert usual.bound(150_000) == COST_BOUND * 100
    assert usual.bound(COST_BOUND * 100) == COST_BOUND * 100
    mixed = [usual.bound(100 if n % 3 else 50_000) for n in range(60)]
    assert mixed[15:] == [100 if n % 3 else 50_000 for n in range(15, 60)]
    assert [usual.bound(900_000) for _ in range(20)][-1] == 900_000


@pytest.mark.parametrize("period", [1, 7, 16, 24, 200, 256])
def test_sample(period: int) -> None:
    """One operation in sixteen is sampled, in whole runs, and of each place in a step alike, however long the step."""
    sampled = [seq for seq in range(1 << 20) if is_sampled(seq)]
    assert {seq - seq % 16 for seq in sampled} == {seq for seq in sampled if seq % 16 == 0}
    assert len(sampled) % 16 == 0
    places = [0] * period
    for seq in sampled:
        places[seq % period] += 1
    assert all(abs(found * period * 16 / (1 << 20) - 1) < 0.1 for found in places)


def test_counts() -> None:
    """Operations are added up by op, group, flags and size class; number and launch are the latest's."""
    counts = Counts()
    for seq, size in enumerate((4096, 2049, 4097, 0)):
        counts.add((1, 0, 0, size, seq, 100 + seq))
    counts.add((1, 3, 0, 4096, 9, 200))
    assert counts.take() == [
        (1, 0, 0, 2, 6145, 1, 101),
        (1, 0, 0, 1, 4097, 2, 102),
        (1, 0, 0, 1, 0, 3, 103),
        (1, 3, 0, 1, 4096, 9, 200),
    ]
    assert counts.take() == []
