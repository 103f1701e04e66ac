"""The list of ``make mutations``, which takes too long to run with the other tests."""

from __future__ import annotations

import pytest

from tests.mutations import MUTATIONS, TREE, Mutation, place_of


@pytest.mark.parametrize("mutation", MUTATIONS, ids=range(1, len(MUTATIONS) + 1))
def test_line_exists(mutation: Mutation) -> None:
    """Each mutation changes a line that is there once, into another one, and names tests that exist."""
    assert place_of(mutation).is_file()
    assert mutation.after != mutation.before
    assert (TREE / "tests" / mutation.tests).exists()
