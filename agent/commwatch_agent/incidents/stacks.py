"""Python stacks as ``py-spy dump`` prints them: what the main thread does. Pure."""

from __future__ import annotations

import re

#: A frame: function, file and line.
_FRAME = re.compile(r"^\s*(?P<function>\S.*?) \((?P<file>[^()]+):(?P<line>\d+)\)$")
_LIBRARIES = ("site-packages", "dist-packages", "/lib/python3", "<frozen ", "/commwatch/probe/")


def main_thread(text: str) -> list[str]:
    """Return the frames of the main thread, the innermost first, as ``load (data/train.py:88)``; of the first thread if none is the main one.

    Args:
        text: as ``py-spy dump`` prints it, the innermost frame of each thread first.
    """
    threads = re.split(r"^Thread ", text, flags=re.MULTILINE)[1:]
    found = [thread for thread in threads if "MainThread" in thread.partition("\n")[0]] or threads[:1]
    return [line.strip() for line in "".join(found).splitlines()[1:] if _FRAME.match(line)]


def place_of(text: str) -> str:
    """Return where the main thread of a stack is, as ``load (train.py:88)``: in the user's code, if there is any; empty: not known."""
    frames = [found for line in main_thread(text) if (found := _FRAME.match(line))]
    of_user = [frame for frame in frames if not any(part in frame["file"] for part in _LIBRARIES)]
    frame = next(iter(of_user or frames), None)
    return "" if frame is None else f"{frame['function']} ({frame['file'].rpartition('/')[2]}:{frame['line']})"
