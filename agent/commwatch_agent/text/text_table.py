"""Lines and tables of a terminal, as texts of rich. Pure.

Import it only where a command draws: rich takes about 40 ms of CPU time to import. ``rich.table`` is not used, because it lays out
1,000 rows of 12 columns in 0.8 s (this module: 0.05 s), and cannot drop columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from rich.theme import Theme

NOT_KNOWN = "–"
_GAP = "  "
#: Our signs in ASCII, for terminals without Unicode; other signs become a question mark.
_ASCII = str.maketrans({"█": "#", "·": ".", "│": "|", "…": "~", "–": "-", "µ": "u"})
#: Resolves the names of our styles; it prints nothing.
_CONSOLE = Console(theme=Theme({"good": "green", "warn": "yellow", "bad": "bold red", "title": "reverse"}))


class Column(NamedTuple):
    """A column of a table."""

    head: str
    right: bool = True
    #: Where space is short, the column with the highest number is dropped first; 0: never.
    drop: int = 0
    #: Least width in cells that it may be cut to; 0: it is shown whole or dropped.
    least: int = 0


class TableRow(NamedTuple):
    """A row of a table: clean texts, and the name of their style."""

    texts: Sequence[str]
    style: str = ""


def wrap(text: str, cells: int, most: int | None = None, style: str = "") -> list[Text]:
    """Break clean text between words; cut what exceeds ``most`` lines."""
    # "ignore", as rich would count the blank behind a wide last word, and cut the word.
    lines = list(Text(" ".join(text.split()), style, overflow="ignore").wrap(_CONSOLE, cells))
    for line in lines:
        line.rstrip()
    if most is not None and len(lines) > most:
        lines[most - 1 :] = [Text(" ", style).join(lines[most - 1 :])]
    for line in lines:
        line.truncate(max(1, cells), overflow="ellipsis")
    return lines


def table(columns: Sequence[Column], rows: Sequence[TableRow], cells: int) -> list[Text]:
    """Return head and rows, each at most ``cells`` wide, without columns that have no known value."""
    head = TableRow([column.head for column in columns], "dim")
    wanted, least, kept = _kept(columns, rows, cells)
    widths = {i: wanted[i] for i in kept}
    while _taken(widths.values()) > cells:
        widest = max((i for i in kept if widths[i] > least[i]), key=lambda i: widths[i] - least[i], default=None)
        if widest is None:
            break
        widths[widest] -= 1
    lines = [_line(columns, row, widths) for row in (head, *rows)]
    for line in lines:
        line.truncate(cells, overflow="ellipsis")
    return lines


def left_out(columns: Sequence[Column], rows: Sequence[TableRow], cells: int) -> list[Text]:
    """Return a line that names the columns for which ``table`` has no room; none if there are none."""
    wanted, _, kept = _kept(columns, rows, cells)
    names = ", ".join(columns[i].head for i in wanted if i not in kept)
    return wrap(f"not shown in {cells} columns: {names}", cells, style="dim") if names else []


def _kept(
    columns: Sequence[Column], rows: Sequence[TableRow], cells: int
) -> tuple[dict[int, int], dict[int, int], list[int]]:
    """Return of the columns with a known value the full and the least widths, and which of them fit."""
    known = [i for i in range(len(columns)) if not rows or any(row.texts[i] not in ("", NOT_KNOWN) for row in rows)]
    wanted = {i: max(cell_len(text) for text in (columns[i].head, *(row.texts[i] for row in rows))) for i in known}
    least, kept = {i: min(wanted[i], columns[i].least or wanted[i]) for i in known}, list(known)
    while _taken(least[i] for i in kept) > cells:
        last = max(kept, key=lambda i: columns[i].drop)
        if not columns[last].drop:
            break
        kept.remove(last)
    return wanted, least, kept


def _taken(widths: Iterable[int]) -> int:
    found = list(widths)
    return sum(found) + len(_GAP) * (len(found) - 1)


def _line(columns: Sequence[Column], row: TableRow, widths: dict[int, int]) -> Text:
    texts = []
    for i, cells in widths.items():
        text = Text(row.texts[i], overflow="ellipsis")
        text.align("right" if columns[i].right else "left", cells)
        texts.append(text.plain)
    return Text(_GAP.join(texts), row.style)


def coloured(lines: Iterable[Text]) -> list[str]:
    """Return the lines with their styles as escape sequences, whatever the environment says about colours."""
    parts = Text("\n").join(lines).render(_CONSOLE)
    return "".join(style.render(text) if style else text for text, style, _ in parts).split("\n")


def ascii_signs(text: str) -> str:
    """Replace our own signs by ASCII."""
    return text.translate(_ASCII)
