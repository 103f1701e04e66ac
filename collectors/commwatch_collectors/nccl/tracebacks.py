"""Exceptions at the end of Python's tracebacks, in lines that show no rank: PyTorch marks others with ``[rankN]:``. No I/O, no clock."""

from __future__ import annotations

import re
from typing import NamedTuple

from commwatch_collectors.nccl.beside.form import who

_SUPERSEDES = "During handling of the above exception"
#: A line without any of them begins no traceback; an excerpt may lack the first line.
BEGINS = ("Traceback (", '  File "', _SUPERSEDES)
_BEGIN = re.compile(
    r"(?P<before>[^\n]{0,400}?)(?:Traceback \(most recent call last\)|  File \"[^\"\n]{1,400}\", line \d)", re.ASCII
)
_RANK = re.compile(r"\[rank\d{1,9}\]:", re.ASCII)
#: Lines of a traceback, with those of others among them; tracebacks that are read at a time; characters of an exception.
_MOST_LINES, _MOST_OPEN, _MOST_ERROR = 400, 32, 200
_EXCEPTION = re.compile(
    r"(?:(?:[A-Za-z_]\w{0,60}\.){1,8}[A-Z]\w{0,80}"
    r"|[A-Z]\w{0,80}(?:Error|Exception|Interrupt|Exit|Iteration|Failure|Timeout|Expired))(?:\([\w.]{1,100}\))?(?:: |:?\s*\Z)",
    re.ASCII,
)
_DIGIT = re.compile(r"\d")


class Ended(NamedTuple):
    """A traceback has ended."""

    who: str
    error: str
    #: It came while the one before it was handled.
    supersedes: bool


class Tracebacks:
    """Finds the exceptions in the lines of a log."""

    def __init__(self) -> None:
        #: Text before a traceback that has not ended, with its digits as 0 -> number of lines since then.
        self._open: dict[str, int] = {}
        self._supersedes = False

    def __bool__(self) -> bool:
        """Whether the next line may end a traceback."""
        return bool(self._open)

    def read(self, line: str) -> Ended | None:
        """Return the exception, if this line ends a traceback."""
        if _SUPERSEDES in line:
            self._supersedes = True
        elif (begin := _BEGIN.match(line)) is not None:
            before = _DIGIT.sub("0", begin["before"])
            if not _RANK.search(before) and (before in self._open or len(self._open) < _MOST_OPEN):
                self._open[before] = 0
        else:
            return self._end(line)
        return None

    def _end(self, line: str) -> Ended | None:
        for before in list(self._open):
            rest = line[len(before) :] if not before or _DIGIT.sub("0", line[: len(before)]) == before else ""
            if _EXCEPTION.match(rest):
                del self._open[before]
                supersedes, self._supersedes = self._supersedes, False
                return Ended(who(line), rest.strip()[:_MOST_ERROR], supersedes)
            self._open[before] += 1
            if self._open[before] > _MOST_LINES:
                del self._open[before]
        return None
