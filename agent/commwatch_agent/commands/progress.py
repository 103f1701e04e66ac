"""Output of ``commwatch run`` on standard error: remarks, and a status line at the bottom of the terminal."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import sys
import time
from pathlib import Path

from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.history.opening import StoreError
from commwatch_agent.ingest.step_accounting import comm_share, step_number
from commwatch_agent.text import units
from commwatch_agent.text.terminal_text import terminal


def say(text: str, end: str = "\n", drawn: bool = False) -> None:
    """Print to standard error, which may be closed; ``drawn`` keeps escape sequences in ``text``."""
    try:
        print(text, end=end, file=terminal(sys.stderr) if drawn else sys.stderr, flush=True)
    except (OSError, ValueError):
        # Python would write the buffered text again at exit, fail, and replace the job's exit code.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def is_terminal() -> bool:
    """Return whether standard error is a terminal that can be drawn on."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _size() -> os.terminal_size:
    """Return columns and rows of the terminal behind standard error; if it does not know them, those that ``COLUMNS`` and ``LINES`` give, or 80 and 24."""
    with contextlib.suppress(OSError, ValueError):
        size = os.get_terminal_size(sys.stderr.fileno())
        if min(size) > 0:
            return size
    return shutil.get_terminal_size()


class Progress:
    """A status line at the bottom of the terminal; the job's output scrolls above it.

    Args:
        run: what ``commwatch run`` has named.
    """

    def __init__(self, history: Path, run: str) -> None:
        self._path, self._run = history, run
        self._rows = 0

    def show(self) -> None:
        """Draw the line from the history's steps of the last 10 s."""
        try:
            agent = QueryService(self._path)
            names = agent.watched(self._run)
            now = int(agent.now_s(names[-1], time.time()) * 1e9) if names else 0
            steps = agent.steps(now - 10_000_000_000, now, names[-1], None, 200) if names else []
        except (StoreError, sqlite3.Error):
            return
        if not steps and not self._rows:
            return
        if steps:
            each = units.seconds(sum(step.duration_s for step in steps) / len(steps))
            last = step_number([step.seq for step in steps])
            text = f"commwatch: step {last}, {each} each, communication {units.percent(comm_share(steps))}"
        else:
            text = "commwatch: no step has ended in the last 10 s"
        columns, rows = _size()
        room = ""
        if rows != self._rows:  # first call or resize: scroll up by one line, and exclude the last line from scrolling
            self._rows, room = rows, f"\n\x1b7\x1b[1;{rows - 1}r\x1b8\x1b[1A"
        say(f"{room}\x1b7\x1b[{rows};1H\x1b[2K{text[: columns - 1]}\x1b8", end="", drawn=True)

    def clear(self) -> None:
        """Remove the line, and let the whole terminal scroll again."""
        if self._rows:
            say(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[2K\x1b8", end="", drawn=True)
