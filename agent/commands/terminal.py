"""A terminal that shows one thing after another until somebody quits, and is left as it was found."""

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
#: The other screen, without a cursor; lines end at its edge, whatever the terminal takes a sign to be wide. And back.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
#: Ages go on while no answer comes.
_REDRAW_S = 1.0
_QUIT = frozenset(int(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
_QUIT_KEYS = frozenset(b"qQ")
#: What the thread writes where a signal would write its number.
_NEWS = b"\0"


class Poller(Generic[_T]):
    """Asks again and again, in a thread of its own: an agent that is slow to answer holds up no key.

    Args:
        ask: the answers, or in words why there are none.
        news: called after each.
    """

    def __init__(self, ask: Callable[[], _T | str], interval_s: float, news: Callable[[], None]) -> None:
        self._ask, self._interval_s, self._news = ask, interval_s, news
        self._stop = threading.Event()
        #: The latest answers and when they came, in monotonic seconds; why there are no newer ones.
        self.latest: tuple[_T | None, float, str | None] = (None, time.monotonic(), None)

    def run(self) -> None:
        """Until ``stop``."""
        while not self._stop.is_set():
            answers, at, _ = self.latest
            found = self._ask()
            self.latest = (answers, at, found) if isinstance(found, str) else (found, time.monotonic(), None)
            self._news()
            self._stop.wait(self._interval_s)

    def stop(self) -> None:
        """No more questions; one that is under way is nobody's business any more."""
        self._stop.set()


def watch(
    ask: Callable[[], _T | str],
    draw: Callable[[_T | None, float, str | None, os.terminal_size], list[str]],
    interval_s: float,
    keys: int | None,
    out: int,
    encoding: str,
) -> None:
    """Show what ``draw`` makes of the latest answers, their age and what is wrong, until q, Ctrl-C or a signal to end.

    Args:
        keys: file descriptor of the terminal to read keys from; ``None``: there is none.
        out: file descriptor of the terminal to draw on.
    """
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)

    def news() -> None:
        with suppress(BlockingIOError):  # so much is unread already that it will be drawn
            os.write(writer, _NEWS)

    poller = Poller(ask, interval_s, news)

    def show() -> None:
        answers, at, trouble = poller.latest
        lines = draw(answers, time.monotonic() - at, trouble, os.get_terminal_size(out))
        _write(out, "\x1b[H" + "\r\n".join(f"{line}\x1b[K" for line in lines) + "\x1b[J", encoding)

    # The pipe stays open: a question that is still under way ends with news.
    with (
        _signals(writer),
        suppress(OSError, termios.error),
        _Screen(keys, out) as screen,
    ):  # an error: the terminal is gone
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
    """Signals that have come, ``_NEWS``, or nothing for a while; ``None`` once a key says quit."""
    sources = [reader] if keys is None else [reader, keys]
    ready, _, _ = select.select(sources, [], [], _REDRAW_S)
    if keys in ready:
        pressed = os.read(keys, 256)
        if not pressed or _QUIT_KEYS.intersection(pressed):
            return None
    return os.read(reader, 4096) if reader in ready else b""


@contextmanager
def _signals(writer: int) -> Iterator[None]:
    """Signals write their number to a pipe instead of ending the program or breaking into it."""
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
    """The other screen, and keys as they are pressed; ``leave`` makes all as it was before."""

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
        """Ctrl-Z: the terminal is the shell's until it goes on with us."""
        self.leave()
        signal.raise_signal(signal.SIGSTOP)
        self.enter()


def _write(out: int, text: str, encoding: str) -> None:
    data = text.encode(encoding, "replace")
    while data:
        data = data[os.write(out, data) :]
