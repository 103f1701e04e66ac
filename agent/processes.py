"""The state of the trainers' processes by the kernel, read without the lock of the books."""

from __future__ import annotations

import threading
from collections.abc import Callable

from commwatch.aggregate import Aggregate
from commwatch.collectors import process


class Processes:
    """Looks at the process of each rank that lives, and leaves what it finds in its book.

    Args:
        lock: guards the books.
        state: of a process.
    """

    def __init__(
        self, aggregate: Aggregate, lock: threading.RLock, state: Callable[[int], str | None] = process.state
    ) -> None:
        self._aggregate, self._lock, self._state = aggregate, lock, state

    def tick(self) -> None:
        """Look once."""
        with self._lock:
            alive = [(book, book.pid) for book in self._aggregate.books() if book.pid is not None]
        for book, pid in alive:
            book.process = pid, self._state(pid)
