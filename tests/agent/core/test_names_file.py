"""What a trainer calls its groups, kept within bounds."""

from __future__ import annotations

from commwatch.core.cells import LATEST_KNOWN, MOST_APART, OTHER_ID
from commwatch.core.names_file import Names
from tests.helpers import group_entry


def test_group_announced_again() -> None:
    """Of the groups without totals of their own, the latest names are kept; one that is announced again counts once."""
    names = Names()
    numbers = range(MOST_APART, MOST_APART + LATEST_KNOWN)
    names.learn([group_entry(number) for number in numbers])
    for size in (3, 4, 5):
        names.learn([group_entry(MOST_APART, tuple(range(size)))])
    assert set(names.groups) == {*numbers, OTHER_ID}
    assert names.groups_announced == LATEST_KNOWN
