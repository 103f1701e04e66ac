"""Ranks that are late in turn, each for many steps in a row."""

from __future__ import annotations

import random

import pytest

from tests.agent.analysis.test_straggler_search import Delay, Loop, late, ranks
from tests.helpers import seeds


def turns(size: int, least: int, most: int, by_ms: float = 60.0) -> Delay:
    """Turns of random lengths, of which ranks take one after the other."""
    chance, who, until = random.Random(size), 0, 0

    def delay(rank: int, step: int, _: random.Random) -> float:
        nonlocal who, until
        if step >= until:
            who, until = (who + 1) % size, step + chance.randint(least, most)
        return by_ms * (rank == who)

    return delay


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize(("size", "least", "most"), [(2, 5, 90), (2, 20, 110), (3, 5, 90), (3, 50, 110)])
def test_no_rank_is_late(size: int, least: int, most: int, seed: int) -> None:
    """No rank is named that is late in turn with others, though in most of ten seconds it may be alone; once some turns are known."""
    loop = Loop(size, delay=turns(size, least, most), seed=seed)
    loop.run(30)
    for _ in range(40):
        loop.run(1)
        assert loop.named() == []


@pytest.mark.parametrize("size", [2, 3, 4])
def test_after_another(size: int) -> None:
    """A rank that became late after another one recovered is named, as after an even time; a rank that is late among uneven ones, too."""
    loop = Loop(size)
    loop.run(20, late(0))
    loop.run(10, late(1))
    assert ranks(loop.named()) == [1]
    loop = Loop(size, delay=lambda rank, step, chance: 60 * chance.random())
    loop.run(30)
    loop.run(12, lambda rank, step, chance: 60 * chance.random() + 60 * (rank == 1))
    assert ranks(loop.named()) == [1]
