"""A filter between a job and its output: passes everything on as it is, keeps NCCL's and PyTorch's lines in a file.

A process of its own, so that the job's output does not end when ``commwatch run`` is killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import select
import signal
import sys
import termios
from pathlib import Path

#: A full file gives way to a new one, once: the lines before are kept beside it.
MOST_BYTES = 32 << 20
_BLOCK = 65_536
_WANTED = re.compile(rb"[NR]CCL|\[rank\d|lagging ranks|collective #")
#: One of these is in every wanted line: most output has none.
_WORDS = (b"CCL", b"[rank", b"lagging ranks", b"collective #")


class Keeper:
    """Writes the lines that matter into a file of bounded size; where it cannot, it stops, and the job goes on."""

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        self._path, self._most = path, most_bytes
        self._rest = b""
        self._file = self._open()

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError:
            return -1

    def feed(self, data: bytes) -> None:
        """Take a piece of output."""
        whole, newline, self._rest = (self._rest + data).rpartition(b"\n")
        maybe = newline and any(word in whole for word in _WORDS)
        lines = [line for line in whole.split(b"\n") if _WANTED.search(line)] if maybe else []
        if len(self._rest) > _BLOCK:  # a progress bar that never ends its line
            lines.append(self._rest) if _WANTED.search(self._rest) else None
            self._rest = b""
        if lines and self._file >= 0:
            try:
                os.write(self._file, b"\n".join(lines) + b"\n")
                if os.fstat(self._file).st_size > self._most:
                    self._path.replace(f"{self._path}.1")
                    os.close(self._file)
                    self._file = self._open()
            except OSError:  # the disk is full: the job's output matters more
                self._file = -1

    def end(self) -> None:
        """The last line may have no newline."""
        self.feed(b"\n" if self._rest else b"")


def pass_on(source: int, target: int, keeper: Keeper) -> None:
    """Copy until the source ends or the target is closed."""
    while True:
        try:
            data = os.read(source, _BLOCK)
        except OSError:  # a pseudo-terminal whose last writer has gone
            break
        if not data:
            break
        keeper.feed(data)
        if not _write(target, data):  # nobody listens: let the job notice, as it would without us
            break
    keeper.end()


def _write(target: int, data: bytes) -> bool:
    """Write all of it; what a full disk does not take is lost. False: nobody will ever read it."""
    while data:
        try:
            data = data[os.write(target, data) :]
        except BlockingIOError:  # somebody who shares the terminal or the pipe has made it so
            select.select([], [target], [])
        except OSError as error:
            return error.errno not in (errno.EPIPE, errno.EIO, errno.EBADF)
    return True


def copy_size(source: int, target: int) -> None:
    """Give one terminal the size of another; where either is none, nothing."""
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(source, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(target, termios.TIOCSWINSZ, size)


def main() -> int:
    """``python -m commwatch.passing FILE``: standard input to standard output."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the job; its last words are still to come
    signal.signal(signal.SIGWINCH, lambda *_: copy_size(1, 0))
    pass_on(0, 1, Keeper(Path(sys.argv[1])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
