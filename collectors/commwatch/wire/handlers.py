"""Distinguish what a user's signal handler raised from a fault of our own code.

Python runs signal handlers in the main thread, between any two instructions, so also in the middle of our bookkeeping.
An exception that a handler raises there must reach the user's code, as anywhere else.
"""

from __future__ import annotations

import sys
from inspect import CO_VARARGS
from types import FrameType


def raised_by_handler(error: BaseException) -> bool:
    """Return whether a signal handler raised ``error`` while our code ran; every guard of ours re-raises such an error.

    Python calls a handler with the frame that it interrupted, which is also the frame that called it. No other function
    receives its caller's frame. Whether a handler is installed now proves less: many uninstall themselves first.
    ``KeyboardInterrupt`` and ``SystemExit`` are never ours. A handler written in C that raises an ``Exception`` leaves
    no frame, and is not recognised.
    """
    if not isinstance(error, Exception):
        return True
    running: set[FrameType] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        running.add(frame)
        frame = frame.f_back
    entry = error.__traceback__
    while entry is not None:
        # A function that still runs has not let the error out. Also, up to Python 3.12, reading the local variables of
        # a running function keeps them as long as the error: a Work and its tensors among them.
        if entry.tb_frame not in running and _was_given_its_caller(entry.tb_frame):
            return True
        entry = entry.tb_next
    return False


def _was_given_its_caller(frame: FrameType) -> bool:
    code, caller = frame.f_code, frame.f_back
    if caller is None:
        return False
    arguments = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & CO_VARARGS)
    given = [frame.f_locals.get(name) for name in code.co_varnames[:arguments]]
    return any(each is caller for value in given for each in (value if isinstance(value, tuple) else (value,)))
