"""A full-screen terminal display that redraws until the user quits, and then restores the terminal."""

from __future__ import annotations

import os
import select
import signal
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

_T = TypeVar("_T")
#: Enter and leave the alternate screen. Its cursor is hidden, and long lines are cut at the edge (no wrapping).
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
#: Seconds between redraws without news: displayed ages have to advance while no answer arrives.
_REDRAW_S = 1.0
_QUIT = frozenset(int(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
_QUIT_KEYS = frozenset(b"qQ")
#: Byte that the poller thread writes to the wake-up pipe; a signal writes its number there.
_NEWS = b"\0"


class Poller(Generic[_T]):
    """Calls ``ask`` repeatedly in a separate thread, so that a slow agent does not delay the keyboard.

    Args:
        ask: returns the answers, or a text that explains why there are none.
        news: called after each call of ``ask``.
    """

    def __init__(self, ask: Callable[[], _T | str], interval_s: float, news: Callable[[], None]) -> None:
        self._ask, self._interval_s, self._news = ask, interval_s, news
        self._stop = threading.Event()
        #: The latest answers; when they arrived, in monotonic seconds; why there are no newer ones.
        self.latest: tuple[_T | None, float, str | None] = (None, time.monotonic(), None)

    def run(self) -> None:
        """Poll until ``stop`` is called."""
        while not self._stop.is_set():
            answers, at, _ = self.latest
            found = self._ask()
            self.latest = (answers, at, found) if isinstance(found, str) else (found, time.monotonic(), None)
            self._news()
            self._stop.wait(self._interval_s)

    def stop(self) -> None:
        """Stop polling. A call of ``ask`` in flight is not waited for."""
        self._stop.set()


def watch(
    ask: Callable[[], _T | str],
    draw: Callable[[_T | None, float, str | None, os.terminal_size], list[str]],
    interval_s: float,
    *,
    keys: int | None,
    out: int,
    encoding: str,
) -> None:
    """Show the lines that ``draw`` makes of the latest answers, until q, Ctrl-C or another signal to end.

    Args:
        ask: returns the answers, or a text that explains why there are none.
        draw: called with the latest answers, their age in seconds, the explanation, and the terminal's size.
        keys: file descriptor of the terminal that keys are read from; ``None``: there is none.
        out: file descriptor of the terminal to draw on.
    """
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)

    def news() -> None:
        with suppress(BlockingIOError):  # the pipe is full: a redraw is due anyway
            os.write(writer, _NEWS)

    poller = Poller(ask, interval_s, news)

    def show() -> None:
        answers, at, trouble = poller.latest
        lines = draw(answers, time.monotonic() - at, trouble, os.get_terminal_size(out))
        _write(out, "\x1b[H" + "\r\n".join(f"{line}\x1b[K" for line in lines) + "\x1b[J", encoding)

    # The pipe is never closed, because a call of ``ask`` in flight still writes to it when it ends.
    with (
        _signals(writer),
        suppress(OSError, termios.error),
        _Screen(keys, out) as screen,
    ):  # such an error means that the terminal is gone
        threading.Thread(target=poller.run, name="poller", daemon=True).start()
        try:
            while True:
                show()
                numbers = _wait(reader, keys)
                if numbers is None or _QUIT.intersection(numbers):
                    break
                if signal.SIGTSTP in numbers:
                    screen.suspend()
        finally:
            poller.stop()


def _wait(reader: int, keys: int | None) -> bytes | None:
    """Return the pipe's bytes, empty after ``_REDRAW_S`` seconds; ``None`` at a quit key or end of input."""
    sources = [reader] if keys is None else [reader, keys]
    ready, _, _ = select.select(sources, [], [], _REDRAW_S)
    if keys in ready:
        pressed = os.read(keys, 256)
        if not pressed or _QUIT_KEYS.intersection(pressed):
            return None
    return os.read(reader, 4096) if reader in ready else b""


@contextmanager
def _signals(writer: int) -> Iterator[None]:
    """Have signals write their number to a pipe; they do not end or interrupt the program."""
    handled = (*_QUIT, signal.SIGWINCH, signal.SIGTSTP)
    before = [signal.signal(number, lambda *_: None) for number in handled]
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in zip(handled, before, strict=True):
            signal.signal(number, handler)


class _Screen:
    """The alternate screen, with keys read one by one; ``leave`` restores the terminal."""

    def __init__(self, keys: int | None, out: int) -> None:
        self._keys, self._out = keys, out
        self._was = None if keys is None else termios.tcgetattr(keys)

    def __enter__(self) -> _Screen:
        self.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def enter(self) -> None:
        if self._keys is not None:
            tty.setcbreak(self._keys, termios.TCSANOW)
        _write(self._out, _ENTER, "ascii")

    def leave(self) -> None:
        if self._keys is not None and self._was is not None:
            termios.tcsetattr(self._keys, termios.TCSANOW, self._was)
        _write(self._out, _LEAVE, "ascii")

    def suspend(self) -> None:
        """Handle Ctrl-Z: restore the terminal, stop, and enter the screen again when continued."""
        self.leave()
        signal.raise_signal(signal.SIGSTOP)
        self.enter()


def _write(out: int, text: str, encoding: str) -> None:
    data = text.encode(encoding, "replace")
    while data:
        data = data[os.write(out, data) :]
