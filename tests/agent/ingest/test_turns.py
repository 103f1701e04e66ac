"""Time that owners share."""

from __future__ import annotations

from collections import Counter

from commwatch_agent.ingest.rings.turns import Turns


class Clock:
    """A clock that work moves on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_many_things_do_not_starve_one() -> None:
    """An owner with one thing has its turn in each call, beside one with thousands that never get done."""
    clock, served = Clock(), Counter[str]()

    def work(batch: list[str]) -> list[str]:
        served.update(batch)
        clock.now_s += 0.01 * len(batch)
        return []

    turns = Turns(1.0, clock)
    for _ in range(10):
        assert not turns.take({"many": ["m"] * 5000, "one": ["o"]}, work, together=8)
    assert served["o"] == 10
    assert 950 <= served["m"] <= 1100


def test_expensive_things() -> None:
    """Time counts, not the number of things: who has slow ones gets fewer of them done."""
    clock, served = Clock(), Counter[str]()

    def work(batch: list[str]) -> list[str]:
        served.update(batch)
        clock.now_s += sum({"slow": 0.1, "fast": 0.001}[each] for each in batch)
        return []

    turns = Turns(1.0, clock)
    for _ in range(10):
        turns.take({"a": ["slow"] * 1000, "b": ["fast"] * 1000}, work)
    assert 4 <= served["slow"] <= 70
    assert served["fast"] > 4000


def test_one_batch_longer_than_the_time() -> None:
    """Of owners whose single batch takes all the time, each has its turn in the next call but few."""
    clock, served = Clock(), list[str]()

    def work(batch: list[str]) -> list[str]:
        served.extend(batch)
        clock.now_s += 5
        return []

    turns = Turns(1.0, clock)
    for _ in range(8):
        turns.take({name: [name] for name in "abcd"}, work)
    assert Counter(served) == dict.fromkeys("abcd", 2)


def test_no_time_is_saved_up() -> None:
    """An owner that had nothing to do for long gets no more than its share when it comes back."""
    clock, served = Clock(), list[str]()

    def work(batch: list[str]) -> list[str]:
        served.extend(batch)
        clock.now_s += 0.1
        return []

    turns = Turns(1.0, clock)
    for _ in range(100):
        turns.take({"a": ["a"] * 20, "b": []}, work)
    served.clear()
    turns.take({"a": ["a"] * 20, "b": ["b"] * 20}, work)
    assert abs(served.count("a") - served.count("b")) <= 1


def test_passes() -> None:
    """What wants another pass gets it after all others have had theirs, a bounded number of times."""
    served = list[int]()

    def work(batch: list[int]) -> list[int]:
        served.extend(batch)
        return [each for each in batch if each < 3]

    assert Turns(1.0, lambda: 0.0).take({"a": [1, 2, 3, 4]}, work, passes=3, together=2)
    assert served == [1, 2, 3, 4, 1, 2, 1, 2]
