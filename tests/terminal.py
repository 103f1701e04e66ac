"""A program in its own terminal: its output, keys, sizes, and how it leaves the terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.helpers import PATIENCE_S, clean_env
from tests.prefork import Commwatch

#: A session of its own, with its standard input for a terminal: so it gets signals for Ctrl-C and changes of size.
IN_A_SESSION = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


class Terminal:
    """A pseudo-terminal with a program in it; a thread reads what it writes."""

    def __init__(self, *arguments: str, cells: int = 80, lines: int = 24, **env: str) -> None:
        self._master, self._slave = pty.openpty()
        self.resize(cells, lines)
        self._settings = termios.tcgetattr(self._slave)
        self.written = ""
        env = clean_env(TERM="xterm", **env)
        self.process = Commwatch(*arguments, env=env, streams=(self._slave,) * 3, in_session=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # nobody holds the other end any more
            while piece := os.read(self._master, 1 << 16):
                self.written += piece.decode(errors="replace")

    def resize(self, cells: int, lines: int) -> None:
        """As if a person pulled at the window."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, cells, 0, 0))

    def press(self, keys: str) -> None:
        """Keys."""
        os.write(self._master, keys.encode())

    def screen(self) -> list[str]:
        """The latest whole frame, without styles."""
        frames = re.findall(r"\x1b\[H((?:(?!\x1b\[H).)*?)\x1b\[J", self.written, re.DOTALL)
        return re.split(r"\r*\n", re.sub(r"\x1b\[[0-9;]*[mK]", "", frames[-1])) if frames else []

    def text(self) -> str:
        """The same in one."""
        return "\n".join(self.screen())

    def ended(self) -> int:
        """Wait for the program to end; its exit code."""
        return int(self.process.wait(PATIENCE_S))

    def as_found(self) -> bool:
        """The other screen is closed, and the terminal's settings are those of the beginning."""
        closed = self.written.count(ENTER) == self.written.count(LEAVE) and self.written.rstrip().endswith(LEAVE)
        return closed and bool(termios.tcgetattr(self._slave) == self._settings)

    def close(self) -> None:
        """End what is left."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGCONT)
            self.process.kill()
            self.process.wait()
        os.close(self._slave)
        self._reader.join(PATIENCE_S)
        os.close(self._master)


@contextmanager
def terminal(*arguments: str, cells: int = 80, lines: int = 24, **env: str) -> Iterator[Terminal]:
    """``commwatch`` with these arguments in a terminal of that size."""
    opened = Terminal(*arguments, cells=cells, lines=lines, **env)
    try:
        yield opened
    finally:
        opened.close()
