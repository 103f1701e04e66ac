"""Lines and tables of a terminal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from commwatch_agent.text.terminal_text import clean, width
from commwatch_agent.text.text_table import Column, TableRow, coloured, table, wrap
from tests.helpers import examples


def plain(lines: list[Text]) -> list[str]:
    """The text of the lines, without styles and trailing blanks."""
    return [line.plain.rstrip() for line in lines]


def test_wide_signs_take_two() -> None:
    """A sign that takes two cells is never cut in half; the rest is filled up."""
    rows = [TableRow((name, "12%")) for name in ("数据并行", "数据", "dp")]
    columns = (Column("group", right=False, least=1), Column("wait"))
    assert plain(table(columns, rows, 40)) == ["group     wait", "数据并行   12%", "数据       12%", "dp         12%"]
    assert plain(table(columns, rows, 13)) == ["group    wait", "数据并…   12%", "数据      12%", "dp        12%"]
    assert plain(table(columns, rows, 9)) == ["gr…  wait", "数…   12%", "数…   12%", "dp    12%"]


@given(st.text(), st.integers(6, 60))
@examples(200)
def test_cut_and_padded(text: str, cells: int) -> None:
    """Whatever the text, lines are no longer than the terminal, and the column behind it keeps its place."""
    rows = [TableRow((clean(text), "|")), TableRow(("dp", "|"))]
    lines = table((Column("", right=False, least=1), Column("")), rows, cells)
    assert len({cell_len(line.plain) for line in lines}) == 1
    assert all(cell_len(line.plain) <= cells for line in (*lines, *wrap(clean(text), cells, 2)))


def test_wrapped() -> None:
    """Lines break between words; what the last one does not hold is cut off."""
    assert plain(wrap("rank 1 has not joined", 10)) == ["rank 1 has", "not joined"]
    assert plain(wrap("rank 1 has not joined", 8, most=2)) == ["rank 1", "has not…"]
    assert plain(wrap("rank 1_has_not_joined now", 8)) == ["rank", "1_has_n…", "now"]
    assert plain(wrap("", 8)) == [""]
    assert plain(wrap("rank 0: 数据 并行 word", 17)) == ["rank 0: 数据 并行", "word"]
    assert {str(line.style) for line in wrap("rank 1 has not joined", 8, 2, "bad")} == {"bad"}


def test_table_gives_up_columns() -> None:
    """If there is no room, the names get shorter, then the least important columns go; a column without any value is left out."""
    columns = (Column("group", right=False, least=4), Column("op", right=False), Column("p50", drop=1), Column("eff"))
    rows = [TableRow(row) for row in (("data_parallel", "all_reduce", "1 ms", "–"), ("tp", "send", "2 ms", "–"))]
    assert plain(table(columns, rows, 40)) == [
        "group          op           p50",
        "data_parallel  all_reduce  1 ms",
        "tp             send        2 ms",
    ]
    assert plain(table(columns, rows, 24))[1] == "data_…  all_reduce  1 ms"
    assert plain(table(columns, rows, 18)) == ["group   op", "data_…  all_reduce", "tp      send"]
    assert [width(line) for line in plain(table(columns, rows, 9))] == [9, 9, 9]


def test_styles() -> None:
    """A style is one escape sequence before the text and one behind; no style is none, and brackets are no markup."""
    late = Text.assemble(("late", "warn"), " [red]rank[/] 1 :tada:")
    assert coloured([late, Text("hang", "bad")]) == [
        "\x1b[33mlate\x1b[0m [red]rank[/] 1 :tada:",
        "\x1b[1;31mhang\x1b[0m",
    ]
