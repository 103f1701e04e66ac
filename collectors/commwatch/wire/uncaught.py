"""The exception that ends a process."""

from __future__ import annotations

import sys
from types import TracebackType

from commwatch.wire.handlers import raised_by_handler

#: Most characters of what an exception says.
_MOST_SAYS = 200
#: Parts of the paths of libraries, whose frames do not say where a user's program failed.
_LIBRARIES = ("site-packages", "dist-packages", "/lib/python3", "<frozen ", "/commwatch/probe/")


def uncaught() -> dict[str, str] | None:
    """Return type, words and place of the exception that Python has printed as uncaught; ``None``: there is none.

    At a prompt that may be long ago, so there it is not known.
    """
    kind = getattr(sys, "last_type", None) if not hasattr(sys, "ps1") else None
    if kind is None:
        return None
    return {
        "raised": str(getattr(kind, "__name__", kind)),
        "at": place_of(getattr(sys, "last_traceback", None)),
        "says": _says(getattr(sys, "last_value", None)),
    }


def _says(value: object) -> str:
    """Return the first line of what an exception says, as it was printed; empty: nothing, or it cannot be said."""
    try:
        lines = str("" if value is None else value).split("\n", 1)
    except Exception as error:  # of the exception's own code
        if raised_by_handler(error):
            raise
        return ""
    return lines[0].strip()[:_MOST_SAYS]


def place_of(trace: TracebackType | None) -> str:
    """Return where an exception was raised, as ``load (train.py:88)``: in the user's code, if there is any; empty: not known."""
    place = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if not place or not any(part in code.co_filename for part in _LIBRARIES):
            place = f"{code.co_name} ({code.co_filename.rpartition('/')[2]}:{trace.tb_lineno})"
        trace = trace.tb_next
    return place
