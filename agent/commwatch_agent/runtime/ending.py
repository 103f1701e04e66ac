"""SIGTERM and SIGINT: requests to end."""

from __future__ import annotations

import signal
from queue import Empty, SimpleQueue


class Ending:
    """Handler of both signals; create it in the main thread, which then calls ``requested`` now and then.

    A handler runs between any two lines of the main thread. `SimpleQueue.put` may be called there; `threading.Event.set` may not: if the main
    thread is in `wait` of the same event and holds its lock, it waits for itself.
    """

    def __init__(self) -> None:
        self._requests: SimpleQueue[int] = SimpleQueue()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        self._requests.put(number)

    def requested(self, within_s: float) -> str:
        """Wait for a request, at most so many seconds; return the name of its signal, empty if there was none."""
        try:
            return signal.Signals(self._requests.get(timeout=within_s)).name
        except Empty:
            return ""
