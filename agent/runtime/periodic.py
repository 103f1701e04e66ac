"""Threads beside the intake: each looks at something again and again, and what goes wrong in one look does not end the next."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from commwatch.collectors.registry import Reading

log = logging.getLogger("commwatch")


class Beside:
    """A thread that looks again and again until the agent ends.

    The agent lives on without it, so that a fault in what one of them reads takes neither the intake nor the others along. It is
    said once, with its traceback, and told in ``/metrics`` for as long as it lasts.

    Args:
        name: as ``collector_up`` has it.
        tick: looks once.
        every_s: between two looks.
        stop: set when the agent ends.
        close: called by the thread after its last look.
    """

    def __init__(
        self,
        name: str,
        tick: Callable[[], object],
        every_s: float,
        stop: threading.Event,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self._tick, self._every_s, self._end, self._close = name, tick, every_s, stop, close
        #: The latest look ended in something that nobody has thought of.
        self.failing = False
        self.thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def _loop(self) -> None:
        while True:
            self._look()
            if self._end.wait(self._every_s):
                break
        self._close()

    def _look(self) -> None:
        try:
            self._tick()
        except Exception:  # whatever it is: the next look may be better, and without this thread there is none
            if not self.failing:
                log.exception("%s: this should not happen; trying again every %g s", self.name, self._every_s)
            self.failing = True
        else:
            if self.failing:
                log.info("%s: working again", self.name)
            self.failing = False


def known(
    readings: Iterable[tuple[str, list[Reading] | None]], threads: Iterable[Beside]
) -> list[tuple[str, list[Reading] | None]]:
    """Readings by collector, ``None`` from each whose thread is failing: what it said before may be old."""
    return [*(dict(readings) | {each.name: None for each in threads if each.failing}).items()]
