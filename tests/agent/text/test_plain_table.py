"""Plain tables fit a width, and lose nothing: what does not fit beside the first columns follows below them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from commwatch_agent.text.plain_table import columns, folded, paragraph
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
        "bucket 1: blocks.3.attn.in_proj,",
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


@examples(200)
@given(st.lists(st.text("ab数 ", max_size=200), max_size=4), st.integers(40, 140))
def test_folded(texts: list[str], cells: int) -> None:
    """A line that is too wide is broken at blanks: each word is there, in its order, and only a long word makes a line wider."""
    lines = list(folded(texts, cells))
    assert " ".join(lines).split() == " ".join(texts).split()
    assert all(width(line) <= cells or len(line.split()) == 1 for line in lines if line.strip())


HEADS = ("what", "first text", "second text", "ranks", "p99", "busbw")


@examples(200)
@given(
    st.lists(st.lists(st.text("ab 1", max_size=40), min_size=3, max_size=3), min_size=1, max_size=4),
    st.integers(60, 140),
)
def test_rows_remain_whole(texts: list[list[str]], cells: int) -> None:
    """Each column is there once, or named below; all words of texts are there, though in several lines."""
    rows = [(*(" ".join(text.split()) for text in each), "12", "1.5 ms", "900 MB/s") for each in texts]
    lines = columns(HEADS, rows, 3, cells, optional=("ranks", "p99"))
    assert max(map(width, lines)) <= cells
    shown = " ".join(" ".join(lines).split())
    named = shown.partition("Not shown in")[2]
    assert all(("12" in line) == ("ranks" not in named) for line in lines if "900 MB/s" in line) or "12" in str(texts)
    assert sum("900 MB/s" in line for line in lines) == len(rows)
    signs = "".join(text for row in rows for text in row[:3]).replace(" ", "")
    assert all(shown.count(sign) >= signs.count(sign) for sign in "ab")


def test_least_important_first() -> None:
    """What is left out first is what has no known value, then what matters least; what then has room remains."""
    head, rows = ("group", "p50", "size", "wait"), [("dp" * 12, "1.5 ms", "12 MiB", "–")]
    lines = columns(head, rows, 1, 43, optional=("size", "wait"))
    assert lines[0].split() == ["group", "p50", "size"]
    assert " ".join(lines[-2:]).split() == [
        "Not",
        "shown",
        "in",
        "43",
        "columns:",
        "wait.",
        "44",
        "columns",
        "show",
        "them,",
        "or",
        "`|",
        "less",
        "-S`.",
    ]
