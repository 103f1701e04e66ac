"""Measure what the Python hook's bookkeeping costs the training, and let the governor choose the mode by that."""

from __future__ import annotations

import time

from commwatch.probe.governor import CostTurns, Governor, UsualCost
from commwatch.wire import ring
from commwatch.wire.ring import RingWriter

_cpu = time.thread_time_ns


def cpu_now() -> int:
    """Return the CPU time of this thread, in ns, at the start of a measurement. The first call brings the code into the caches."""
    _cpu()
    return _cpu()


class CostMeter:
    """The CPU time that the bookkeeping takes.

    Args:
        budget: as for ``Governor``.
    """

    def __init__(self, budget: float) -> None:
        self.governor = Governor(budget)
        #: Returns for how many operations this one is measured; 0: it is not measured.
        self.turn = CostTurns().next
        self._usual = UsualCost()
        #: Ns of a measurement that the clock itself takes.
        self._of_clock = min(-(_cpu() - _cpu()) for _ in range(64))
        #: Ns in all.
        self._cost = 0
        #: Begin of the governor's window and the cost by then, in ns; and measurements since.
        self._window, self._measured = (0, 0), 0

    def begin(self, now: int) -> None:
        """Begin the governor's first window, at the time ``now`` in ns."""
        self._window = (now, 0)

    def spent(self, entered: int, cost_of: int, writer: RingWriter | None) -> None:
        """Add the CPU time of the bookkeeping since ``entered``, for so many operations; 0: it is not measured."""
        if cost_of and writer is not None:
            took = max(0, self._usual.bound(_cpu() - entered) - self._of_clock)
            self._cost, self._measured = self._cost + took * cost_of, self._measured + 1
            writer.counters[ring.PROBE_NS] = self._cost

    def govern(self, now: int, writer: RingWriter) -> None:
        """If the governor's window is over, set how much is recorded from now on."""
        began, spent = self._window
        if not self.governor.is_over(now - began, self._measured):
            return
        self._measured = 0
        self._window = (now, self._cost)
        before = self.governor.mode
        mode = self.governor.window((self._cost - spent) / (now - began))
        if mode != before:
            writer.counters[ring.MODE_SINCE_NS], writer.counters[ring.MODE] = now, mode
