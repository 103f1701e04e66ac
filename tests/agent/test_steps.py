"""Step marks to steps: the loops people really write, as the marks their optimizers leave."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest

from commwatch.steps import AMBIGUOUS, EXPLICIT, Mark, Step, StepTracker
from tests.helpers import MS

Span = tuple[int, int]


def marks(ends_ms: Iterable[tuple[int, int]], took_ms: int = 1) -> list[Mark]:
    """Marks from (optimizer, end in ms), in the order of their ends."""
    ordered = sorted(ends_ms, key=lambda pair: pair[1])
    return [Mark(seq, who, (at - took_ms) * MS, at * MS, None, 0) for seq, (who, at) in enumerate(ordered)]


def fed(*given: Mark, tracker: StepTracker | None = None) -> list[Step]:
    tracker = tracker or StepTracker()
    return [step for mark in given for step in tracker.feed(mark)]


def spans(steps: Iterable[Step]) -> list[Span]:
    """(start, end) in ms."""
    return [(step.start_ns // MS, step.end_ns // MS) for step in steps]


def test_single_optimizer() -> None:
    """With one optimizer each call ends a step, and the first call only starts the clock."""
    steps = fed(*marks((0, at) for at in (100, 200, 310, 400)))
    assert spans(steps) == [(100, 200), (200, 310), (310, 400)]
    assert [step.seq for step in steps] == [1, 2, 3]


def test_step_is_told_at_once() -> None:
    """With one optimizer a step is told at its own mark, not at the one after."""
    tracker = StepTracker()
    first, second = marks([(0, 100), (0, 200)])
    assert tracker.feed(first) == []
    assert spans(tracker.feed(second)) == [(100, 200)]


def test_first_mark_starts_the_clock() -> None:
    """A single mark, of an optimizer or explicit, makes no step: nobody knows when the step began."""
    assert fed(*marks([(0, 100)])) == []
    assert fed(*marks([(EXPLICIT, 100)])) == []


def test_gradient_accumulation() -> None:
    """However many backward passes come before it, one optimizer call is one step."""
    # Four micro-batches of 25 ms between two calls; the last accumulation of the epoch is shorter.
    assert spans(fed(*marks((0, at) for at in (100, 200, 300, 350, 450)))) == [
        (100, 200),
        (200, 300),
        (300, 350),
        (350, 450),
    ]


def test_two_optimizers_in_every_step() -> None:
    """Two calls within 5 % of the period are one step, which ends at the last, and there is one step per period."""
    tracker = StepTracker()
    ends = range(100, 1100, 100)
    steps = fed(*marks([*((0, at) for at in ends), *((1, at + 3) for at in ends)]), tracker=tracker)
    # The burst of 1000 is still open: the next one closes it.
    assert spans(steps) == [(at + 3, at + 103) for at in range(100, 900, 100)]
    assert tracker.unavailable is None


def test_three_optimizers_in_every_step() -> None:
    """More optimizers than two are one step just the same."""
    ends = range(100, 1100, 100)
    steps = fed(*marks((who, at + 2 * who) for at in ends for who in (0, 1, 2)))
    assert spans(steps) == [(at + 4, at + 104) for at in range(100, 900, 100)]


def test_two_optimizers_add_up() -> None:
    """A step of several calls has the exposed time of all of them, and the operations in flight at the last."""
    given = []
    for n, at in enumerate(range(100, 700, 100)):
        given.append(Mark(2 * n, 0, (at - 1) * MS, at * MS, 7 * MS, 5))
        given.append(Mark(2 * n + 1, 1, (at + 1) * MS, (at + 2) * MS, 2 * MS, 1))
    steps = fed(*given)
    assert {step.exposed_ns for step in steps} == {9 * MS}
    assert {step.in_flight for step in steps} == {1}
    assert [step.seq % 2 for step in steps] == [1] * len(steps)


def test_exposed_time_partly_known() -> None:
    """Where one call of a step does not know its exposed time, the step's is not known: never a part for the whole."""
    given = []
    for n, at in enumerate(range(100, 700, 100)):
        given.append(Mark(2 * n, 0, (at - 1) * MS, at * MS, 7 * MS, 0))
        given.append(Mark(2 * n + 1, 1, (at + 1) * MS, (at + 2) * MS, None, 0))
    steps = fed(*given)
    assert steps
    assert {step.exposed_ns for step in steps} == {None}


@pytest.mark.parametrize("first_at", [0, 3, 5])
def test_sparse_optimizer_every_fourth_step(first_at: int) -> None:
    """An embedding optimizer that steps every 4th time changes nothing: each call of the main one is a step."""
    tracker = StepTracker()
    main = range(100, 8100, 100)
    sparse = [(1, at + 3) for n, at in enumerate(main) if n % 4 == first_at % 4 and n >= first_at]
    steps = fed(*marks([*((0, at) for at in main), *sparse]), tracker=tracker)
    assert tracker.unavailable is None
    lengths = [end - start for start, end in spans(steps)]
    # All but the clock's start and a burst still open; a step ends up to 3 ms after its main call.
    assert len(main) - 2 <= len(steps) <= len(main) - 1
    assert all(97 <= length <= 103 for length in lengths), lengths
    assert all(one.end_ns == two.start_ns for one, two in pairwise(steps))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_alternating_optimizers(order: tuple[int, int]) -> None:
    """A GAN's optimizers take turns: there is no telling a step, so there is none, from the first mark on."""
    tracker = StepTracker()
    told = [step for mark in marks((order[n % 2], 100 + 50 * n) for n in range(100)) for step in tracker.feed(mark)]
    assert tracker.unavailable == AMBIGUOUS
    assert told == []


def test_alternation_says_the_remedy() -> None:
    """The reason names what the user can do about it."""
    assert "commwatch.step()" in AMBIGUOUS


def test_critic_loop_becomes_unavailable() -> None:
    """Five critic steps to one of the generator are recognised as soon as the generator has taken its turn twice."""
    tracker = StepTracker()
    turns = [0, 0, 0, 0, 0, 1] * 3
    fed(*marks((who, 100 + 50 * n) for n, who in enumerate(turns[:13])), tracker=tracker)
    assert tracker.unavailable == AMBIGUOUS
    assert fed(*[m._replace(seq=m.seq + 13) for m in marks((0, 750 + 50 * n) for n in range(5))], tracker=tracker) == []


def test_explicit_marks_win() -> None:
    """From the first ``commwatch.step()`` on only explicit marks count; that one only starts the clock anew."""
    tracker = StepTracker()
    before = marks([(0, 100), (0, 200)])
    after = marks([(EXPLICIT, 250), (0, 300), (EXPLICIT, 350), (0, 400), (1, 410), (EXPLICIT, 450)])
    assert spans(fed(*before, tracker=tracker)) == [(100, 200)]
    assert spans(fed(*after, tracker=tracker)) == [(250, 350), (350, 450)]


def test_explicit_marks_resolve_alternation() -> None:
    """A GAN that calls ``commwatch.step()`` has steps, and no reason for having none."""
    tracker = StepTracker()
    fed(*marks((n % 2, 100 + 50 * n) for n in range(20)), tracker=tracker)
    assert tracker.unavailable == AMBIGUOUS
    assert spans(fed(*marks([(EXPLICIT, 2000), (EXPLICIT, 2100), (EXPLICIT, 2200)]), tracker=tracker)) == [
        (2000, 2100),
        (2100, 2200),
    ]
    assert tracker.unavailable is None


def test_explicit_marks_are_never_merged() -> None:
    """Explicit marks that follow one another at once are each a step: who says so by hand is believed."""
    assert spans(fed(*marks((EXPLICIT, at) for at in (100, 200, 201, 300)))) == [(100, 200), (200, 201), (201, 300)]


@pytest.mark.parametrize("optimizers", [1, 2])
def test_slow_first_step(optimizers: int) -> None:
    """A first period of a minute (compiling) does not make the steps of 100 ms after it look like one."""
    ends = [100, 60_100, *range(60_200, 61_200, 100)]
    steps = fed(*marks((who, at + 2 * who) for at in ends for who in range(optimizers)))
    last = 2 * (optimizers - 1)
    expected = [(a + last, b + last) for a, b in pairwise(ends)]
    # With several optimizers the last burst stays open.
    assert spans(steps) == expected[: len(expected) - (optimizers - 1)]


def test_slow_first_step_with_sparse_optimizer() -> None:
    """The same where the second optimizer comes in only now and then: no step swallows its neighbours."""
    ends = [100, 60_100, *range(60_200, 64_200, 100)]
    sparse = [(1, at + 3) for n, at in enumerate(ends) if n % 4 == 3]
    steps = fed(*marks([*((0, at) for at in ends), *sparse]))
    assert len(ends) - 2 <= len(steps) <= len(ends) - 1
    assert max(step.end_ns - step.start_ns for step in steps[1:]) <= 103 * MS


def test_period_changes() -> None:
    """Steps that become ten times faster (a shorter sequence) are told one by one from then on."""
    ends = [*range(1000, 31_000, 1000), *range(30_100, 33_100, 100)]
    steps = fed(*marks((who, at + who) for at in ends for who in (0, 1)))
    assert len(steps) == len(ends) - 2
