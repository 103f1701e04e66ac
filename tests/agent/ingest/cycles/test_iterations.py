"""Iterations where nothing marks steps: the loops that servers and custom trainings have, as the operations that they launch.

A loop is written as a text. A letter is an operation: a small one of a group of two ranks, a large one of the group of all eight.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from commwatch_agent.ingest.cycles.cycle import GROUP_SHIFT, MOST_CYCLE, Operations
from commwatch_agent.ingest.cycles.ends import End
from commwatch_agent.ingest.cycles.iterations import Finder
from tests.helpers import MS, examples

#: Size of the groups, by number.
SIZES = {0: 8, 1: 2}


def operations(loop: str, every_ms: int = 100, begin: int = 0) -> Operations:
    """The operations of a loop, each of which takes 10 ms; ``begin``: how many came before."""
    counts = Counter[int]()
    rows = []
    for at, letter in enumerate(loop):
        group = int(letter.islower())
        launch = at * every_ms * MS
        rows.append((ord(letter.upper()) | group << GROUP_SHIFT, counts[group], launch, launch + 10 * MS))
        counts[group] += 1
    return Operations(*np.array(rows[begin:], np.int64).reshape(-1, 4).T)


def finder() -> Finder:
    return Finder(SIZES.__getitem__)


def fed(loop: Operations, piece: int = 1000, to: Finder | None = None) -> list[End]:
    """The ends of iterations, if so many operations are passed at a time; places are counted from the first one."""
    to, ends = to or finder(), list[End]()
    for at in range(0, len(loop.code), piece):
        ends += [end._replace(place=at + end.place) for end in to.feed(loop.some(slice(at, at + piece)))]
    return ends


def turns(loop: str, every_ms: int = 100) -> list[str]:
    """The operations of each iteration."""
    ends = fed(operations(loop, every_ms))
    return [loop[a.place + 1 : b.place + 1] for a, b in pairwise(ends) if not b.first]


# -- cycles -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cycle", ["A", "AB", "AAB", "ABAC", "aaaaA", "aaaab", "aAbBcC", "AABBAABC"])
def test_each_turn_is_an_iteration(cycle: str) -> None:
    """A loop that repeats gives one iteration a turn, each with all operations of the cycle."""
    found = turns(cycle * 300)
    assert len(found) > 20
    assert {"".join(sorted(turn)) for turn in found} == {"".join(sorted(cycle))}


def test_iteration_ends_with_an_operation() -> None:
    """An iteration ends when the last operation of its turn ends."""
    loop = operations("AB" * 50)
    for end in fed(loop):
        assert (loop.seq[end.place], loop.end[end.place]) == (end.seq, end.end_ns)


def test_the_largest_group_has_the_iterations() -> None:
    """An iteration ends with an operation of the largest group of the cycle, also where the number of others in it varies."""
    uneven = "".join("A" + "b" * random.Random(turn).randint(1, 9) for turn in range(60))
    for loop in ("aaabA" * 20, uneven):
        ends = fed(operations(loop))
        assert ends
        assert {loop[end.place] for end in ends} == {"A"}


@pytest.mark.parametrize("seed", range(5))
def test_irregular_sequence_has_none(seed: int) -> None:
    """A sequence that repeats no cycle has no iterations."""
    choice = random.Random(seed)
    assert not fed(operations("".join(choice.choice("ABC") for _ in range(3000))))
    assert not fed(operations("".join("A" + "B" * choice.randint(1, 9) for _ in range(300))))


def test_too_long_a_cycle_has_none() -> None:
    """A cycle of more operations than are kept has no iterations; the longest one that is searched has."""
    choice = random.Random(1)
    longest = "".join(choice.choice("ABCD") for _ in range(MOST_CYCLE))
    assert set(map(len, turns(longest * 6))) == {MOST_CYCLE}
    assert not fed(operations((longest + "A") * 6))


def test_three_turns_and_two_seconds() -> None:
    """A loop has no iterations before its third turn ends, nor before it has lasted two seconds."""
    assert fed(operations("ABCD" * 20, every_ms=1000))[0].place >= 3 * 4 - 1
    assert fed(operations("AB" * 1000, every_ms=10))[0].place >= 200 - 2


def test_pauses_tell_the_steps_of_equal_operations() -> None:
    """Where all operations are alike, an iteration begins after the long pause that comes after each so many of them."""
    pauses, launch = [100, 1, 2, 1, 3, 1, 1, 2], 0
    rows = []
    for seq in range(400):
        launch += pauses[seq % 8] * MS
        rows.append((65, seq, launch, launch + 10 * MS))
        launch += 10 * MS
    ends = fed(Operations(*np.array(rows, np.int64).T))
    assert len(ends) > 10
    assert {end.seq % 8 for end in ends} == {7}


# -- what changes -----------------------------------------------------------------------------


def test_phases() -> None:
    """A change of phase ends the iterations; they begin again when the cycle of the new phase has repeated, and span no change."""
    loop = "AB" * 50 + "AC" * 50 + "AAAB" * 50 + "AB" * 60
    found = turns(loop)
    assert {"".join(sorted(turn)) for turn in found} == {"AB", "AC", "AAAB"}
    ends = fed(operations(loop))
    assert sum(end.first for end in ends) == 4


def test_inner_loop_is_not_taken_for_the_cycle_again_and_again() -> None:
    """A loop within the cycle may be taken for it at first, but not for long."""
    found = turns(("A" * 160 + "B") * 60, every_ms=20)
    assert set(found[-20:]) == {"A" * 160 + "B"}


def test_group_that_is_silent_ends_its_iterations() -> None:
    """Iterations end if their group has no operation for long, and those of another group begin."""
    loop = "aaA" * 50 + "ab" * MOST_CYCLE
    found = turns(loop)
    assert "aaA" in found
    assert found[-1] in ("ab", "ba")


def test_lost_operations() -> None:
    """No iteration spans lost operations."""
    loop = operations("AB" * 300)
    kept = np.flatnonzero((loop.seq < 200) | (loop.seq >= 251))
    ends = fed(loop.some(kept))
    spans = [(a.seq, b.seq) for a, b in pairwise(ends) if not b.first]
    assert spans
    assert all(until - since == 2 for since, until in spans)
    assert max(end.seq for end in ends) > 500


# -- the same for all -------------------------------------------------------------------------


@given(st.text("ABab", min_size=1, max_size=12), st.integers(0, 60), st.integers(1, 100))
@example("AAaB", 2, 1)
@example("AAAaB", 3, 1)
@examples(50)
def test_same_cuts_wherever_one_begins_to_look(cycle: str, begin: int, piece: int) -> None:
    """Ranks of a group, and agents that began at different times, end iterations at the same operations, however records are passed."""
    loop = cycle * 200
    whole = fed(operations(loop))
    late = fed(operations(loop, begin=begin % (5 * len(cycle) + 1)), piece)
    both = {(end.seq, end.end_ns) for end in whole} & {(end.seq, end.end_ns) for end in late}
    since = max(whole[0].end_ns, late[0].end_ns)
    assert {(e.seq, e.end_ns) for e in whole if e.end_ns >= since} == both
    assert {(e.seq, e.end_ns) for e in late if e.end_ns >= since} == both


@pytest.mark.parametrize("piece", [1, 7, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_operations_that_end_out_of_order(piece: int, seed: int) -> None:
    """Asynchronous operations may end in another order; the iterations are the same."""
    chance = random.Random(seed)
    loop = operations("ABCDabcd" * 60)
    order = sorted(range(len(loop.code)), key=lambda at: at + chance.uniform(0, 6))
    swapped = loop.some(np.array(order))
    ends = fed(swapped, piece)
    assert ends
    wanted = {end.seq % 4 for end in fed(loop)}
    assert {end.seq % 4 for end in ends} == wanted
    assert all(b.seq - a.seq == 4 for a, b in pairwise(ends) if not b.first)
    for end in ends:  # all operations up to the last one of the turn have come
        assert set(range(end.seq + 1)) <= set(swapped.seq[: end.place + 1].tolist())


def test_memory_is_bounded() -> None:
    """The operations that a rank keeps are bounded."""
    choice, to = random.Random(1), finder()
    for _ in range(30):
        fed(operations("".join(choice.choice("ABC") for _ in range(2000))), to=to)
        assert to.bytes < 1_000_000
