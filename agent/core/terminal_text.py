"""What a terminal, or a log that somebody reads in one, is shown. Text of others cannot command it, nor pass for a line of ours.

There are two layers. All that the command line writes goes through ``Harmless``, so that no command can forget it: what moves the cursor, sets titles or
turns the direction does not pass. Line ends do, for they are ours as well; so text of many lines is put together by ``lines``, and one line by ``line``.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from commwatch.core.text_table import clean, cut

#: Of one line; what is longer is cut.
MOST_CELLS = 4_000
#: C0 but for tab and line end, DEL, C1; other line ends; what has no width or turns the direction; half surrogate pairs.
_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0001\U000e0020-\U000e007f]"
)


def line(text: str) -> str:
    """One line of text of others, clean and not too long."""
    return cut(clean(text), MOST_CELLS)


def lines(texts: Iterable[str]) -> str:
    """Lines, each of which may have text of others in it; none of that begins another line."""
    return "\n".join(map(line, texts))


def complain(text: str) -> None:
    """Tell on standard error what is wrong, in one line."""
    print(line(f"commwatch: {text}"), file=sys.stderr)


class Harmless:
    """A text stream without what could harm a terminal; all but ``write`` is that of the stream behind it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As the stream's, with U+FFFD for each harmful character. Returns the number of characters taken."""
        self._stream.write(_HARMFUL.sub("\ufffd", text))
        return len(text)

    def writelines(self, texts: Iterable[str]) -> None:
        """As the stream's."""
        for text in texts:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def guard_output() -> None:
    """From now on what this process prints is harmless, whoever prints it: commands, warnings, argparse, tracebacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, Harmless):
            setattr(sys, name, Harmless(stream))


def terminal(stream: Any) -> TextIO:
    """The stream behind a guarded one, for escape sequences of ours; text of others in between has to be clean already."""
    behind: TextIO = stream._stream if isinstance(stream, Harmless) else stream
    return behind


class OneLine(logging.Formatter):
    """A message of the log is one line, whatever is quoted in it; a traceback after it keeps its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """The message in its form."""
        return line(super().formatMessage(record))
