"""Which known name a misspelt one may be. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

#: Least likeness (0 to 1) of names that begin alike, and of others: people seldom miss the first letter, and short words have letters in common.
_ALIKE, _ALIKE_INSIDE = 0.65, 0.8


def nearest(given: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the known name that looks most like a given one; empty: none does.

    Args:
        prefix: what names may begin with, and does not count.

    >>> nearest("--prot", ["--port", "--top"], "--")
    '--port'
    """
    by_word = {name.removeprefix(prefix): name for name in known}
    word = given.removeprefix(prefix)
    alike = [each for each in by_word if each[:1] == word[:1]]
    found = get_close_matches(word, alike, 1, _ALIKE) or get_close_matches(word, by_word, 1, _ALIKE_INSIDE)
    return by_word[found[0]] if found else ""
