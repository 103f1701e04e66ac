"""Foreign text made safe for a terminal."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_agent.text.terminal_text import clean, cut, width
from tests.helpers import examples


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("default_pg", "default_pg"),
        ("dp\x1b[2Jx", "dp�[2Jx"),
        ("a\u202eb\u2066c", "a�b�c"),
        ("a\nb\tc\u2028d", "a�b c d"),
        ("e\u0301 e\u0301\u0302\u0303", "é é��"),
        ("\x9b31m\x07\ud800", "�31m��"),
        ("数据并行", "数据并行"),
    ],
)
def test_names_are_harmless(name: str, shown: str) -> None:
    """What moves the cursor, turns the direction or stacks accents is replaced; letters of all scripts stay."""
    assert clean(name) == shown


@given(st.text())
@examples(200)
def test_nothing_harmful_is_left(text: str) -> None:
    """No control, format or combining character is left of any text, and cleaning it again changes nothing."""
    cleaned = clean(text)
    assert all(unicodedata.category(char)[0] not in "CM" and char not in "\u2028\u2029" for char in cleaned)
    assert clean(cleaned) == cleaned


def test_wide_signs_take_two() -> None:
    """A sign that takes two cells is never cut in half."""
    assert (width("数据"), width("é"), width("🚀")) == (4, 1, 2)
    assert [cut("数据并行", cells) for cells in (8, 7, 6, 2, 1, 0)] == ["数据并行", "数据并…", "数据…", "…", "…", ""]


@given(st.text(), st.integers(0, 60))
@examples(200)
def test_cut(text: str, cells: int) -> None:
    """Whatever the text, it takes at most as many cells as it is given."""
    assert width(cut(clean(text), cells)) <= cells
