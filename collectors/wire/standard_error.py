"""What commwatch prints in a trainer: a line on standard error, which is lost where it cannot be written."""

from __future__ import annotations

import os
import sys

from commwatch.collectors.wire.handlers import raised_by_handler


def say(text: str) -> None:
    """Print a line to standard error, in one write, because the ranks of a node share it. Raises only what a user's signal handler raised.

    Standard error may be closed, on a full disk, or a pipe that no process reads any more.
    """
    stream, original, line = sys.stderr, sys.__stderr__, f"{text}\n"
    if stream is None:  # ``print`` would write to standard output
        return
    try:
        if original is not None and stream is original:
            # Not through its buffer: what cannot be written would remain there, and fail the process at its exit.
            os.write(original.fileno(), line.encode(original.encoding, "backslashreplace"))
        else:
            print(line, end="", file=stream, flush=True)
    except Exception as error:
        if raised_by_handler(error):
            raise
