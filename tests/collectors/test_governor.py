"""How much is recorded, by what it costs."""

from __future__ import annotations

import pytest

from commwatch.collectors.governor import COUNTERS, FULL, SAMPLING, Counts, Governor, budget_of, is_sampled

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
    """With a budget of 0 everything is recorded whatever it costs."""
    assert after(Governor(0), *[1.0] * 100) == FULL


@pytest.mark.parametrize(
    ("said", "budget"),
    [("", 0.005), ("0", 0), ("0.02", 0.02), ("1", 1), ("2", 0.005), ("-1", 0.005), ("nan", 0.005), ("half", 0.005)],
)
def test_budget(said: str, budget: float) -> None:
    """What is no part of the time is not taken for a budget."""
    assert budget_of({"COMMWATCH_BUDGET": said}) == budget


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
