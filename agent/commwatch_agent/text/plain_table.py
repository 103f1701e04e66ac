"""Tables and paragraphs as plain lines that fit a width. Pure.

A table that is too wide continues below itself: its first columns are repeated beside the rest. So no value is left out.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from commwatch_agent.text.terminal_text import width

#: Cells of a line where the terminal's width is not known.
CELLS = 80
_GAP = 2
#: The largest share of a line that the repeated columns take.
_MOST_KEYS = 0.6


def columns(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: int, cells: int = CELLS, *, keys: int | None = None
) -> list[str]:
    """Return head and rows as lines, indented by two cells; long texts are broken.

    Args:
        left: how many columns, from the first on, are aligned to the left; the others are aligned to the right.
        keys: how many columns are repeated where the table continues; ``None``: those on the left.
    """
    keys, room = left if keys is None else keys, cells - _GAP
    natural = [max(width(row[i]) for row in [head, *rows]) for i in range(len(head))]
    if sum(natural) + _GAP * (len(head) - 1) > room and keys:
        while sum(natural[:keys]) + _GAP * keys > _MOST_KEYS * room:
            natural[natural.index(max(natural[:keys]), 0, keys)] -= 1
    used = sum(natural[:keys]) + _GAP * keys
    widths = natural[:keys] + [min(each, room - used) for each in natural[keys:]]
    lines: list[str] = []
    for block in _blocks(widths, keys, room):
        lines += [""] if lines else []
        for row in [head, *rows]:
            lines += _lines([row[i] for i in block], [widths[i] for i in block], [i < left for i in block])
    return lines


def _blocks(widths: list[int], keys: int, room: int) -> Iterator[list[int]]:
    """Yield the columns of each part of a table, the first ``keys`` columns in each."""
    block = list(range(keys))
    for i in range(keys, len(widths)):
        if len(block) > keys and sum(widths[j] for j in [*block, i]) + _GAP * len(block) > room:
            yield block
            block = list(range(keys))
        block.append(i)
    yield block


def _lines(texts: list[str], widths: list[int], lefts: list[bool]) -> Iterator[str]:
    """Yield a row as lines: more than one if a text is wider than its column."""
    parts = [_pieces(text, cells) for text, cells in zip(texts, widths, strict=True)]
    for n in range(max(map(len, parts))):
        line = " " * _GAP
        for pieces, cells, is_left in zip(parts, widths, lefts, strict=True):
            piece = pieces[n] if n < len(pieces) else ""
            padding = " " * (cells - width(piece))
            line += (piece + padding if is_left else padding + piece) + " " * _GAP
        yield line.rstrip()


def _pieces(text: str, cells: int) -> list[str]:
    """Cut a text into pieces of at most ``cells`` cells, at a blank if one is near the end; the second and later ones begin with an ellipsis.

    The ellipsis keeps a part of a foreign name from passing for a line of ours.
    """
    pieces = []
    while width(text) > cells:
        end = len(text)
        while end > 2 and width(text[:end]) > cells:
            end -= 1
        blank = text.rfind(" ", 0, end)
        end = blank if blank > end // 3 else end
        pieces.append(text[:end])
        text = "…" + text[end:].lstrip()
    return [*pieces, text]


def paragraph(text: str, cells: int = CELLS, *, first: str = "", rest: str | None = None) -> list[str]:
    """Return a text of ours in lines of at most ``cells`` cells, broken at blanks; words such as paths remain whole.

    Do not use it for a text with foreign names: a part of a name could begin a line, and pass for one of ours.

    Args:
        first: what the first line begins with.
        rest: what the other lines begin with; ``None``: as many blanks as ``first`` has characters.
    """
    indent = " " * len(first) if rest is None else rest
    found = textwrap.wrap(
        text, cells, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return found or [first.rstrip()]
