"""The union of intervals against the plainest thing that can be right: a set of integers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from commwatch_agent.model.intervals import Intervals
from tests.helpers import examples

LAST = 24
times = st.integers(0, LAST)
pairs = st.tuples(times, times)


def pieces(covered: set[int]) -> list[range]:
    """The maximal runs of a set of integers."""
    runs: list[range] = []
    for at in sorted(covered):
        if runs and at == runs[-1].stop:
            runs[-1] = range(runs[-1].start, at + 1)
        else:
            runs.append(range(at, at + 1))
    return runs


def filled(intervals: list[tuple[int, int]]) -> tuple[Intervals, set[int]]:
    union, covered = Intervals(), set[int]()
    for start, end in intervals:
        union.add(start, end)
        covered.update(range(start, end))
    return union, covered


@examples(150)
@given(st.lists(pairs, max_size=30))
def test_add(intervals: list[tuple[int, int]]) -> None:
    """``add`` returns exactly the length that nothing before had covered; an empty or backward interval adds nothing."""
    union, covered = Intervals(), set[int]()
    for start, end in intervals:
        new = set(range(start, end)) - covered
        assert union.add(start, end) == len(new)
        covered |= new


@examples(150)
@given(st.lists(pairs, max_size=30), pairs)
def test_measure(intervals: list[tuple[int, int]], window: tuple[int, int]) -> None:
    """``measure`` is the covered length within the window, and never more than the window."""
    union, covered = filled(intervals)
    assert union.measure(*window) == len(covered & set(range(*window)))


@examples(150)
@given(st.lists(pairs, max_size=30))
def test_disjoint(intervals: list[tuple[int, int]]) -> None:
    """What is kept is the sorted maximal pieces: intervals that touch or overlap are one, so memory follows the gaps."""
    union, covered = filled(intervals)
    assert list(zip(union.starts, union.ends, strict=True)) == [(run.start, run.stop) for run in pieces(covered)]


@examples(150)
@given(st.lists(pairs, max_size=20), times, st.lists(pairs, max_size=20), pairs)
def test_forget(
    first: list[tuple[int, int]], before: int, then: list[tuple[int, int]], window: tuple[int, int]
) -> None:
    """``forget`` drops the pieces that ended by then, whole; what reaches beyond stays, and adding goes on as ever."""
    union, covered = filled(first)
    union.forget(before)
    for run in pieces(covered):
        if run.stop <= before:
            covered -= set(run)
    assert all(end > before for end in union.ends)
    assert union.measure(*window) == len(covered & set(range(*window)))
    for start, end in then:
        new = set(range(start, end)) - covered
        assert union.add(start, end) == len(new)
        covered |= new
    assert union.measure(*window) == len(covered & set(range(*window)))


@examples(150)
@given(st.lists(pairs, max_size=20), times)
def test_forget_keeps_what_is_to_come(intervals: list[tuple[int, int]], before: int) -> None:
    """After ``forget(t)`` every window from ``t`` on measures what it measured before."""
    union, _ = filled(intervals)
    expected = [union.measure(before, end) for end in range(LAST + 1)]
    union.forget(before)
    assert [union.measure(before, end) for end in range(LAST + 1)] == expected


def test_large_times() -> None:
    """Nanoseconds since boot, far above 2**53, are added without loss."""
    union, base = Intervals(), 1 << 60
    assert union.add(base, base + 3) == 3
    assert union.add(base + 1, base + 4) == 1
    assert union.measure(base + 2, base + 100) == 2


@examples(150)
@given(st.lists(pairs, max_size=20), st.lists(pairs, max_size=20))
def test_minus(intervals: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    """``minus`` leaves exactly what is in the one union and not in the other, and changes neither."""
    (union, covered), (other, away) = filled(intervals), filled(others)
    left = union.minus(other)
    assert [range(*piece) for piece in zip(left.starts, left.ends, strict=True)] == pieces(covered - away)
    assert [range(*piece) for piece in zip(union.starts, union.ends, strict=True)] == pieces(covered)
    assert [range(*piece) for piece in zip(other.starts, other.ends, strict=True)] == pieces(away)
