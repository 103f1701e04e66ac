"""Text in the cells of a terminal."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch.core.text_table import Column, Span, clean, coloured, cut, pad, plain, table, width, wrap
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
    """A sign that takes two cells is never cut in half; the rest is filled up."""
    assert (width("数据"), width("é"), width("🚀")) == (4, 1, 2)
    assert [cut("数据并行", cells) for cells in (8, 7, 6, 2, 1, 0)] == ["数据并行", "数据并…", "数据…", "…", "…", ""]
    assert [pad("数据", cells) for cells in (6, 3)] == ["数据  ", "数…"]
    assert pad("12 %", 6, right=True) == "  12 %"


@given(st.text(), st.integers(0, 60))
@examples(200)
def test_cut_and_padded(text: str, cells: int) -> None:
    """Whatever the text, it takes exactly as many cells as it is given."""
    assert width(pad(clean(text), cells)) == cells
    assert all(width(line) <= cells for line in wrap(clean(text), cells, 2))


def test_wrapped() -> None:
    """Lines break between words; what the last one does not hold is cut off."""
    assert wrap("rank 1 has not joined", 10) == ["rank 1 has", "not joined"]
    assert wrap("rank 1 has not joined", 8, most=2) == ["rank 1", "has not…"]
    assert wrap("", 8) == [""]


def test_table_gives_up_columns() -> None:
    """If there is no room, the names get shorter, then the least important columns go; a column without any value is left out."""
    columns = (Column("group", right=False, least=4), Column("op", right=False), Column("p50", drop=1), Column("eff"))
    rows = [
        [Span(text) for text in row]
        for row in (("data_parallel", "all_reduce", "1 ms", "–"), ("tp", "send", "2 ms", "–"))
    ]
    assert plain(table(columns, rows, 40)) == [
        "group          op           p50",
        "data_parallel  all_reduce  1 ms",
        "tp             send        2 ms",
    ]
    assert plain(table(columns, rows, 24))[1] == "data_…  all_reduce  1 ms"
    assert plain(table(columns, rows, 18)) == ["group   op", "data_…  all_reduce", "tp      send"]
    assert [width(line) for line in plain(table(columns, rows, 9))] == [9, 9, 9]


def test_styles() -> None:
    """A style is one escape sequence before the text and one behind; no style is none."""
    assert coloured([(Span("late", "warn"), Span(" rank"))]) == ["\x1b[33mlate\x1b[m rank"]
