"""SIGHUP: somebody wants the settings read again, or the terminal has gone that the agent was started from."""

from __future__ import annotations

import os
import signal


class Hangup:
    """Listens from its making on, in the main thread. Where whoever started the agent ignores the signal (``nohup``), so does it."""

    def __init__(self) -> None:
        self._heard = False
        self._of_a_terminal = _has_terminal()
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._note)

    def _note(self, *_: object) -> None:
        self._heard = True

    def heard(self) -> bool:
        """True once for one signal, or several."""
        heard, self._heard = self._heard, False
        return heard

    @property
    def terminal_is_gone(self) -> bool:
        """True if there was one when this was made, and now is none."""
        return self._of_a_terminal and not _has_terminal()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
