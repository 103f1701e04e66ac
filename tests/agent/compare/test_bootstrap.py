"""The statistics of a comparison, over many seeds: what is no difference is not called one, and what is one is found."""

from __future__ import annotations

import numpy as np
import pytest

from commwatch_agent.compare.bootstrap import (
    BLOCKS,
    LEAST_BEYOND,
    LEAST_FILLED,
    Floats,
    Samples,
    Sums,
    blocks_of,
    change_of_quantile,
    change_of_ratio,
    quantile,
    ratio,
    shift,
    warm_up,
)
from commwatch_agent.compare.comparison import LEAST_CHANGE

#: Steps of warm-up in the made-up jobs.
WARM_UP = 12
SEEDS = 120


def steps_of(seed: int, number: int, again: float, slower: float = 1.0) -> Floats:
    """Step times of two ranks [steps, ranks] in s: noise of 6%, of which a part ``again`` is the step before's; one step in 33 is half as long again.

    The first ones take up to 2.5 times as long, as those of a job that allocates, compiles and opens connections.
    """
    chance = np.random.default_rng(seed)
    noise = np.empty(number)
    latest = chance.normal()
    for n in range(number):
        noise[n] = latest = again * latest + np.sqrt(1 - again**2) * chance.normal()
    usual = 0.1 * slower * np.exp(0.06 * noise) * np.where(chance.random(number) < 0.03, 1.5, 1)
    usual[:WARM_UP] *= 1 + 1.5 * np.exp(-np.arange(WARM_UP) / 5)
    return np.asarray(usual[:, None] * np.exp(chance.normal(0, 0.01, (number, 2))))


def samples_of(steps: Floats) -> Samples:
    """The samples of a job, without its warm-up."""
    kept = steps[warm_up(np.median(steps, axis=1)) :]
    return Samples(kept.ravel(), np.repeat(blocks_of(len(kept)), 2))


def found(seed: int, number: int, again: float, slower: float = 1.0) -> bool:
    """Whether a difference between the median steps of two jobs is found."""
    a, b = samples_of(steps_of(2 * seed, number, again)), samples_of(steps_of(2 * seed + 1, number, again, slower))
    change = change_of_quantile(a, b, 0.5)
    assert change is not None
    assert change.low <= change.change <= change.high
    return (change.low > 0 or change.high < 0) and abs(change.change) >= LEAST_CHANGE


@pytest.mark.parametrize(
    ("number", "again"),
    [
        pytest.param(100, 0.0, marks=pytest.mark.long),
        (100, 0.6),
        pytest.param(300, 0.6, marks=pytest.mark.long),
        (400, 0.9),
    ],
)
def test_same_job_twice(number: int, again: float) -> None:
    """Between jobs of one distribution, at most one in twenty differences is found, however alike successive steps are."""
    assert sum(found(seed, number, again) for seed in range(SEEDS)) <= SEEDS / 20


@pytest.mark.parametrize(
    ("number", "again", "least"),
    [(200, 0.0, 0.95), (400, 0.6, 0.9), pytest.param(1000, 0.6, 1.0, marks=pytest.mark.long)],
)
def test_five_percent_slower(number: int, again: float, least: float) -> None:
    """Steps that take 5% longer are found in almost all seeds."""
    seeds = range(SEEDS // 2)
    assert sum(found(seed, number, again, 1.05) for seed in seeds) >= least * len(seeds)


def test_single_steps_would_deceive() -> None:
    """With a block for each step instead, differences that are none are found in many seeds: this is what blocks are for."""
    wrong = 0
    for seed in range(30):
        a, b = (steps_of(2 * seed + run, 400, 0.9)[50:] for run in range(2))
        medians = [
            np.median(run[np.random.default_rng(n).integers(0, len(run), (400, len(run)))], axis=(1, 2))
            for n, run in enumerate((a, b))
        ]
        low, high = np.quantile(np.log(medians[1] / medians[0]), [0.005, 0.995])
        wrong += low > 0 or high < 0
    assert wrong > 10


@pytest.mark.parametrize("at", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("times", [0.6, 0.8, 1.3, 2.0])
def test_another_speed_is_no_warm_up(at: float, times: float) -> None:
    """Where the speed changes amid a run, only its real warm-up is cut, and the change is found with both speeds, wherever it is."""
    cuts, found = [], []
    for seed in range(20):
        steps = np.median(steps_of(seed, 249, 0.3), axis=1)
        first = round(at * 249)
        steps[first:] *= times
        cuts.append(warm_up(steps))
        assert cuts[-1] <= 249 / 5
        found.append(shift(steps[cuts[-1] :]))
        if found[-1] is not None:
            assert abs(found[-1].at + cuts[-1] - first) <= 15
            assert found[-1].after_s / found[-1].before_s == pytest.approx(times, rel=0.08)
    assert sum(each is not None for each in found) >= 18
    assert np.median(cuts) <= 3 * WARM_UP


@pytest.mark.parametrize("again", [0.0, 0.6, 0.9])
def test_noise_and_drift_are_no_change_of_speed(again: float) -> None:
    """Noise, steps that are alike for a while, and some very long steps are hardly ever taken for a change of speed; a few steps are never."""
    found = 0
    for seed in range(120):
        steps = np.median(steps_of(seed, (60, 249, 600)[seed % 3], again), axis=1)
        found += shift(steps[warm_up(steps) :]) is not None
    assert found <= 120 / 20
    for number in (0, 4, 30):
        assert shift(np.append(np.full(number, 0.1), np.full(7, 0.2))) is None
    assert shift(np.array(([0.1] * 9 + [0.5]) * 20)) is None


def test_a_run_that_is_always_one_speed_after_a_long_first_part() -> None:
    """A first part that has half of the steps stays in the comparison; one that has a fifth, or is short, is the warm-up."""
    for first, rest, cut in ((125, 124, 0), (40, 209, 40), (20, 30, 20)):
        assert warm_up(np.append(np.full(first, 0.2), np.full(rest, 0.1))) == cut


def test_noise_is_no_warm_up() -> None:
    """Of short runs whose steps vary at random, hardly ever a part is taken for warm-up, however noisy they are."""
    cuts = []
    for seed in range(400):
        chance = np.random.default_rng(seed)
        cuts.append(warm_up(np.asarray(chance.lognormal(0, (0.05, 0.5)[seed % 2], (30, 60, 200)[seed % 3]))))
    assert np.mean(np.array(cuts) > 0) <= 0.05


def test_warm_up_is_left_out() -> None:
    """The slow first steps are cut off in every seed, and never more than half; without any, few steps are cut off on average."""
    cuts = [warm_up(np.median(steps_of(seed, 200, 0.6), axis=1)) for seed in range(SEEDS)]
    assert min(cuts) >= 5
    assert max(cuts) <= 100
    steady = [warm_up(np.median(steps_of(seed, 200, 0.6)[WARM_UP:], axis=1)) for seed in range(SEEDS)]
    assert np.mean(steady) < 20
    assert warm_up(np.ones(0)) == warm_up(np.ones(7)) == 0


def test_same_answer_each_time() -> None:
    """Two comparisons of the same runs have the same interval, and the reverse comparison has the reverse."""
    a, b = (samples_of(steps_of(seed, 300, 0.6)) for seed in range(2))
    once, again, back = change_of_quantile(a, b, 0.5), change_of_quantile(a, b, 0.5), change_of_quantile(b, a, 0.5)
    assert once is not None
    assert back is not None
    assert once == again
    assert 1 + back.change == pytest.approx(1 / (1 + once.change))
    assert 1 + back.low == pytest.approx(1 / (1 + once.high), rel=0.02)


def test_too_few_samples() -> None:
    """There is no interval for a quantile with too few samples beyond it, or for a ratio that most blocks have no part in."""
    few, enough = (Samples(np.linspace(1, 2, n), blocks_of(n)) for n in (2 * LEAST_BEYOND - 1, 2 * LEAST_BEYOND))
    assert change_of_quantile(few, enough, 0.5) is None
    assert change_of_quantile(enough, enough, 0.5) is not None
    assert change_of_quantile(enough, enough, 0.95) is None
    below = np.where(np.arange(BLOCKS) < LEAST_FILLED, 2.0, 0.0)
    whole, part = Sums(below, below), Sums(below, np.where(np.arange(BLOCKS) < LEAST_FILLED - 1, 2.0, 0.0))
    assert change_of_ratio(whole, whole, relative=True) is not None
    assert change_of_ratio(whole, part, relative=True) is None
    nothing = Samples(np.zeros(0), np.zeros(0, np.int64))
    assert quantile(nothing, 0.5) is None
    assert change_of_quantile(nothing, nothing, 0.5) is None
    assert ratio(Sums(np.zeros(BLOCKS), np.zeros(BLOCKS))) is None


def test_ratio_of_nothing_to_something() -> None:
    """A share that is 0 in one run has a difference but no relative change."""
    zero, some = Sums(np.zeros(BLOCKS), np.ones(BLOCKS)), Sums(np.linspace(0.1, 0.2, BLOCKS), np.ones(BLOCKS))
    change = change_of_ratio(zero, some, relative=False)
    assert change is not None
    assert change.change == pytest.approx(0.15)
    assert change.low > 0
    assert change_of_ratio(zero, some, relative=True) is None
