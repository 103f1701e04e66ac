"""Safe output to terminals and logs: foreign text can neither control the terminal nor pass for a line of commwatch.

``clean`` and ``cut`` make single names safe. Beyond that there are two layers. All output of the command line passes ``Harmless``, so
that no command can forget it; it replaces characters that move the cursor, set titles or change the direction. It keeps line ends,
which our output needs; ``line`` and ``lines`` replace those in foreign text.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import unicodedata
from collections.abc import Iterable
from typing import Any, TextIO

#: Most cells of one line; longer lines are cut.
MOST_CELLS = 4_000
#: C0 except tab and line feed, DEL, C1; other line ends; zero-width and direction characters; lone surrogates.
_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0001\U000e0020-\U000e007f]"
)
#: Letters, digits, punctuation, symbols: they do not move the cursor, change the direction or combine.
_HARMLESS = "LNPS"


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


def line(text: str) -> str:
    """Return foreign text as one clean line of at most ``MOST_CELLS`` cells."""
    return cut(clean(text), MOST_CELLS)


def lines(texts: Iterable[str]) -> str:
    """Join lines that may contain foreign text; line ends inside a line are replaced."""
    return "\n".join(map(line, texts))


def output_cells(stream: TextIO | None = None) -> int:
    """Return how many cells a line may have: ``COLUMNS`` if it is set, else those of the terminal behind a stream, but at least 40.

    Where the stream, by default standard output, is no terminal, a line may be ``MOST_CELLS`` long: what programs and files get has whole tables.
    """
    with contextlib.suppress(ValueError):
        if (wanted := int(os.environ.get("COLUMNS", ""))) > 0:
            return max(40, wanted)
    with contextlib.suppress(OSError, ValueError):
        # Some terminals report a size of 0.
        return max(40, os.get_terminal_size((sys.stdout if stream is None else stream).fileno()).columns or 80)
    return MOST_CELLS


def complain(text: str) -> None:
    """Print an error on standard error, as one line."""
    print(line(f"commwatch: {text}"), file=sys.stderr)


class Harmless:
    """A text stream that replaces harmful characters; other attributes are those of the wrapped stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write ``text`` with U+FFFD for each harmful character; return the number of characters."""
        self._stream.write(_HARMFUL.sub("\ufffd", text))
        return len(text)

    def writelines(self, texts: Iterable[str]) -> None:
        """Write each text with ``write``."""
        for text in texts:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def guard_output() -> None:
    """Wrap stdout and stderr in ``Harmless``, for commands, warnings, argparse and tracebacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, Harmless):
            setattr(sys, name, Harmless(stream))


def terminal(stream: Any) -> TextIO:
    """Return the unwrapped stream, for our own escape sequences; the caller must clean foreign text."""
    behind: TextIO = stream._stream if isinstance(stream, Harmless) else stream
    return behind


class OneLine(logging.Formatter):
    """Formats each log message as one line, whatever it quotes; tracebacks keep their lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the formatted message as one clean line."""
        return line(super().formatMessage(record))
