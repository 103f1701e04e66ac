"""The sketch of durations against the durations themselves."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_agent.model import sketch
from tests.helpers import examples

#: What the module promises for a quantile.
WITHIN = 0.022
#: 1 ns to a day.
durations = st.lists(st.integers(1, 86_400_000_000_000), min_size=1, max_size=300)
few_values = st.lists(
    st.sampled_from([1, 2, 3, 999, 1000, 1_000_000, 1_000_001, 3_600_000_000_000]), min_size=1, max_size=300
)


def bins_of(values: list[int]) -> dict[int, int]:
    return dict(Counter(sketch.bin_of(value) for value in values))


def nearest_rank(values: list[int], percent: int) -> int:
    """The ``percent`` quantile as nccl-tests has it, in whole numbers: the k-th smallest, k = ceil(percent n / 100)."""
    return sorted(values)[max(1, -(-percent * len(values) // 100)) - 1]


@examples(60)
@given(durations | few_values, st.sampled_from([0, 1, 5, 25, 50, 75, 95, 99, 100]))
def test_quantile(values: list[int], percent: int) -> None:
    """A quantile is within 2.2% of the true one by nearest rank."""
    estimate = sketch.quantile(bins_of(values), percent / 100)
    assert estimate == pytest.approx(nearest_rank(values, percent), rel=WITHIN)


@examples(60)
@given(st.lists(st.tuples(durations | few_values, st.booleans()), max_size=5))
def test_merged(parts: list[tuple[list[int], bool]]) -> None:
    """The sum of sketches, packed or not, is the sketch of all durations."""
    sketches = [
        sketch.Packed(sketch.encode(bins_of(values))) if packed else bins_of(values) for values, packed in parts
    ]
    assert sketch.merged(sketches) == bins_of([value for values, _ in parts for value in values])


@pytest.mark.parametrize("percent", [50, 95, 99])
def test_rank_is_exact(percent: int) -> None:
    """The rank is the true nearest rank for every count up to 2,000: rounding of q x n never picks the next value."""
    low, high = sketch.bin_of(1_000), sketch.bin_of(1_000_000)
    for total in range(1, 2001):
        rank = -(-percent * total // 100)
        for lower, expected in ((rank, 1_000), (rank - 1, 1_000_000)):
            estimate = sketch.quantile({low: lower, high: total - lower}, percent / 100)
            assert estimate == pytest.approx(expected, rel=WITHIN), f"{percent}% of {total}"


@examples(60)
@given(st.integers(1, 86_400_000_000_000))
def test_bin(value: int) -> None:
    """The middle of a value's bin is within 2.2% of the value."""
    assert sketch.value_of(sketch.bin_of(value)) == pytest.approx(value, rel=WITHIN)


@examples(60)
@given(durations, durations)
def test_bins_are_ordered(first: list[int], second: list[int]) -> None:
    """A longer duration never lies in a lower bin."""
    bins = [sketch.bin_of(value) for value in sorted(first + second)]
    assert bins == sorted(bins)


def test_nothing() -> None:
    """Nothing has no quantile, which is not a quantile of zero."""
    assert sketch.quantile({}, 0.5) is None


@pytest.mark.parametrize("value", [0, 1, -5])
def test_no_time_at_all(value: int) -> None:
    """Durations of 1 ns and below share one bin instead of failing."""
    assert sketch.bin_of(value) == sketch.bin_of(1)


@examples(60)
@given(durations, durations)
def test_merge(first: list[int], second: list[int]) -> None:
    """Merging two sketches is the sketch of both lists, and leaves the second as it was."""
    into, other = bins_of(first), bins_of(second)
    sketch.merge(into, other)
    assert into == bins_of(first + second)
    assert other == bins_of(second)


@examples(60)
@given(st.dictionaries(st.integers(0, 2048), st.integers(1, 0xFFFFFFFF), max_size=50))
def test_encode(bins: dict[int, int]) -> None:
    """What is decoded is what was encoded, for every bin of a 64-bit duration and every 32-bit count."""
    assert sketch.decode(sketch.encode(bins)) == bins


def test_largest_duration() -> None:
    """The longest duration a record can hold has a bin that can be stored."""
    number = sketch.bin_of(2**64 - 1)
    assert sketch.decode(sketch.encode({number: 1})) == {number: 1}
