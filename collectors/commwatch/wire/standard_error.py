"""What commwatch prints in a trainer: a line on standard error, which is lost where it cannot be written."""

from __future__ import annotations

import io
import sys
from typing import Any

from commwatch.wire import descriptor
from commwatch.wire.handlers import raised_by_handler


def say(text: str) -> None:
    """Print a line to standard error, in one write, because the ranks of a node share it. Raises only what a user's signal handler raised.

    Standard error may be closed, on a full disk, or a pipe that is full or that no process reads any more. Where a program has put another stream
    in its place, the line goes there.
    """
    stream, original, line = sys.stderr, sys.__stderr__, f"{text}\n"
    if stream is None:  # ``print`` would write to standard output
        return
    try:
        number = _number(stream)
        if original is not None and stream is original and number == descriptor.NUMBER:
            # Not through its buffer: what cannot be written would remain there, and fail the process at its exit.
            descriptor.write(line.encode(original.encoding, "backslashreplace"))
        elif _may_print(stream, number, len(line)):
            print(line, end="", file=stream, flush=True)
    except Exception as error:
        if raised_by_handler(error):
            raise


def _number(stream: Any) -> int | None:
    """Return the descriptor of a stream; ``None`` if it has none, or does not tell."""
    try:
        number = stream.fileno()
    except (AttributeError, OSError, ValueError) as error:
        if raised_by_handler(error):
            raise
        return None
    return number if isinstance(number, int) else None


class _Seen:
    """The latest stream that is not Python's own, and the open file behind it when it was first seen.

    Its number is one that the probe has not opened, either: a program may close it without the stream, and open another file.
    """

    stream_id = 0
    file: descriptor.OpenFile | None = None

    @classmethod
    def has_its_file(cls, stream: Any, number: int) -> bool:
        """Return whether a stream's descriptor has the open file that it had when the stream was first seen."""
        now = descriptor.OpenFile.of(number)
        if cls.stream_id != id(stream):
            cls.stream_id, cls.file = id(stream), now
        return now == cls.file


def _may_print(stream: Any, number: int | None, size: int) -> bool:
    """Return whether a line may go to a stream that the program has put in the place of standard error.

    A stream without a descriptor may pass it on to Python's own, and so to descriptor 2; and what cannot be written would remain in the buffer
    of that, to be written once another file has the number.
    """
    if number is None:
        return isinstance(stream, io.StringIO) or sys.__stderr__ is None or descriptor.is_standard_error()
    same = descriptor.is_standard_error() if number == descriptor.NUMBER else _Seen.has_its_file(stream, number)
    return same and descriptor.accepts(number, size)


def _see_stream() -> None:
    """Remember the stream that is there as the probe comes."""
    stream = sys.stderr
    number = None if stream is None or stream is sys.__stderr__ else _number(stream)
    if number is not None and number != descriptor.NUMBER:
        try:
            _Seen.has_its_file(stream, number)
        except OSError as error:  # its descriptor is closed
            if raised_by_handler(error):
                raise


_see_stream()
