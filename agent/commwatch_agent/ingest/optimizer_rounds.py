"""Rules that group optimizer calls into training steps, found in the order of the calls. Pure; no clock decides.

A rule takes marks one by one and returns the calls of each complete step. It is ``broken`` once the loop has changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

#: Most optimizer calls of a step, and most that are searched for a rule.
MOST_HELD = 4096
#: Doubt added by an unexpected cycle (an expected one removes 1); a rule with more doubt is broken.
_STRAYED, _MOST_DOUBT = 2, 8


class Mark(NamedTuple):
    """End of one optimizer call (or explicit mark, ``optimizer`` -1); times in ns of the trainer's clock."""

    seq: int
    optimizer: int
    began_ns: int
    ended_ns: int
    #: Exposed time since the previous mark; ``None`` = not known.
    exposed_ns: int | None
    #: Operations in flight at the mark; the step's communication is complete once they end.
    in_flight: int
    #: No forward pass ran since the previous call.
    same_pass: bool = False


class EachPass:
    """Each forward pass is a step: all calls up to the next pass belong to it.

    Args:
        common: optimizers called in every pass so far.
    """

    def __init__(self, common: frozenset[int]) -> None:
        self._common = common
        self.broken = False
        #: Marks of the next step. After an early end they include late calls of the previous one.
        self.open: list[Mark] = []
        #: The optimizers called in this pass, and in the previous one; whether this pass's step is over.
        self._calls: list[int] = []
        self._usual: list[int] = []
        self._over = True

    def feed(self, mark: Mark) -> list[list[Mark]]:
        """Add the next mark; return the calls of each step that is now over."""
        closed = []
        if not (mark.same_pass and self._calls) or len(self._calls) == MOST_HELD:
            if self._calls:
                self._common &= frozenset(self._calls)
                if not self._common:
                    self.broken = True
                    return []
            closed = self.end()
            self._usual, self._calls, self._over = self._calls, [], False
        self._calls.append(mark.optimizer)
        self.open.append(mark)
        # The calls equal those of the previous pass, so the step is over before the next pass.
        return [*closed, *self.end()] if self._calls == self._usual else closed

    def end(self) -> list[list[Mark]]:
        """End the pass; return the calls of its step if that is not over yet."""
        if self._over or self._common.isdisjoint(self._calls):
            return []
        closed, self.open, self._over = self.open, [], True
        return [closed]


class Cycle:
    """Optimizers take turns; each round is a step, which ends at the last call of the round.

    Args:
        order: the optimizers of one step, one entry per call.
        place: index of the first mark in ``order``.
    """

    def __init__(self, order: Sequence[int], place: int) -> None:
        self._order = tuple(order)
        self._place = place
        self.broken = False
        #: Marks of the current step.
        self.open: list[Mark] = []
        self._strayed = False
        self._doubt = _MOST_DOUBT

    def feed(self, mark: Mark) -> list[list[Mark]]:
        """Add the next mark; return the calls of each step that is now over.

        A missing call (a gradient scaler skips some) is tolerated: the step ends at the last call of the round, or before the next round.
        """
        place = self._find(mark.optimizer)
        if place is None or self._doubt > _MOST_DOUBT:
            self.broken = True
            return []
        closed = []
        self._strayed |= place != self._place
        if place < self._place:
            closed += self.end()
        self.open.append(mark)
        self._place = place + 1
        if self._place == len(self._order):
            closed += self.end()
        return closed

    def end(self) -> list[list[Mark]]:
        """End the current step, complete or not; return its calls."""
        self._doubt = self._doubt + _STRAYED if self._strayed else max(0, self._doubt - 1)
        closed, self.open = self.open, []
        self._place, self._strayed = 0, False
        return [closed] if closed else []

    def _find(self, optimizer: int) -> int | None:
        for since, until in ((self._place, len(self._order)), (0, self._place)):
            try:
                return self._order.index(optimizer, since, until)
            except ValueError:
                continue
        return None


def find(marks: Sequence[Mark], least: int) -> tuple[int, EachPass | Cycle] | None:
    """Find the rule that the latest marks follow, at least half of all marks.

    Args:
        least: number of marks that a cycle must have predicted, or of forward passes that must have an optimizer in common.

    Returns:
        Number of marks before the rule applies, and the rule; ``None``: no rule yet.
    """
    numbers = [mark.optimizer for mark in marks]
    length, period = repeats(numbers)
    clear = 2 * length >= len(marks) and length - period >= least
    since = len(marks) - length if clear else 0
    order = numbers[since : since + period]
    if clear and len(set(order)) == period > 1:
        return since, _cycle(order, marks[since:])
    passes = _passes(marks[since:])
    common = frozenset.intersection(*passes[:-1]) if len(passes) > 1 else frozenset()
    if common and (clear or len(passes) > least):
        return since, EachPass(common)
    if len(passes) == len(set(numbers)) == 1:
        return None  # perhaps the first step of an optimizer that is called once per group of parameters
    return (since, _cycle(order, marks[since:])) if clear else None


def repeats(numbers: Sequence[int]) -> tuple[int, int]:
    """Return the lengths of the longest suffix that repeats a cycle at least twice, and of the cycle; (0, 0): none."""
    backwards, found = numbers[::-1], (0, 0)
    borders = [0] * len(backwards)  # of Knuth, Morris and Pratt: longest prefix that is also a suffix
    for at in range(1, len(backwards)):
        border = borders[at - 1]
        while border and backwards[at] != backwards[border]:
            border = borders[border - 1]
        borders[at] = border = border + (backwards[at] == backwards[border])
        if 2 * border >= at + 1:
            found = at + 1, at + 1 - border
    return found


def _passes(marks: Sequence[Mark]) -> list[frozenset[int]]:
    """Return the optimizers called in each forward pass."""
    passes: list[set[int]] = []
    for mark in marks:
        if passes and mark.same_pass:
            passes[-1].add(mark.optimizer)
        else:
            passes.append({mark.optimizer})
    return [frozenset(optimizers) for optimizers in passes]


def _cycle(order: Sequence[int], marks: Sequence[Mark]) -> Cycle:
    """Return the rule for a loop with this order, which ``marks`` repeat at least twice.

    A step ends at the optimizer that is called least often (the generator, after its discriminator); if several are, before a
    forward pass, and otherwise at the end of the first round.
    """
    count = Counter(order)
    rarest = min(count.values())
    places = range(len(order))
    last = max(places, key=lambda at: (count[order[at]] == rarest, not marks[at + 1].same_pass, at))
    return Cycle([*order[last + 1 :], *order[: last + 1]], (len(order) - last - 1) % len(order))
