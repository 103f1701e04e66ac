"""The array functions of the intake, each against the plain function that it replaces."""

from __future__ import annotations

from array import array as pieces_of

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from commwatch.wire.events import size_log2
from commwatch_agent.ingest.collective_join import NOT_KNOWN_NS, GroupJoin, Part
from commwatch_agent.ingest.columns import Ints, classes, distinct, sums
from commwatch_agent.ingest.joining import Parts, complete
from commwatch_agent.ingest.tables.bins import bins_of
from commwatch_agent.ingest.unions import unions
from commwatch_agent.model.cells import DURATION_BOUNDS_NS
from commwatch_agent.model.intervals import Intervals, covered
from commwatch_agent.model.sketch import bin_of
from tests.helpers import examples

#: Values around which something changes.
EDGES = sorted(
    {0, *range(300), *DURATION_BOUNDS_NS, *(b + 1 for b in DURATION_BOUNDS_NS), (1 << 62) - 1}
    | {(1 << n) + d for n in range(2, 62) for d in (-1, 0, 1)}
)
times = st.integers(0, 60) | st.integers(0, (1 << 62) - 1)


def array(values: list[int]) -> Ints:
    return np.array(values, np.int64)


def test_bins() -> None:
    """The bin of a duration is that of the sketch, also where a logarithm is a whole number."""
    assert bins_of(array(EDGES)).tolist() == [bin_of(value) for value in EDGES]


def test_classes() -> None:
    """The class of a size is that of the records, also of sizes that a float cannot hold."""
    small = [value for value in EDGES if value <= 1 << 53]
    for values in (EDGES, small):
        assert classes(array(values)).tolist() == [size_log2(value) + 1 for value in values]


def test_sums_beyond_64_bits() -> None:
    """Sums are exact where they exceed 64 bits."""
    values = [(1 << 62) - 1] * 5
    assert sums(array([0, 0, 0, 0, 1]), 2, array(values)).tolist() == [4 * values[0], values[0]]


@given(st.lists(st.integers(0, 1 << 40), min_size=1) | st.lists(st.integers(0, 50), min_size=1))
@examples(50)
def test_distinct(codes: list[int]) -> None:
    """The different codes are sorted, and each code has its place among them, whether they are dense or not."""
    found, which = distinct(array(codes))
    assert found.tolist() == sorted(set(codes))
    assert [found[at] for at in which] == codes


@given(st.lists(st.tuples(st.integers(0, 3), times, times), min_size=1))
@examples(200)
def test_unions(intervals: list[tuple[int, int, int]]) -> None:
    """The pieces of each key are those of a union that takes its intervals one by one."""
    expected = [Intervals() for _ in range(4)]
    found = [Intervals() for _ in range(4)]
    for key, start, end in intervals:
        expected[key].add(start, end)
    pieces = unions(*(array(list(values)) for values in zip(*intervals, strict=True)))
    for key, start, end in zip(*(each.tolist() for each in pieces), strict=True):
        found[key].extend(pieces_of("q", [start]), pieces_of("q", [end]))
    assert [(each.starts, each.ends) for each in found] == [(each.starts, each.ends) for each in expected]


@given(
    st.lists(st.tuples(st.integers(0, 3), times, times)),
    st.lists(st.tuples(st.integers(0, 3), times, times), min_size=1),
)
@examples(200)
def test_measured_unions(intervals: list[tuple[int, int, int]], asked: list[tuple[int, int, int]]) -> None:
    """Of any time, the pieces of a key cover as much as a union that takes its intervals one by one."""
    each = [Intervals() for _ in range(4)]
    for key, start, end in intervals:
        each[key].add(start, end)
    asked = [(key, min(since, until), max(since, until)) for key, since, until in asked]
    pieces = unions(*(array([values[at] for values in intervals]) for at in range(3)))
    found = pieces.measure(*(array(list(values)) for values in zip(*asked, strict=True)))
    assert found.tolist() == [each[key].measure(since, until) for key, since, until in asked]


@given(st.lists(st.lists(st.tuples(times, times), max_size=8), max_size=4), times, times)
@examples(200)
def test_covered(unions_of: list[list[tuple[int, int]]], start: int, end: int) -> None:
    """Several unions cover together what one union of all their intervals covers."""
    parts, together = [Intervals() for _ in unions_of], Intervals()
    for part, intervals in zip(parts, unions_of, strict=True):
        for each in intervals:
            part.add(*each)
            together.add(*each)
    assert covered(parts, start, end) == together.measure(start, end)


# -- joining ------------------------------------------------------------------------------------


def parts_of(*rows: tuple[int, int, int, int]) -> Parts:
    """Parts of one group, as (ring, rank, number, size), all of one time."""
    ring, rank, seq, size = (array(list(values)) for values in zip(*rows, strict=True))
    zeros = np.zeros(len(rows), np.int64)
    return Parts(
        zeros,
        ring,
        rank,
        ring,
        zeros + 1,
        size,
        zeros,
        seq,
        zeros + 10,
        zeros + 20,
        zeros + 10,
        zeros + NOT_KNOWN_NS,
        zeros,
        zeros + NOT_KNOWN_NS,
    )


def joined(parts: Parts, join: GroupJoin, *, repeated: bool = False) -> list[list[int]]:
    """Places of the parts of each complete collective."""
    tables, left = complete(parts, [join], repeated)
    found = [row for table in tables for row in table.tolist()]
    assert sorted(np.flatnonzero(~left).tolist()) == sorted(at for row in found for at in row)
    return found


def test_complete_in_the_order_of_their_last_parts() -> None:
    """Collectives are complete once every rank is there, in the order of their last parts; a rank may still be missing."""
    parts = parts_of((0, 0, 7, 4), (0, 0, 8, 4), (0, 0, 9, 4), (1, 1, 8, 4), (1, 1, 7, 4))
    assert joined(parts, GroupJoin(2)) == [[1, 3], [0, 4]]


def test_left_for_one_by_one() -> None:
    """Ranks that pass different sizes, and collectives that have begun before, are left."""
    join = GroupJoin(2)
    join.add(8, Part(0, 1, 10, 20, 10, None, 4))
    parts = parts_of((0, 0, 7, 4), (0, 0, 8, 4), (0, 0, 9, 4), (1, 1, 7, 5), (1, 1, 8, 4), (1, 1, 9, 4))
    assert joined(parts, join) == [[2, 5]]


def test_two_rings_of_one_rank() -> None:
    """A rank counts once, though it has made two rings."""
    parts = parts_of((0, 0, 7, 4), (1, 1, 7, 4), (2, 0, 7, 4))
    assert joined(parts, GroupJoin(3), repeated=True) == []
