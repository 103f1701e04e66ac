"""SIGHUP: a request to reload the settings, or the agent's terminal was closed."""

from __future__ import annotations

import os
import signal


class SighupListener:
    """Handler of SIGHUP; create it in the main thread. It stays inactive where the signal was ignored at the start (``nohup``)."""

    def __init__(self) -> None:
        self._heard = False
        self._of_a_terminal = _has_terminal()
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._note)

    def _note(self, *_: object) -> None:
        self._heard = True

    def heard(self) -> bool:
        """Return whether the signal came since the last call."""
        if not self._heard:  # not cleared then: the signal may come between two instructions
            return False
        self._heard = False
        return True

    @property
    def terminal_is_gone(self) -> bool:
        """Whether the process had a terminal when this object was created, and has none now."""
        return self._of_a_terminal and not _has_terminal()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
