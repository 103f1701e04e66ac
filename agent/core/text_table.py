"""Text in terminal cells: cleaned, cut and aligned by display width; tables. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple

#: SGR parameters by style.
_SGR = {"": "", "bold": "1", "dim": "2", "good": "32", "warn": "33", "bad": "1;31", "title": "7"}
#: Our signs in ASCII, for terminals without Unicode; other signs become a question mark.
_ASCII = str.maketrans({"█": "#", "·": ".", "│": "|", "…": "~", "–": "-", "µ": "u"})
#: Letters, digits, punctuation, symbols: they do not move the cursor, change the direction or combine.
_HARMLESS = "LNPS"
_GAP = 2
NOT_KNOWN = "–"


class Span(NamedTuple):
    """Text in one style: a key of ``_SGR``."""

    text: str
    style: str = ""


Line = tuple[Span, ...]


class Column(NamedTuple):
    """A column of a table."""

    head: str
    right: bool = True
    #: Where space is short, the column with the highest number is dropped first; 0: never.
    drop: int = 0
    #: Least width in cells that it may be cut to; 0: it is shown whole or dropped.
    least: int = 0


def clean(text: str) -> str:
    """Return foreign text without what could harm a terminal: escape sequences, direction changes, line ends, combining marks.

    >>> clean("dp\\x1b[2Jgroup\\u202e")
    'dp�[2Jgroup�'
    """
    return "".join(
        char if unicodedata.category(char)[0] in _HARMLESS else " " if char.isspace() and char != "\n" else "�"
        for char in unicodedata.normalize("NFC", text)
    )


def width(text: str) -> int:
    """Return the number of cells that clean text takes."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def _cells(char: str) -> int:
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def cut(text: str, cells: int) -> str:
    """Cut clean text to at most ``cells`` cells; an ellipsis marks the cut."""
    if width(text) <= cells:
        return text
    kept, room = [], cells - 1
    for char in text:
        room -= _cells(char)
        if room < 0:
            break
        kept.append(char)
    return "".join(kept) + "…"[: max(0, cells)]


def pad(text: str, cells: int, right: bool = False) -> str:
    """Cut or pad clean text to exactly ``cells`` cells."""
    text = cut(text, cells)
    space = " " * (cells - width(text))
    return space + text if right else text + space


def wrap(text: str, cells: int, most: int | None = None) -> list[str]:
    """Break clean text between words; cut what exceeds ``most`` lines."""
    lines, words = [""], text.split()
    while words:
        longer = f"{lines[-1]} {words[0]}" if lines[-1] else words[0]
        if width(longer) <= cells or not lines[-1]:
            lines[-1] = longer
            words.pop(0)
        elif most is not None and len(lines) == most:
            lines[-1] = " ".join([lines[-1], *words])
            break
        else:
            lines.append("")
    return [cut(line, cells) for line in lines]


def cut_line(line: Line, cells: int) -> Line:
    """Cut a line to at most ``cells`` cells."""
    spans = []
    for span in line:
        text = cut(span.text, cells)
        cells -= width(text)
        spans.append(Span(text, span.style))
    return tuple(spans)


def pad_line(line: Line, cells: int) -> Line:
    """Cut or pad a line to exactly ``cells`` cells."""
    line = cut_line(line, cells)
    return (*line, Span(" " * (cells - sum(width(span.text) for span in line))))


def table(columns: Sequence[Column], rows: Sequence[Sequence[Span]], cells: int) -> list[Line]:
    """Return head and rows, each at most ``cells`` wide, without columns that have no known value."""
    kept = [i for i in range(len(columns)) if not rows or any(row[i].text not in ("", NOT_KNOWN) for row in rows)]
    wanted = {i: max(width(text) for text in (columns[i].head, *(row[i].text for row in rows))) for i in kept}
    least = {i: min(wanted[i], columns[i].least or wanted[i]) for i in kept}
    while _taken(least[i] for i in kept) > cells:
        last = max(kept, key=lambda i: columns[i].drop)
        if not columns[last].drop:
            break
        kept.remove(last)
    widths = {i: wanted[i] for i in kept}
    while _taken(widths.values()) > cells:
        widest = max((i for i in kept if widths[i] > least[i]), key=lambda i: widths[i] - least[i], default=None)
        if widest is None:
            break
        widths[widest] -= 1
    heads = [Span(column.head, "dim") for column in columns]
    return [cut_line(_row(columns, row, widths), cells) for row in (heads, *rows)]


def _taken(widths: Iterable[int]) -> int:
    found = list(widths)
    return sum(found) + _GAP * max(0, len(found) - 1)


def _row(columns: Sequence[Column], row: Sequence[Span], widths: dict[int, int]) -> Line:
    spans: list[Span] = []
    for i, cells in widths.items():
        if spans:
            spans.append(Span(" " * _GAP))
        spans.append(Span(pad(row[i].text, cells, columns[i].right), row[i].style))
    return tuple(spans)


def plain(lines: Iterable[Line]) -> list[str]:
    """Return the text of the lines, without styles and trailing blanks."""
    return ["".join(span.text for span in line).rstrip() for line in lines]


def coloured(lines: Iterable[Line]) -> list[str]:
    """Return the text of the lines, with styles as escape sequences."""
    return ["".join(_styled(span) for span in line) for line in lines]


def _styled(span: Span) -> str:
    return f"\x1b[{_SGR[span.style]}m{span.text}\x1b[m" if span.style else span.text


def ascii_signs(text: str) -> str:
    """Replace our own signs by ASCII."""
    return text.translate(_ASCII)
