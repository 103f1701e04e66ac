"""Step marks to steps (DESIGN §2).

A mark is the end of an optimizer call, or an explicit ``commwatch.step()``. Calls that follow one another with a
gap under 5 % of the usual period are one step, which ends at the last; the period is what lies between two calls of
the same optimizer. A loop in which no optimizer takes part in every step (a GAN's alternation) is ambiguous.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import NamedTuple

EXPLICIT = -1
_SAME_STEP = 0.05
#: Optimizers that are known at a time, the latest: a trainer may number them without end.
_MOST_OPTIMIZERS = 4096
_REMEMBERED = 31
AMBIGUOUS = "several optimizers take turns; call commwatch.step() at the end of each training step"


class Mark(NamedTuple):
    """End of one optimizer call (or explicit mark, ``optimizer`` -1); times in ns of the trainer's clock."""

    seq: int
    optimizer: int
    began_ns: int
    ended_ns: int
    #: Exposed time since the mark before; ``None`` = not known.
    exposed_ns: int | None
    #: Operations then in flight: the step's communication is not complete before they are.
    in_flight: int


class Step(NamedTuple):
    """From one mark to the next; ``seq`` is that of the mark that ends it."""

    seq: int
    start_ns: int
    end_ns: int
    exposed_ns: int | None
    in_flight: int


class StepTracker:
    """Feeds on the marks of one rank, in order."""

    def __init__(self) -> None:
        self._explicit = False
        #: Marks that came before any optimizer had come twice: until then no period is known.
        self._prologue: deque[Mark] | None = deque(maxlen=_MOST_OPTIMIZERS)
        #: Marks of the step being put together, by optimizer.
        self._burst: dict[int, Mark] = {}
        self._last_end: int | None = None
        #: Exposed time of marks that came after their step had been closed.
        self._late_exposed_ns = 0
        self._last_of: dict[int, int] = {}
        self._periods: deque[int] = deque(maxlen=_REMEMBERED)
        #: The optimizers of the latest steps.
        self._recent: deque[frozenset[int]] = deque(maxlen=_REMEMBERED)

    @property
    def unavailable(self) -> str | None:
        """Why there are no steps, if the marks do not tell them."""
        if self._explicit or len(self._recent) < 2:
            return None
        return AMBIGUOUS if not frozenset.intersection(*self._recent) else None

    def feed(self, mark: Mark) -> list[Step]:
        """Take the next mark; returns the steps that are complete now."""
        if mark.optimizer == EXPLICIT:
            if not self._explicit:  # what optimizers said before does not count any more
                self._explicit, self._burst, self._last_end = True, {}, None
            return self._close([mark])
        if self._explicit:
            return []
        before = self._last_of.pop(mark.optimizer, None)
        self._last_of[mark.optimizer] = mark.ended_ns
        if len(self._last_of) > _MOST_OPTIMIZERS:
            del self._last_of[next(iter(self._last_of))]
        if before is not None:
            self._periods.append(mark.ended_ns - before)
        if self._prologue is None:
            return self._place(mark)
        self._prologue.append(mark)
        if not self._periods:
            return []
        held, self._prologue = self._prologue, None
        return [step for earlier in held for step in self._place(earlier)]

    def _place(self, mark: Mark) -> list[Step]:
        """Put a mark into the step it belongs to, and close the steps that are over."""
        closed: list[Step] = []
        if self._burst:
            full = mark.optimizer in self._burst or len(self._burst) == _MOST_OPTIMIZERS
            if full or not self._follows(mark, next(reversed(self._burst.values())).ended_ns):
                closed, self._burst = self._close(list(self._burst.values())), {}
        elif self._recent and mark.optimizer not in self._recent[-1] and self._follows(mark, self._last_end or 0):
            self._late_exposed_ns += mark.exposed_ns or 0  # an optimizer new to the loop; its step is closed already
            return closed
        self._burst[mark.optimizer] = mark
        # With one optimizer a step is over when its call is: no need to wait for the next.
        if len(self._last_of) == 1:
            closed += self._close(list(self._burst.values()))
            self._burst = {}
        return closed

    def _follows(self, mark: Mark, end_ns: int) -> bool:
        return mark.began_ns - end_ns < _SAME_STEP * median(self._periods)

    def _close(self, burst: list[Mark]) -> list[Step]:
        end = burst[-1]
        start, self._last_end = self._last_end, end.ended_ns
        self._recent.append(frozenset(mark.optimizer for mark in burst))
        late, self._late_exposed_ns = self._late_exposed_ns, 0
        if start is None or end.ended_ns <= start or self.unavailable:
            return []
        known = [mark.exposed_ns for mark in burst if mark.exposed_ns is not None]
        exposed = sum(known) + late if len(known) == len(burst) else None
        return [Step(end.seq, start, end.ended_ns, exposed, end.in_flight)]
