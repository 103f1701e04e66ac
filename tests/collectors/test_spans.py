"""Whole numbers for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_collectors.spans import gaps, missing_ranks, ranks, spans


@pytest.mark.parametrize(
    ("numbers", "written"), [([], ""), ([3], "3"), ([7, 0, 2, 1, 2], "0-2, 7"), ([-1, 0, 1 << 63], f"-1-0, {1 << 63}")]
)
def test_runs(numbers: list[int], written: str) -> None:
    """Numbers are written as runs, whatever their order."""
    assert spans(numbers) == written


@given(st.sets(st.integers(-3, 30)), st.integers(0, 25))
def test_missing_ranks(numbers: set[int], size: int) -> None:
    """The ranks that are missing are those of a set, and are written as other ranks are."""
    missing = set(range(size)) - numbers
    assert [number for run in gaps(numbers, size) for number in run] == sorted(missing)
    assert missing_ranks(numbers, size) == (ranks(missing) if missing else "")


def test_huge_sizes() -> None:
    """A size that was read from a file may be larger than any list."""
    assert missing_ranks([0], 1 << 70) == f"ranks 1-{(1 << 70) - 1}"
