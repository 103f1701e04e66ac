"""The order of sequence numbers is that in which they are given, also where they go on at 0."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from commwatch.wire.numbers import HALF, NUMBERS, ahead, hull, in_order, latest, ranks_in, ranks_text
from tests.helpers import examples

numbers = st.integers(0, NUMBERS - 1)
begins = numbers | st.integers(NUMBERS - 50, NUMBERS - 1)


def test_around_zero() -> None:
    """A number after the greatest one is ahead of it by one, and one at the other side of the circle is not behind."""
    assert (ahead(0, NUMBERS - 1), ahead(NUMBERS - 1, 0), ahead(7, 7)) == (1, -1, 0)
    assert (ahead(HALF - 1, 0), ahead(HALF, 0)) == (HALF - 1, -HALF)
    assert in_order([2, NUMBERS - 2, 0, NUMBERS - 1]) == [NUMBERS - 2, NUMBERS - 1, 0, 2]
    assert (latest([1, NUMBERS - 1]), latest([5]), in_order([])) == (1, 5, [])
    assert hull([(NUMBERS - 4, NUMBERS - 2), (0, 3)]) == (NUMBERS - 4, 3)
    assert hull([(5, 9), (3, 7)]) == (3, 9)
    assert hull([(0, HALF), (HALF, 5)]) == (0, NUMBERS - 1)


@given(begins, st.lists(st.integers(0, 1 << 20), min_size=1))
@examples(100)
def test_any_begin(begin: int, given_after: list[int]) -> None:
    """Wherever numbers begin, they are in the order in which they are given."""
    found = in_order([(begin + each) % NUMBERS for each in given_after])
    assert found == [(begin + each) % NUMBERS for each in sorted(given_after)]
    assert latest(found) == found[-1]
    assert all(ahead(found[-1], each) == max(given_after) - each_after for each, each_after in zip(found, sorted(given_after), strict=True))  # fmt: skip


@given(st.integers(0, 1 << 62), st.integers(0, 1 << 62))
@examples(50)
def test_wider_numbers(number: int, other: int) -> None:
    """Wider numbers compare as usual, those of PyTorch's Flight Recorder for example, if they are not too far apart."""
    if abs(number - other) < HALF:
        assert ahead(number, other) == number - other


@given(begins, st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20)), min_size=1), numbers)
@examples(100)
def test_hull(begin: int, given_after: list[tuple[int, int]], other: int) -> None:
    """A range around others begins at the first and ends at the last of their numbers; around any, it has all of them."""
    ranges = [((begin + first) % NUMBERS, (begin + first + more) % NUMBERS) for first, more in given_after]
    first, last = min(first for first, _ in given_after), max(first + more for first, more in given_after)
    assert hull(ranges) == ((begin + first) % NUMBERS, (begin + last) % NUMBERS)
    low, high = hull([*ranges, (other, other)])
    for number in (other, *(each for both in ranges for each in both)):
        assert (number - low) % NUMBERS <= (high - low) % NUMBERS


@given(
    st.sets(st.integers(0, 9000), min_size=1, max_size=60)
    | st.builds(range, st.integers(0, 9), st.integers(10, 999), st.integers(1, 9))
)
@examples(200)
def test_ranks(ranks: set[int] | range) -> None:
    """Ranks come back from their text, which is short for ranks at equal distances."""
    text = ranks_text(ranks)
    assert ranks_in(text) == sorted(ranks)
    assert isinstance(ranks, set) or len(text) < 16


def test_no_ranks() -> None:
    """What is no text of ranks, was cut short or would take much memory has none."""
    assert [ranks_in(text) for text in ("", "1-", "3-1", "a", "1-999999999", "0-9/0", "0-3000,0-3000")] == [None] * 7
