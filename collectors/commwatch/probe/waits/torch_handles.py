"""Sees how long threads are blocked by the handles (Works) of asynchronous collectives whose end a callback shows.

A Work is held no longer than its operation runs, for which the backend holds it as well.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import Work

from commwatch.probe.waits.torch_flight import Flight

#: References to a Work that only we hold: the flight's attribute and the argument of getrefcount.
_ONLY_OURS = 2
#: How a thread may wait otherwise than in ``wait``.
_ELSEWHERE = ("get_future", "is_completed")


class Handles:
    """The operations in flight whose handles the caller may hold, and how long threads have been blocked in waits for any operation."""

    def __init__(self) -> None:
        #: By the id of the handle, which its flight holds: how long threads had been blocked at its launch, in ns. Not the flight itself: one that no
        #: code holds any more is abandoned (``FlightTable.sweep``).
        self._by_work: dict[int, int] = {}
        #: In waits that are over; and when the running one began, 0: there is none.
        self._blocked_ns = self._since_ns = 0
        #: Functions of ``Work``: as they were, and ours.
        self._original: dict[str, Any] = {}
        self._replacement: dict[str, Any] = {}

    def add(self, flight: Flight, work: Any) -> None:
        """Add an operation that was just launched."""
        flight.work = work
        self._by_work[id(work)] = self._until(flight.launch)

    def has(self, work: Any) -> bool:
        """Return whether this is the handle of such an operation."""
        return id(work) in self._by_work

    def wait(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that blocks; waits of several threads at a time count once."""
        if self._since_ns:
            return original(*args, **kwargs)
        try:
            self._since_ns = time.monotonic_ns()
            return original(*args, **kwargs)
        finally:
            self._blocked_ns = self._until(time.monotonic_ns())
            self._since_ns = 0

    def ended(self, flight: Flight, end_ns: int) -> int | None:
        """Forget an operation that ends; return how long threads were blocked since its launch, in ns.

        ``None``: not all waits were seen, because only code in C++ has its handle, or its caller waits otherwise.
        """
        before_ns = self._by_work.pop(id(flight.work), -1) if flight.work is not None else -1
        if before_ns < 0 or sys.getrefcount(flight.work) <= _ONLY_OURS:
            return None
        return max(0, self._until(end_ns) - before_ns)

    def _until(self, now_ns: int) -> int:
        since_ns = self._since_ns
        return self._blocked_ns + (max(0, now_ns - since_ns) if since_ns else 0)

    def watch(self) -> None:
        """Wrap the functions by which a thread may wait otherwise; they cost one look-up more."""
        for name in _ELSEWHERE:
            self._original[name] = original = getattr(Work, name)
            self._replacement[name] = replacement = self._unseen(original)
            setattr(Work, name, replacement)

    def unwatch(self) -> None:
        """Undo ``watch``."""
        for name, replacement in self._replacement.items():
            # Another library may have wrapped ours since: then ours stays, and finds nothing.
            if vars(Work)[name] is replacement:
                setattr(Work, name, self._original[name])
        self._by_work.clear()

    def _unseen(self, original: Callable[..., Any]) -> Callable[..., Any]:
        by_work = self._by_work

        def call(self_: Any, *args: Any, **kwargs: Any) -> Any:
            by_work.pop(id(self_), None)
            return original(self_, *args, **kwargs)

        call.__doc__ = original.__doc__
        call._torchdynamo_disable = True  # type: ignore[attr-defined]
        return call
