"""Step marks to steps (docs/definitions.md).

The calls of a step are found in the order of the optimizers and in the forward passes between them (``cycles``). The marks are
held until that is clear, at the beginning and where the loop has changed. From then on a step is told at its last call.
"""

from __future__ import annotations

from typing import NamedTuple

from commwatch.ingest.cycles import MOST_HELD, Cycle, EachPass, Mark, find

EXPLICIT = -1
#: Marks of several optimizers that must have come as a rule foresees, before it is believed; how many, once so much time is over.
_LEAST, _SOON, _SOON_NS = 8, 4, 2_000_000_000
#: With one optimizer alone, another one may still come (a discriminator is called several times before its generator): no step is
#: given before so many marks, or so much time.
_ALONE, _ALONE_NS = 8, 10_000_000_000
#: Where a rule did not hold for long, the next one needs twice as many; at most so many.
_MOST_LEAST = 512
#: After so many marks without a rule there is none to be found soon; from so many on they are looked at only now and then.
_UNCLEAR, _MANY, _NOW_AND_THEN = 64, 32, 16
AMBIGUOUS = "several optimizers take turns in no clear order; call commwatch.step() at the end of each training step"


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
        self._rule: EachPass | Cycle | None = None
        #: Without a rule: the marks that it will place, and those of them whose step has been told.
        self._held: list[Mark] = []
        self._told: frozenset[Mark] = frozenset()
        #: With a rule: the calls of its latest step, and how many marks it has placed.
        self._latest: list[Mark] = []
        self._placed = 0
        #: How many marks the next rule must have foreseen; whether there has been a rule before.
        self._least = _LEAST
        self._changed = False
        self._unclear = False
        self._last_end: int | None = None

    @property
    def unavailable(self) -> str | None:
        """Why there are no steps, if the marks do not tell them."""
        return AMBIGUOUS if self._unclear and not self._explicit else None

    def feed(self, mark: Mark) -> list[Step]:
        """Take the next mark; returns the steps that are complete now."""
        if mark.optimizer == EXPLICIT:
            if not self._explicit:  # what optimizers said before does not count any more
                self._explicit, self._last_end = True, None
                self._rule, self._held, self._latest = None, [], []
            return self._close([mark])
        if self._explicit:
            return []
        if self._rule is not None:
            return self._place(self._rule, mark)
        self._held.append(mark)
        return self._learn(self._evidence())

    def end(self) -> list[Step]:
        """There are no more marks; returns the steps that are complete therefore."""
        steps = self._learn(min(self._least, len(self._held) // 2)) if self._rule is None else []
        if isinstance(self._rule, EachPass):
            steps += [step for calls in self._rule.end() for step in self._close(calls)]
        elif self._rule is None and len(self._held) >= _LEAST:
            self._unclear = True
        return steps

    def _evidence(self) -> int:
        """How many of the held marks a rule must have foreseen; 0: it is not time to look for one."""
        number, waited = len(self._held), self._held[-1].ended_ns - self._held[0].ended_ns
        if number > _MANY and number % _NOW_AND_THEN:
            return 0
        if not self._changed and self._alone():
            return 1 if number > _ALONE or waited >= _ALONE_NS else 0
        return _SOON if not self._changed and waited >= _SOON_NS else self._least

    def _alone(self) -> bool:
        """Whether no other optimizer has come (yet)."""
        return len({mark.optimizer for mark in self._held}) == 1

    def _learn(self, evidence: int) -> list[Step]:
        """Find the rule; returns the steps among the held marks."""
        if not evidence:
            return []
        found = find(self._held, evidence)
        if found is None:
            # One optimizer alone is the first step of many calls, or its forward passes are not seen: that will be clear.
            if len(self._held) >= _UNCLEAR and not self._alone():
                self._unclear = True
            if len(self._held) >= MOST_HELD:
                del self._held[: MOST_HELD // 2]
                self._last_end = None
            return []
        before, self._rule = found
        held, self._held = self._held, []
        if not self._told.issuperset(held[:before]):
            self._last_end = None  # what lies there is no step
        self._placed, self._changed, self._unclear = 0, True, False
        steps = [step for mark in held[before:] for step in self._place(self._rule, mark)]
        self._told = frozenset()
        return steps

    def _place(self, rule: EachPass | Cycle, mark: Mark) -> list[Step]:
        """Have the rule place a mark; where it no longer holds, another one is needed."""
        closed = rule.feed(mark)
        if rule.broken:
            self._least = min(2 * self._least, _MOST_LEAST) if self._placed < 4 * self._least else _LEAST
            self._rule, self._told = None, frozenset(self._latest)
            self._held, self._latest = [*self._latest, *rule.open, mark], []
            return []
        self._placed += 1
        steps = []
        for calls in closed:
            self._latest = calls
            if calls[0] in self._told:
                self._last_end = calls[-1].ended_ns
            else:
                steps += self._close(calls)
        return steps

    def _close(self, calls: list[Mark]) -> list[Step]:
        """The step that these calls end."""
        end = calls[-1]
        start, self._last_end = self._last_end, end.ended_ns
        if start is None or end.ended_ns <= start:
            return []
        known = [mark.exposed_ns for mark in calls if mark.exposed_ns is not None]
        exposed = sum(known) if len(known) == len(calls) else None
        return [Step(end.seq, start, end.ended_ns, exposed, end.in_flight)]
