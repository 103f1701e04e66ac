"""Lines that a terminal or an issue tracker has wrapped at its width, joined again. Pure.

Wrapped lines are known by their lengths: no line is longer than the width, and where a message goes on in the next line, the first
had no room for more. A log in which messages with room behind them are followed by other text is not wrapped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import NamedTuple

from commwatch_collectors.nccl.input.prefixes import prefix
from commwatch_collectors.nccl.search import read

#: Widths in characters that one wrapped line is enough for; a wider line is of no terminal.
_USUAL, _WIDEST = (80, 100, 120, 132, 140, 160, 180, 200, 240), 400
_NARROWEST = 40
#: Characters of a log that show its width, lines that one message is wrapped into, and characters of the message.
_SHOWN, _MOST_LINES, _MOST_JOINED = 1 << 18, 64, 8_192
#: Messages that go on for one that does not, in a log that is wrapped at blanks.
_PER_OTHER = 2
#: Characters, without digits, by which a line is known to begin as another one did.
_ALIKE = 20
_HEAD = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,253}:\d{1,10}:\d{1,10}(?: |\Z)")
_MESSAGE = re.compile(
    r"NCCL |\[rank\d|ProcessGroup|(?:Error|Exception|ERROR|error)\b|gloo|UCX|MPI|exitcode|Xid|\A\{\"|\A[EWIF]\d{4} |\A\[[\w.-]{1,64}:\d{1,10}:\d"
)
#: Beginnings of lines that continue no other.
_BEGINS = re.compile(
    r"\s*(?:\[rank\d|\[[EWIF](?:\d{3,8})? |\[ *\d{1,12}\.\d{1,9}\] |srun: |slurmstepd: |[EWIF]\d{4,8} "
    r"|\[?\d{4}-\d\d-\d\d[T ]\d\d:|Traceback \(|File \"|terminate called|what\(\)"
    r"|(?:[A-Za-z_]\w{0,80}\.){0,9}[A-Za-z_]\w{0,80}(?:Error|Exception|Warning|Interrupt)\b|(?<! )[NR]CCL version|(?:HIP|ROCm) version|Hostname  "
    r"|Librccl path|Last error|nccl[A-Z]\w{1,40}: |Exception raised|frame #|[-=#*]{4}|\{\"|(?:INFO|WARNING|ERROR)(?::| \d\d-))"
)
#: A report of PyTorch's watchdog without its end.
_REPORTS = "Watchdog caught"
_CUT = re.compile(rf"{_REPORTS} (?!.{{0,2000}}milliseconds)")
#: A bracket of a warning that closes in the next line.
_OPEN, _CLOSES = re.compile(r"NCCL WARN .{0,400}\([^()]{0,200}\Z"), re.compile(r"[^()]{0,200}\)")
_WITHOUT_DIGITS = dict.fromkeys(map(ord, "0123456789"))


class _Width(NamedTuple):
    """How lines are wrapped."""

    characters: int
    #: Between words; otherwise anywhere.
    at_blanks: bool

    def glue(self, line: str, following: str) -> str | None:
        """Return what was between two lines if the first is full, else ``None``."""
        if self.at_blanks:
            return " " if len(line) + 1 + _word(following) > self.characters else None
        missing = self.characters - len(line)
        return {0: "", 1: " "}.get(missing)  # a blank at the end is often lost


def unwrapped(texts: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield texts of lines; a message that was wrapped is one line, and the lines that it took are empty."""
    shown: list[tuple[int, str]] = []
    rest, size = iter(texts), 0
    for number, text in rest:
        shown.append((number, text))
        size += len(text)
        if size > _SHOWN:
            break
    width = _width([line.rstrip("\r") for _, text in shown for line in text.split("\n")])
    return _joined(chain(shown, rest), width)


def _joined(texts: Iterable[tuple[int, str]], width: _Width | None) -> Iterator[tuple[int, str]]:
    open_: list[tuple[int, str]] = []
    for first, text in texts:
        if width is None and not open_ and _REPORTS not in text:
            yield first, text
            continue
        for number, line in enumerate(text.split("\n"), first):
            rest = _rest([part for _, part in open_], line.rstrip("\r"), width) if open_ else None
            if rest is not None:
                open_.append((number, rest))
                continue
            yield from _one(open_, width)
            open_ = []
            if width is not None or (len(line) <= _WIDEST and _CUT.search(line) is not None):
                open_.append((number, line.rstrip("\r")))
            else:
                yield number, line
    yield from _one(open_, width)


def _rest(parts: list[str], line: str, width: _Width | None) -> str | None:
    """Return what ``line`` adds to the message of which ``parts`` are the lines so far; ``None`` if it does not continue it."""
    if len(parts) >= _MOST_LINES or sum(map(len, parts)) > _MOST_JOINED:
        return None
    if _CUT.search("".join(parts)) is None:
        goes_on = width is not None and width.glue(parts[-1], line) is not None and not _begins(line, parts[0])
        return line if goes_on else None
    end, kind, _ = prefix(line[:600])  # it may have got the same prefix as the first line, after it was wrapped
    before, same = line[:end], parts[0][:end]
    if before.strip() and (before == same or (kind == "other" and _shape(before) == _shape(same))):
        line = line[end:]
    return None if _begins(line, parts[0]) else line


def _one(parts: list[tuple[int, str]], width: _Width | None) -> Iterator[tuple[int, str]]:
    """Yield a message as one line."""
    if len(parts) < 2:
        yield from parts
        return
    lines = [line for _, line in parts]
    glued = lines[0]
    for before, line in pairwise(lines):
        glued += ("" if width is None else width.glue(before, line) or "") + line
    # Whether it was cut within a word may show only in what it says.
    whole = max((glued, "".join(lines), " ".join(lines)), key=_said)
    yield parts[0][0], whole
    yield from ((number, "") for number, _ in parts[1:])


def _width(lines: list[str]) -> _Width | None:
    """Return how lines are wrapped; ``None`` if they are not, or do not show it."""
    longest = max(map(len, lines), default=0)
    if not _NARROWEST <= longest <= _WIDEST:
        return None
    full, whole, others, message = dict[str, tuple[str, str]](), set[str](), 0, ""
    for line, following in pairwise(lines):
        message = message or (line if _is_message(line) else "")
        goes_on = bool(message) and not _begins(following, message)
        if goes_on and len(line) + 1 + _word(following) > longest:
            shape = _shape(line)
            if shape not in full or len(line) < len(full[shape][0]):
                full[shape] = line, following
            continue
        if message and not goes_on and len(line) == longest:
            whole.add(_shape(line))
        others += goes_on and message is line
        message = ""
    return _of_pairs(list(full.values()), len(whole), others, longest) if full else None


def _of_pairs(full: list[tuple[str, str]], whole: int, others: int, longest: int) -> _Width | None:
    """Return the width that lines with no room for the next word show.

    Args:
        full: those lines, each with the next.
        whole: number of messages that are as long as the longest line, and end there.
        others: number of messages that were followed by other text, with room behind them.
    """
    room = min(len(line) + 1 + _word(following) for line, following in full)
    usual = next((width for width in _USUAL if longest <= width < room), None)
    cut = sum(len(line) == longest for line, _ in full)
    is_even = cut > whole and all(len(line) >= longest - 1 for line, _ in full)
    if is_even and (usual == longest or (cut > 1 and usual is None)):
        return _Width(longest, False)
    if len(full) > 1:
        return _Width(longest, True) if others * _PER_OTHER <= len(full) else None
    line, following = full[0]
    is_sentence = line[-1:] in ".!?" and following[:1].isupper()
    if usual is not None and not others and not is_sentence:
        return _Width(usual, len(line) < usual)
    said, said_apart = _said(line + following), _said(f"{line} {following}")
    is_more = max(said, said_apart) > _said(line) + _said(following)
    if len(line) == longest and (is_more or (_OPEN.search(line) and _CLOSES.match(following))):
        return _Width(longest, said_apart > said)
    return None


def _said(text: str) -> int:
    """Return the number of values in the facts of a text."""
    return sum(value not in (None, "") for fact in read(text) for value in fact)


def _shape(line: str) -> str:
    return line.translate(_WITHOUT_DIGITS)


def _word(line: str) -> int:
    """Return the length of the first word."""
    return len(line.split(" ", 1)[0])


def _is_message(line: str) -> bool:
    return _MESSAGE.search(line) is not None or _HEAD.match(line, prefix(line[:600])[0]) is not None


def _begins(line: str, message: str) -> bool:
    """Return whether ``line`` begins a message of its own, and does not continue ``message``."""
    if not line.strip() or " NCCL INFO " in line or _shape(line[:_ALIKE]) == _shape(message[:_ALIKE]):
        return True
    if message.startswith('{"'):  # a record may be cut anywhere
        return line.startswith('{"')
    end, kind, tag = prefix(line[:600])
    if kind not in ("none", "other") or _HEAD.match(line, end) or _BEGINS.match(line) or _BEGINS.match(line, end):
        return True
    return kind == "other" and (kind, tag) == prefix(message[:600])[1:]
