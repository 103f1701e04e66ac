"""NCCL's own reason in the exceptions of frameworks. No I/O, no clock.

PyTorch writes it after ``Last error:``, in the same line or in the next one; XLA in quotation marks in the same line.
"""

from __future__ import annotations

import re

from commwatch_collectors.nccl.input.prefixes import prefix

#: A line without it announces no reason.
ANNOUNCES = "Last "
_TORCH = "Last error:"
#: The text may have quotation marks itself.
_XLA = re.compile(
    r"Last NCCL (?:warning|error)[\w() ]{0,60}(?:\(may be unrelated\)) '([^\n]{1,1000}?)'(?=[.;:,)\"]|\s*\Z)", re.ASCII
)
#: Lines between the announcement and the text, which other ranks may have written; and announcements that wait at a time.
_MOST_BETWEEN, _MOST_WAITING = 50, 64
#: Text in that place that is PyTorch's, because NCCL gave none.
_NO_REASON = re.compile(r"Exception raised from|frame #|Traceback|terminate called|\[rank\d+\]|[\"')\s]*$")
#: The name of an exception at the begin of a line is no mark of a process.
_EXCEPTION = re.compile(r"(?:Error|Exception)\Z")
_DIGIT = re.compile(r"\d")


class LastErrors:
    """Finds the texts in the lines of a log."""

    def __init__(self) -> None:
        #: Text before an announcement whose reason is not known yet -> number of lines since then.
        self._waiting: dict[str, int] = {}

    def __bool__(self) -> bool:
        """Whether the next line may have a reason."""
        return bool(self._waiting)

    def read(self, line: str) -> tuple[str, str] | None:
        """Return the launcher's mark of the rank and the reason, if this line completes one."""
        before, found, text = line.partition(_TORCH)
        if not found and (of_xla := _XLA.search(line)) is not None:
            return _reason(line[: of_xla.start()], of_xla[1].strip().rstrip("."))
        if found:
            # An exception as one line has its line ends as ``\n``.
            text = text.strip().removeprefix("\\n").partition("\\n")[0].strip()
            if text:
                return _reason(before, text)
            if len(self._waiting) < _MOST_WAITING:
                self._waiting[before] = 0
            return None
        for before in list(self._waiting):
            after = _after(before, line)
            if after is not None and (text := after.strip()):
                del self._waiting[before]
                return _reason(before, text)
            self._waiting[before] += 1
            if self._waiting[before] > _MOST_BETWEEN:
                del self._waiting[before]
        return None


def _after(before: str, line: str) -> str | None:
    """Return ``line`` without its prefix, if that is of the same origin as ``before``, or differs from it in digits only; else ``None``."""
    mark, start = prefix(before)[2], line[: len(before)]
    if prefix(start)[2] == mark and _DIGIT.sub("0", start) == _DIGIT.sub("0", before):
        return line[len(before) :]
    length, _, other = prefix(line)
    return line[length:] if mark and mark == other else None


def _reason(before: str, text: str) -> tuple[str, str] | None:
    mark = prefix(before)[2]
    return None if _NO_REASON.match(text) else ("" if _EXCEPTION.search(mark) else mark, text)
