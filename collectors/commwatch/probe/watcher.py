"""A thread beside the training thread, which starts, wakes and ends it without any lock that is implemented in Python.

``threading.Event`` and ``threading.Thread.start`` have such locks. A signal handler that raises inside one leaves it held, and a handler
that communicates inside one finds it held: both block the training thread. A lock of ``_thread`` is implemented in C, and a
handler runs before or after it. ``queue.SimpleQueue`` is no way out: up to Python 3.12, its ``get`` may ignore its timeout.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable

from commwatch.wire.handlers import raised_by_handler


class Watcher:
    """The thread, started at most once at a time.

    Args:
        run: the thread's loop, over ``goes_on`` and ``sleep``.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        #: Identity of the thread that was started last; 0: none runs.
        self._latest = 0
        self._ended = False
        #: Held by the thread while it runs.
        self._running = _thread.allocate_lock()
        #: Released to end a sleep.
        self._asleep = _thread.allocate_lock()
        self._asleep.acquire()

    def start(self) -> None:
        """Start the thread unless it runs; raise ``RuntimeError`` if the process may have no more threads."""
        if not self._latest:
            _thread.start_new_thread(self._main, ())

    def _main(self) -> None:
        # A second thread, started by a handler in the middle of ``start``, takes over from the first.
        self._latest = _thread.get_ident()
        with self._running:
            try:
                self._run()
            finally:
                if self._latest == _thread.get_ident():
                    self._latest = 0

    def goes_on(self) -> bool:
        """In the thread: return whether it is to continue."""
        return not self._ended and self._latest == _thread.get_ident()

    def sleep(self, seconds: float) -> None:
        """In the thread: sleep until ``wake``, for so long at most."""
        self._asleep.acquire(timeout=seconds)

    def wake(self) -> None:
        """End the thread's sleep, or its next one at once."""
        try:
            if self._asleep.locked():
                self._asleep.release()
        except RuntimeError as error:  # another thread has released it meanwhile
            if raised_by_handler(error):
                raise

    def end(self, patience_s: float) -> None:
        """End the thread for good, and wait for its end for so long at most."""
        self._ended = True
        self.wake()
        if self._running.acquire(timeout=patience_s):
            self._running.release()
