"""What the kernel says of the trainers' processes, read without the lock of the books."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from commwatch.collectors.node import process
from commwatch.collectors.node.gpu import GpuPlace
from commwatch.ingest.jobs import Aggregate
from commwatch.ingest.why_late import Sample


class Processes:
    """Looks at the process of each rank that lives, and leaves what it finds in its book.

    Args:
        lock: guards the books.
        held_back: why a card keeps its clock down right now; empty: it does not, or that is not known.
        state, usage: of a process.
        now_ns: the monotonic clock.
    """

    def __init__(
        self,
        aggregate: Aggregate,
        lock: threading.RLock,
        held_back: Callable[[GpuPlace | None], Sequence[str]] = lambda place: (),
        state: Callable[[int], str | None] = process.state,
        usage: Callable[[int], process.Usage | None] = process.usage,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._aggregate, self._lock, self._held_back = aggregate, lock, held_back
        self._state, self._usage, self._now_ns = state, usage, now_ns

    def tick(self) -> None:
        """Look once."""
        with self._lock:
            alive = [(book, book.pid, book.gpu) for book in self._aggregate.books() if book.pid is not None]
        looks = [
            (book, (pid, self._state(pid)), Sample(self._now_ns(), self._usage(pid), tuple(self._held_back(place))))
            for book, pid, place in alive
        ]
        with self._lock:
            for book, state, sample in looks:
                book.process = state
                book.samples.append(sample)
