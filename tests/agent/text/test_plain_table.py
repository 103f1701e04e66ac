"""Plain tables fit a width, and lose nothing: what does not fit beside the first columns follows below them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from commwatch_agent.text.plain_table import columns, paragraph
from commwatch_agent.text.terminal_text import width
from tests.helpers import examples

HEAD = ("group", "op", "count", "p50", "busbw")
ROWS = [("dp", "all_reduce", "10", "1.5 ms", "12 GB/s"), ("tp", "all_gather", "200", "15 µs", "900 MB/s")]


def test_fits() -> None:
    """A table that fits is one block: the first columns to the left, numbers to the right."""
    assert columns(HEAD, ROWS, left=2) == [
        "  group  op          count     p50     busbw",
        "  dp     all_reduce     10  1.5 ms   12 GB/s",
        "  tp     all_gather    200   15 µs  900 MB/s",
    ]


def test_continues_below() -> None:
    """One that is too wide continues below, with its first columns again."""
    assert columns(HEAD, ROWS, left=2, cells=36) == [
        "  group  op          count     p50",
        "  dp     all_reduce     10  1.5 ms",
        "  tp     all_gather    200   15 µs",
        "",
        "  group  op             busbw",
        "  dp     all_reduce   12 GB/s",
        "  tp     all_gather  900 MB/s",
    ]


def test_broken_at_a_blank() -> None:
    """A list of names is broken between two of them, if that leaves a third of the column."""
    names = "bucket 1: blocks.3.attn.in_proj, blocks.3.attn.out_proj"
    lines = columns(("part", "n"), [(names, "1")], 1, 50, keys=1)
    assert [line.split("  ")[1] for line in lines[1:]] == [
        "bucket 1:",
        "…blocks.3.attn.in_proj,",
        "…blocks.3.attn.out_proj",
    ]


def test_long_names_are_broken() -> None:
    """A name that leaves no room for figures takes several lines, and all of it is there."""
    name = "data_parallel_group_of_the_first_stage" * 3
    lines = columns(HEAD, [(name, *ROWS[0][1:])], left=2, cells=60)
    assert max(map(width, lines)) <= 60
    assert "".join(line.split()[0].removeprefix("…") for line in lines[1:]) == name


@examples(200)
@given(
    st.lists(st.lists(st.text("abc 数_", max_size=120), min_size=4, max_size=4), min_size=1, max_size=4),
    st.integers(40, 140),
    st.integers(1, 2),
)
def test_never_wider(rows: list[list[str]], cells: int, left: int) -> None:
    """Whatever is in the cells, no line is wider than asked for, and no sign but blanks is lost."""
    rows = [[" ".join(text.split()) for text in row] for row in rows]
    lines = columns(("a", "b", "c", "d"), rows, left, cells)
    assert max(map(width, lines)) <= cells
    wanted = sorted("".join(text for row in rows for text in row[left:]).replace(" ", ""))
    shown = sorted("".join(lines).replace(" ", ""))
    assert not [sign for sign in set(wanted) if wanted.count(sign) > shown.count(sign)]


def test_paragraph() -> None:
    """Words are not broken: a path can be copied, though it makes its line longer."""
    path = "/var/lib/" + "x" * 90
    assert paragraph(f"kept as {path} for you", first="  * ", rest="    ") == [
        "  * kept as",
        f"    {path}",
        "    for you",
    ]
    assert paragraph("", first="  history  ") == ["  history"]
