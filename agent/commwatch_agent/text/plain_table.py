"""Tables and paragraphs as plain lines that fit a width. Pure.

A row of a table remains whole: where it is too wide, its texts are broken into several lines, then columns that matter less are left out, and a
line below names them. Only a table without such columns continues below itself, with its first columns again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from commwatch_agent.text.terminal_text import MOST_CELLS, width

#: Cells of a line where the caller names none.
CELLS = 80
#: Cells of a line of a paragraph where lines may have any length.
_PROSE = 120
_GAP = 2
#: Fewest cells of a column of texts where another column can be left out for it, and where none can.
_LEAST, _LEAST_OF_ALL = 20, 8
#: The largest share of a line that repeated columns take.
_MOST_KEYS = 0.6
#: Texts of a value that is not known.
_UNKNOWN = ("", "–")


def columns(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: int,
    cells: int = CELLS,
    *,
    keys: int | None = None,
    optional: Sequence[str] = (),
) -> list[str]:
    """Return head and rows as lines, indented by two cells; long texts are broken.

    Args:
        left: how many columns, from the first on, are aligned to the left, and may be narrower than their texts; the others are aligned to the right.
        keys: how many columns are repeated if the table has to continue below; ``None``: those on the left.
        optional: heads of the columns that may be left out, the least important first; columns without a known value go before them.
    """
    room, table = cells - _GAP, [[row[i] for row in rows] for i in range(len(head))]
    least = [_narrowest(head[i], table[i], _LEAST if i < left else None) for i in range(len(head))]
    whole, shown = _taken(least) + _GAP, [i for i in range(len(head)) if head[i] not in optional]
    may_go = sorted(map(head.index, optional), key=lambda i: any(text not in _UNKNOWN for text in table[i]))
    for i in reversed(may_go):
        if _taken(least[j] for j in [*shown, i]) <= room:
            shown = sorted([*shown, i])
    least = [_narrowest(head[i], table[i], _LEAST_OF_ALL if i < left else None) for i in range(len(head))]
    if _taken(least[i] for i in shown) > room:
        return _continued(head, rows, left, room, left if keys is None else keys)
    widths = {i: max(map(width, [head[i], *table[i]])) for i in shown}
    while _taken(widths.values()) > room:
        widths[max((i for i in shown if widths[i] > least[i]), key=widths.__getitem__)] -= 1
    lines = list(_block(head, rows, widths, left))
    gone = ", ".join(head[i] for i in range(len(head)) if i not in shown)
    note = f"Not shown in {cells} columns: {gone}. {whole} columns show them, or `| less -S`."
    return [*lines, *(paragraph(note, cells, first="  ") if gone else [])]


def _narrowest(head: str, texts: Iterable[str], least: int | None) -> int:
    """Return the fewest cells of a column: its head is broken only at blanks, and its texts nowhere if ``least`` is ``None``."""
    longest = max(map(width, texts), default=0)
    return max(longest if least is None else min(longest, least), *map(width, head.split()), 0)


def _taken(widths: Iterable[int]) -> int:
    """Return the cells of a row with its gaps."""
    return sum(cells + _GAP for cells in widths) - _GAP


def _continued(head: Sequence[str], rows: Sequence[Sequence[str]], left: int, room: int, keys: int) -> list[str]:
    """Return a table that continues below itself, with its first ``keys`` columns again."""
    natural = [max(width(row[i]) for row in [head, *rows]) for i in range(len(head))]
    while keys and _taken(natural[:keys]) + _GAP > _MOST_KEYS * room:
        natural[natural.index(max(natural[:keys]), 0, keys)] -= 1
    used = sum(natural[:keys]) + _GAP * keys
    widths = natural[:keys] + [min(each, room - used) for each in natural[keys:]]
    lines: list[str] = []
    for block in _blocks(widths, keys, room):
        lines += [""] if lines else []
        lines += _block(head, rows, {i: widths[i] for i in block}, left)
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


def _block(head: Sequence[str], rows: Sequence[Sequence[str]], widths: Mapping[int, int], left: int) -> Iterator[str]:
    """Yield the lines of some columns, by their widths; a row has more than one line if a text is wider than its column."""
    for number, row in enumerate([head, *rows]):
        parts = [[*_pieces(row[i], cells, is_first=number > 0 and i == 0)] for i, cells in widths.items()]
        for n in range(max(map(len, parts))):
            line = " " * _GAP
            for pieces, (i, cells) in zip(parts, widths.items(), strict=True):
                piece = pieces[n] if n < len(pieces) else ""
                padding = " " * (cells - width(piece))
                line += (piece + padding if i < left else padding + piece) + " " * _GAP
            yield line.rstrip()


def _pieces(text: str, cells: int, *, is_first: bool) -> Iterator[str]:
    """Cut a text into pieces of at most ``cells`` cells, at a blank if one is near the end.

    A piece begins with an ellipsis where a word goes on, and each of the first column: a part of a foreign name cannot pass for a row of ours.
    """
    while width(text) > cells:
        end = len(text)
        while end > 2 and width(text[:end]) > cells:
            end -= 1
        blank = text.rfind(" ", 0, end + 1)
        is_whole = blank > end // 3
        end = blank if is_whole else end
        yield text[:end]
        text = ("" if is_whole and not is_first else "…") + text[end:].lstrip()
    yield text


def paragraph(text: str, cells: int = CELLS, *, first: str = "", rest: str | None = None) -> list[str]:
    """Return a text of ours in lines of at most ``cells`` cells, broken at blanks; words such as paths remain whole.

    With foreign names, ``rest`` has to be further to the right than lines of ours begin: a part of a name cannot pass for one then.

    Args:
        first: what the first line begins with.
        rest: what the other lines begin with; ``None``: as many blanks as ``first`` has characters.
    """
    return _wrapped(text, cells if cells < MOST_CELLS else _PROSE, first, " " * len(first) if rest is None else rest)


def folded(texts: Iterable[str], cells: int, deeper: int = 4) -> Iterator[str]:
    """Yield lines of which each is a fact, broken at blanks where they are wider than ``cells``.

    Args:
        deeper: by how many blanks more than a line the rest of it is indented.
    """
    for text in texts:
        if width(text) <= cells:
            yield text
            continue
        begin = " " * (len(text) - len(text.lstrip(" ")))
        yield from _wrapped(text.lstrip(" "), cells, begin, begin + " " * deeper)


def _wrapped(text: str, cells: int, first: str, rest: str) -> list[str]:
    lines, line, begins = [], first, True
    for word in re.sub(r"\s", " ", text).split(" "):
        if not begins and width(line) + 1 + width(word) > cells:
            lines.append(line.rstrip())
            line, begins = rest, True
        line += word if begins else f" {word}"
        begins = begins and not word
    return [*lines, line.rstrip()]
