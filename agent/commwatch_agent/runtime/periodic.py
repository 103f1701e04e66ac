"""Threads beside the intake: each calls a function periodically, and an exception does not end the thread."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable

from commwatch_collectors.registry import Reading

log = logging.getLogger("commwatch")
#: Seconds between two calls, in addition to the pause, of threads that have nothing to do until there is a job.
IDLE_S = 5.0
#: What a call returns after which there is nothing more to do.
OVER = object()


class PeriodicThread:
    """A thread that calls ``tick`` periodically until the agent ends.

    An exception in ``tick`` affects neither the intake nor the other threads. It is logged once, with its traceback, and shown in
    ``/metrics`` until a call succeeds.

    Args:
        name: as in ``collector_up``.
        tick: called once per period, until it returns ``OVER``.
        every_s: mean pause between two calls.
        stop: set when the agent ends.
        close: called by the thread after the last call.
        uneven: pauses differ by up to this part of them, at random. What is sampled at the rhythm of a job's steps would be the same moment of each.
        jobs: set while there are jobs, and when the agent ends. While it is not set, the calls are ``IDLE_S`` further apart; ``None``: they never are.
    """

    def __init__(
        self,
        name: str,
        tick: Callable[[], object],
        every_s: float,
        stop: threading.Event,
        close: Callable[[], None] = lambda: None,
        *,
        uneven: float = 0.0,
        jobs: threading.Event | None = None,
    ) -> None:
        self._jobs, self._uneven = jobs, uneven
        self.name, self._tick, self._every_s, self._end, self._close = name, tick, every_s, stop, close
        #: The latest call of ``tick`` raised an exception.
        self.failing = False
        self.thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def _loop(self) -> None:
        while self._call() is not OVER:
            self._end.wait(self._every_s * random.uniform(1 - self._uneven, 1 + self._uneven))  # noqa: S311 - no secret
            if self._jobs is not None:
                self._jobs.wait(IDLE_S)
            if self._end.is_set():
                break
        self._close()

    def _call(self) -> object:
        result = None
        try:
            result = self._tick()
        except Exception:  # any: the next call may succeed, but only if this thread goes on
            if not self.failing:
                log.exception("%s: unexpected error; trying again every %g s", self.name, self._every_s)
            self.failing = True
        else:
            if self.failing:
                log.info("%s: working again", self.name)
            self.failing = False
        return result


def known(
    readings: Iterable[tuple[str, list[Reading] | None]], threads: Iterable[PeriodicThread]
) -> list[tuple[str, list[Reading] | None]]:
    """Return readings by collector; ``None`` for collectors whose thread is failing, as their readings may be old."""
    return [*(dict(readings) | {each.name: None for each in threads if each.failing}).items()]
