"""Step marks to steps: the loops people really write, as the marks their optimizers leave.

A loop is written as a text. A letter is a call of that optimizer; a small letter is one without a forward pass since the call before.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_agent.ingest import optimizer_rounds
from commwatch_agent.ingest.optimizer_rounds import Mark, repeats
from commwatch_agent.ingest.steps import AMBIGUOUS, EXPLICIT, Step, StepTracker
from tests.helpers import MS, examples

Span = tuple[int, int]


def marks(ends_ms: Iterable[tuple[int, int]], took_ms: int = 1) -> list[Mark]:
    """Marks from (optimizer, end in ms), in the order of their ends."""
    ordered = sorted(ends_ms, key=lambda pair: pair[1])
    return [Mark(seq, who, (at - took_ms) * MS, at * MS, None, 0) for seq, (who, at) in enumerate(ordered)]


def loop(calls: str, gaps_ms: Iterable[int] | None = None) -> list[Mark]:
    """The marks of a loop; by default a call ends 100 ms after the one before it, or 1 ms after one in the same pass."""
    made, now = [], 0
    gaps = iter(gaps_ms) if gaps_ms is not None else None
    for seq, call in enumerate(calls):
        now += next(gaps) if gaps is not None else 1 if call.islower() else 100
        optimizer = ord(call.upper()) - ord("A")
        made.append(Mark(seq, optimizer, now * MS - 1, now * MS, None, 0, call.islower()))
    return made


def fed(*given: Mark, tracker: StepTracker | None = None) -> list[Step]:
    tracker = tracker or StepTracker()
    return [step for mark in given for step in tracker.feed(mark)]


def ends(calls: str, tracker: StepTracker | None = None) -> list[int]:
    """The places in the loop of the calls that end a step."""
    return [step.seq for step in fed(*loop(calls), tracker=tracker)]


def spans(steps: Iterable[Step]) -> list[Span]:
    """(start, end) in ms."""
    return [(step.start_ns // MS, step.end_ns // MS) for step in steps]


# -- one optimizer --------------------------------------------------------------------------------


def test_single_optimizer() -> None:
    """With one optimizer each call ends a step, and the first call only starts the clock."""
    ends_ms = (100, 200, 310, 400, 500, 600, 700, 800, 900)
    steps = fed(*marks((0, at) for at in ends_ms))
    assert spans(steps) == list(pairwise(ends_ms))
    assert [step.seq for step in steps] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_steps_of_one_optimizer() -> None:
    """The steps of one optimizer come after nine calls, as another may be called until then; from then on each at its own mark."""
    tracker = StepTracker()
    counts = [len(tracker.feed(mark)) for mark in marks((0, 100 * n) for n in range(1, 13))]
    assert counts == [0] * 8 + [8, 1, 1, 1]


def test_long_steps_of_one_optimizer() -> None:
    """Steps of several seconds come after 10 s."""
    tracker = StepTracker()
    counts = [len(tracker.feed(mark)) for mark in marks((0, 4000 * n) for n in range(1, 7))]
    assert counts == [0, 0, 0, 3, 1, 1]


def test_few_steps_of_one_optimizer() -> None:
    """A training of fewer steps than that has them at its end."""
    tracker = StepTracker()
    assert fed(*marks([(0, 100), (0, 200), (0, 350)]), tracker=tracker) == []
    assert spans(tracker.end()) == [(100, 200), (200, 350)]


@pytest.mark.parametrize("discriminators", [1, 2, 3, 6])
def test_generator_comes_late(discriminators: int) -> None:
    """Calls of the first optimizer before the second one is called for the first time are no steps of their own."""
    tracker = StepTracker()
    number = len(ends(("A" * discriminators + "B") * 20, tracker))
    assert number == 19


def test_first_mark_starts_the_clock() -> None:
    """A single mark, of an optimizer or explicit, makes no step: the begin of the step is unknown."""
    assert fed(*marks([(0, 100)])) == []
    assert fed(*marks([(EXPLICIT, 100)])) == []


def test_gradient_accumulation() -> None:
    """However many backward passes come before it, one optimizer call is one step."""
    # Four micro-batches of 25 ms between two calls; the last accumulation of the epoch is shorter.
    ends_ms = (100, 200, 300, 350, 450, 550, 650, 700, 800)
    assert spans(fed(*marks((0, at) for at in ends_ms))) == list(pairwise(ends_ms))


@pytest.mark.parametrize("pause_ms", [3, 20, 60_000])
def test_pauses_of_one_optimizer(pause_ms: int) -> None:
    """Steps of 3 ms are not taken for calls of one step, even with an evaluation or a checkpoint after every tenth."""
    gaps = [pause_ms if n % 10 == 0 else 3 for n in range(500)]
    assert len(fed(*loop("A" * 500, gaps))) == 499


@pytest.mark.parametrize("calls", [2, 3, 47])
@pytest.mark.parametrize("gap_ms", [1, 500])
def test_parameter_groups(calls: int, gap_ms: int) -> None:
    """An engine that calls one optimizer for each group of its parameters has one step per forward pass, which ends at the last call."""
    tracker = StepTracker()
    given = loop(("A" + "a" * (calls - 1)) * 30, [100, *[gap_ms] * (calls - 1)] * 30)
    told = [(mark.seq, step.seq) for mark in given for step in tracker.feed(mark)]
    assert told[-26:] == [(n * calls - 1, n * calls - 1) for n in range(5, 31)]
    assert len(told) == 29
    assert tracker.unavailable is None


def test_parameter_groups_that_change() -> None:
    """Where another number of groups is called, there is still one step for each forward pass."""
    calls = "Aa" * 10 + "Aaa" * 10 + "A" * 10 + "Aa" * 10
    tracker = StepTracker()
    steps = ends(calls, tracker)
    assert len(steps) == 39


def test_agent_that_comes_between_the_groups() -> None:
    """The first mark that an agent sees may be the second of a step: the steps after it are whole."""
    assert ends("aAaAaAa" + "Aa" * 10)[-10:] == list(range(8, 28, 2))


def test_optimizer_after_another() -> None:
    """A training that makes a new optimizer for each of its phases has steps in all of them."""
    phases = 12
    calls = "".join(letter * 50 for letter in "ABCDEFGHIJKL")
    tracker = StepTracker()
    assert len(ends(calls, tracker)) == 50 * phases - 1
    assert tracker.unavailable is None


def test_framework_calls_begin_late() -> None:
    """Steps that an engine reports replace the calls of its optimizer before them."""
    assert len(ends("Aa" + "B" * 30)) >= 28


# -- several in every step ------------------------------------------------------------------------


@pytest.mark.parametrize("calls", ["Ab", "AB", "Abc", "ABC", "AbC"])
def test_optimizers_in_every_step(calls: str) -> None:
    """Optimizers that are called one after another in every step, with a forward pass between them or not: the last ends it."""
    tracker = StepTracker()
    number = len(calls)
    told = [(mark.seq, step.seq) for mark in loop(calls * 20) for step in tracker.feed(mark)]
    assert [step for _, step in told] == [number * n - 1 for n in range(2, 21)]
    assert all(when == step for when, step in told[8:])
    assert tracker.unavailable is None


def test_two_optimizers_add_up() -> None:
    """A step of several calls has the exposed time of all of them, and the operations in flight at the last."""
    given = []
    for n, at in enumerate(range(100, 1100, 100)):
        given.append(Mark(2 * n, 0, (at - 1) * MS, at * MS, 7 * MS, 5))
        given.append(Mark(2 * n + 1, 1, (at + 1) * MS, (at + 2) * MS, 2 * MS, 1))
    steps = fed(*given)
    assert {step.exposed_ns for step in steps} == {9 * MS}
    assert {step.in_flight for step in steps} == {1}
    assert [step.seq % 2 for step in steps] == [1] * len(steps)


def test_exposed_time_partly_known() -> None:
    """Where one call of a step does not know its exposed time, the step's is not known: never a part for the whole."""
    given = []
    for n, at in enumerate(range(100, 1100, 100)):
        given.append(Mark(2 * n, 0, (at - 1) * MS, at * MS, 7 * MS, 0))
        given.append(Mark(2 * n + 1, 1, (at + 1) * MS, (at + 2) * MS, None, 0))
    steps = fed(*given)
    assert steps
    assert {step.exposed_ns for step in steps} == {None}


@pytest.mark.parametrize("every", [2, 3, 4, 100, 1000])
@pytest.mark.parametrize("first", [True, False])
def test_sparse_optimizer(every: int, first: bool) -> None:
    """An optimizer called only in every so manieth pass, before or after the main one, changes nothing: each pass is a step."""
    tracker = StepTracker()
    with_both = "Ba" if first else "Ab"
    steps = ends(("A" * (every - 1) + with_both) * 5 + "A" * 3, tracker)
    assert tracker.unavailable is None
    # The step in which the other one is called first may be told with the one after it.
    assert 5 * every + 3 - 3 <= len(steps) <= 5 * every + 3 - 1


def test_sparse_optimizer_now_and_then() -> None:
    """The same where it comes in no order."""
    chance = random.Random(1)
    tracker = StepTracker()
    steps = fed(*loop("".join(chance.choice(["A", "A", "Ab"]) for _ in range(500))), tracker=tracker)
    assert tracker.unavailable is None
    assert 497 <= len(steps) <= 499
    assert all(98 <= end - start <= 102 for start, end in spans(steps[2:]))
    assert all(one.end_ns == two.start_ns for one, two in pairwise(steps))


def test_optimizer_for_each_parameter() -> None:
    """Many optimizers, called in the backward pass in an order that changes: each forward pass is a step."""
    chance = random.Random(1)
    given, seq = [], 0
    for step in range(20):
        order = chance.sample(range(200), 200)
        for place, optimizer in enumerate(order):
            given.append(Mark(seq, optimizer, seq * MS, seq * MS + 1 + step, None, 0, place > 0))
            seq += 1
    tracker = StepTracker()
    steps = fed(*given, tracker=tracker) + tracker.end()
    assert [step.seq for step in steps] == [200 * n - 1 for n in range(2, 21)]


# -- optimizers that take turns -------------------------------------------------------------------


@pytest.mark.parametrize("calls", ["AB", "AAB", "AAAAAB", "ABC", "AABB", "AABC", "AaBb", "AAABAB", "ABBBCb"])
def test_turns(calls: str) -> None:
    """One cycle is a step, which ends at its last call: a GAN's two, five of the discriminator for one of the generator, actor and critic."""
    tracker = StepTracker()
    number = len(calls)
    told = [(mark.seq, step.seq) for mark in loop(calls * 30) for step in tracker.feed(mark)]
    assert tracker.unavailable is None
    assert all(when == step for when, step in told[-20:])
    assert {(two - one) for (_, one), (_, two) in pairwise(told[-25:])} == {number}
    assert told[-1][1] >= number * 30 - number
    # At the beginning, until the second optimizer comes, each call looks like a step.
    assert 28 <= len(told) <= 29 + 4


def test_turns_begin_where_the_training_began() -> None:
    """Of equal turns the first is the one that came first in the training, also where a third one joins them later."""
    assert ends("ABC" * 10)[-1] == 29
    assert ends("AB" * 50 + "ABC" * 20)[-1] == 159


def test_generator_first() -> None:
    """A loop that calls the generator in its first round, too, has steps that end at the generator."""
    assert ends("ABAAAA" * 10)[-3:] == [6 * 7 + 1, 6 * 8 + 1, 6 * 9 + 1]


@given(
    st.sampled_from(["A", "AB", "AAB", "ABC", "AAAB", "ABCD", "AABB", "ABAC", "Aa", "Ab", "Aab"]),
    st.lists(st.sampled_from([1, 2, 3, 4, 10, 90, 4000]), min_size=200, max_size=200),
)
@examples(100)
def test_gaps_do_not_decide(calls: str, gaps_ms: list[int]) -> None:
    """However long the gaps between calls are, a loop has as many steps as it goes around."""
    given = loop(calls * (200 // len(calls)), gaps_ms)
    around, number = len(given) // len(calls), len(calls)
    steps = [step.seq for step in fed(*given) if step.seq > 80]
    assert {two - one for one, two in pairwise(steps)} == {number}
    assert abs(len(steps) - (around - 81 / number)) < 1


@given(st.lists(st.sampled_from("ABabC"), max_size=300), st.integers(1, 400))
@examples(200)
def test_any_loop(calls: list[str], at: int) -> None:
    """Whatever the calls are: steps follow one another without overlap, end at a call, and the end brings out nothing twice."""
    tracker = StepTracker()
    steps = fed(*loop("".join(calls[:at])), tracker=tracker) + tracker.end()
    assert all(step.start_ns < step.end_ns for step in steps)
    assert all(one.end_ns <= two.start_ns for one, two in pairwise(steps))
    assert tracker.end() == []


def test_skipped_calls() -> None:
    """Calls that a gradient scaler leaves out change neither the steps around them nor where they end."""
    tracker = StepTracker()
    rounds = ["AB"] * 40
    rounds[20], rounds[30] = "A", "B"
    steps = ends("".join(rounds), tracker)
    assert len(steps) == 39
    assert tracker.unavailable is None


def test_epochs_that_begin_the_count_anew() -> None:
    """Five of the discriminator to one of the generator, counted anew in every epoch of 52 batches: one step for each of the generator's."""
    epoch = "".join("AB" if n % 5 == 0 else "A" for n in range(52))
    tracker = StepTracker()
    calls = epoch * 10
    steps = ends(calls, tracker)
    assert tracker.unavailable is None
    assert abs(len(steps) - calls.count("B")) <= 6


def test_pauses_of_turns() -> None:
    """A checkpoint between two turns, or within one, is part of the step that it lies in."""
    gaps = [50] * 80
    gaps[40] = gaps[61] = 30_000
    steps = fed(*loop("AB" * 40, gaps))
    assert sorted(end - start for start, end in spans(steps))[-2:] == [30_050, 30_050]
    assert len(steps) == 39


@pytest.mark.parametrize("kind", ["random", "changing"])
def test_no_clear_order(kind: str) -> None:
    """Random turns, or a number of discriminator steps that changes: no steps, but the reason and the remedy."""
    chance = random.Random(7)
    rounds = (chance.choice("AB") if kind == "random" else "A" * chance.randint(1, 9) + "B" for _ in range(1000))
    tracker = StepTracker()
    calls = "".join(rounds)
    steps = ends(calls, tracker)
    assert tracker.unavailable == AMBIGUOUS
    assert len(steps) < len(calls) / 20
    assert "commwatch.step()" in AMBIGUOUS


def test_short_run_in_no_order() -> None:
    """A run that ends before its order is clear has no steps, and the reason."""
    tracker = StepTracker()
    assert ends("ABBAAABABBBA", tracker) + [step.seq for step in tracker.end()] == []
    assert tracker.unavailable == AMBIGUOUS


def test_end_brings_out_what_is_clear() -> None:
    """Marks held at the end of a short run are returned if their rule is clear."""
    tracker = StepTracker()
    assert ends("ABABAB", tracker) == []
    assert [step.seq for step in tracker.end()] == [3, 5]


def test_order_that_becomes_clear() -> None:
    """A loop without order that becomes one with an order has steps from then on, and no reason for having none."""
    chance = random.Random(3)
    tracker = StepTracker()
    wild = "".join(chance.choice("AB") for _ in range(300))
    steps = ends(wild + "AB" * 600, tracker)
    assert tracker.unavailable is None
    assert steps[-1] == 300 + 1200 - 1


def test_what_is_held_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many optimizers there are, so many marks are held."""
    monkeypatch.setattr("commwatch_agent.ingest.steps.MOST_HELD", 128)
    monkeypatch.setattr(optimizer_rounds, "MOST_HELD", 128)
    for fresh in (True, False):
        tracker = StepTracker()
        fed(*(Mark(n, 0, n * MS, n * MS + 1, None, 0) for n in range(10)), tracker=tracker)
        for n in range(10, 1000):
            tracker.feed(Mark(n, n, n * MS, n * MS + 1, None, 0, not fresh))
        rule = vars(tracker)["_rule"]
        assert len(vars(tracker)["_held"]) + (len(rule.open) if rule else 0) <= 4 * 128


def test_repeats() -> None:
    """The longest end of a sequence that is one cycle, twice at least."""
    assert repeats([]) == (0, 0)
    assert repeats([1, 2, 3]) == (0, 0)
    assert repeats([5, 1, 1]) == (2, 1)
    assert repeats([9, 1, 2, 3, 1, 2, 3, 1]) == (7, 3)
    assert repeats([0, 0, 0, 1] * 3) == (12, 4)


# -- explicit marks -------------------------------------------------------------------------------


def test_explicit_marks_win() -> None:
    """From the first ``commwatch.step()`` on only explicit marks count; that one only starts the clock anew."""
    tracker = StepTracker()
    before = marks((0, 20 * n) for n in range(1, 11))
    after = marks([(EXPLICIT, 250), (0, 300), (EXPLICIT, 350), (0, 400), (1, 410), (EXPLICIT, 450)])
    assert len(fed(*before, tracker=tracker)) == 9
    assert spans(fed(*after, tracker=tracker)) == [(250, 350), (350, 450)]
    assert tracker.end() == []


def test_explicit_marks_resolve_turns() -> None:
    """A loop without order that calls ``commwatch.step()`` has steps, and no reason for having none."""
    tracker = StepTracker()
    chance = random.Random(7)
    fed(*loop("".join(chance.choice("AB") for _ in range(200))), tracker=tracker)
    assert tracker.unavailable == AMBIGUOUS
    at = [(EXPLICIT, 200_000), (EXPLICIT, 200_100), (EXPLICIT, 200_200)]
    assert spans(fed(*marks(at), tracker=tracker)) == [(200_000, 200_100), (200_100, 200_200)]
    assert tracker.unavailable is None


def test_explicit_marks_are_never_merged() -> None:
    """Explicit marks that follow one another directly are a step each: marks set by hand are trusted."""
    assert spans(fed(*marks((EXPLICIT, at) for at in (100, 200, 201, 300)))) == [(100, 200), (200, 201), (201, 300)]
