"""Step marks to steps (docs/numbers.md).

The calls of a step are found from the order of the optimizers and the forward passes between them (``optimizer_rounds``). Marks
are held until a rule is found, at the beginning and after a change of the loop. From then on a step is returned at its last call.
"""

from __future__ import annotations

from typing import NamedTuple

from commwatch_agent.ingest.optimizer_rounds import MOST_HELD, Cycle, EachPass, Mark, find

EXPLICIT = -1
#: Least marks of several optimizers that a rule must have predicted; fewer once ``_SOON_NS`` are over.
_LEAST, _SOON, _SOON_NS = 8, 4, 2_000_000_000
#: With one optimizer, a second one may still come (a discriminator is called several times before its generator): no step is
#: returned before this many marks, or this much time.
_ALONE, _ALONE_NS = 8, 10_000_000_000
#: After a rule that did not hold for long, the next one needs twice as many marks, up to this number.
_MOST_LEAST = 512
#: Marks after which a missing rule is reported; beyond ``_MANY``, only every ``_NOW_AND_THEN``-th mark starts a search.
_UNCLEAR, _MANY, _NOW_AND_THEN = 64, 32, 16
AMBIGUOUS = "several optimizers take turns in no clear order; call commwatch.step() at the end of each training step"


class Step(NamedTuple):
    """From one mark to the next; ``seq`` is that of the mark that ends it."""

    seq: int
    start_ns: int
    end_ns: int
    exposed_ns: int | None
    in_flight: int
    #: Of an iteration, as in ``cycles.cycle.End``.
    of_root_ns: int = 0


class StepTracker:
    """Finds the steps of one rank in its marks, which come in order."""

    def __init__(self) -> None:
        self._explicit = False
        self._rule: EachPass | Cycle | None = None
        #: Without a rule: the marks held for the next rule, and those of them whose step has been returned.
        self._held: list[Mark] = []
        self._returned: frozenset[Mark] = frozenset()
        #: With a rule: the calls of its latest step, and how many marks it has taken.
        self._latest: list[Mark] = []
        self._placed = 0
        #: How many marks the next rule must have predicted; whether there has been a rule before.
        self._least = _LEAST
        self._changed = False
        self._unclear = False
        self._last_end: int | None = None

    @property
    def unavailable(self) -> str | None:
        """Why the marks give no steps; ``None`` if they do."""
        return AMBIGUOUS if self._unclear and not self._explicit else None

    @property
    def explicit(self) -> bool:
        """Whether ``commwatch.step()`` was called."""
        return self._explicit

    @property
    def held(self) -> int:
        """Number of marks in memory."""
        of_rule = len(self._rule.open) if isinstance(self._rule, EachPass) else 0
        return len(self._held) + len(self._latest) + of_rule

    def forget(self) -> None:
        """Forget the marks of which no step is known yet; the step that they belong to is not returned."""
        self._rule, self._held, self._latest, self._returned = None, [], [], frozenset()
        self._last_end = None

    def feed(self, mark: Mark) -> list[Step]:
        """Add the next mark; return the steps that are now complete."""
        if mark.optimizer == EXPLICIT:
            if not self._explicit:  # earlier marks of optimizers no longer count
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
        """End the marks; return the steps that are now complete."""
        steps = self._learn(min(self._least, len(self._held) // 2)) if self._rule is None else []
        if isinstance(self._rule, EachPass):
            steps += [step for calls in self._rule.end() for step in self._close(calls)]
        elif self._rule is None and len(self._held) >= _LEAST:
            self._unclear = True
        return steps

    def _evidence(self) -> int:
        """Return how many of the held marks a rule must have predicted; 0: do not search for a rule yet."""
        number, waited = len(self._held), self._held[-1].ended_ns - self._held[0].ended_ns
        if number > _MANY and number % _NOW_AND_THEN:
            return 0
        if not self._changed and self._alone():
            return 1 if number > _ALONE or waited >= _ALONE_NS else 0
        return _SOON if not self._changed and waited >= _SOON_NS else self._least

    def _alone(self) -> bool:
        """Return whether all held marks are of one optimizer."""
        return len({mark.optimizer for mark in self._held}) == 1

    def _learn(self, evidence: int) -> list[Step]:
        """Search for a rule; return the steps among the held marks."""
        if not evidence:
            return []
        found = find(self._held, evidence)
        if found is None:
            # With one optimizer it is the first step of many calls, or forward passes are not seen: later marks decide.
            if len(self._held) >= _UNCLEAR and not self._alone():
                self._unclear = True
            if len(self._held) >= MOST_HELD:
                del self._held[: MOST_HELD // 2]
                self._last_end = None
            return []
        before, self._rule = found
        held, self._held = self._held, []
        if not self._returned.issuperset(held[:before]):
            self._last_end = None  # the marks before the rule are no step
        self._placed, self._changed, self._unclear = 0, True, False
        steps = [step for mark in held[before:] for step in self._place(self._rule, mark)]
        self._returned = frozenset()
        return steps

    def _place(self, rule: EachPass | Cycle, mark: Mark) -> list[Step]:
        """Pass a mark to the rule, and drop the rule if it is broken; return the steps that are now complete."""
        closed = rule.feed(mark)
        if rule.broken:
            self._least = min(2 * self._least, _MOST_LEAST) if self._placed < 4 * self._least else _LEAST
            self._rule, self._returned = None, frozenset(self._latest)
            self._held, self._latest = [*self._latest, *rule.open, mark], []
            return []
        self._placed += 1
        steps = []
        for calls in closed:
            self._latest = calls
            if calls[0] in self._returned:
                self._last_end = calls[-1].ended_ns
            else:
                steps += self._close(calls)
        return steps

    def _close(self, calls: list[Mark]) -> list[Step]:
        """Return the step that these calls end; empty if its start is not known."""
        end = calls[-1]
        start, self._last_end = self._last_end, end.ended_ns
        if start is None or end.ended_ns <= start:
            return []
        known = [mark.exposed_ns for mark in calls if mark.exposed_ns is not None]
        exposed = sum(known) if len(known) == len(calls) else None
        return [Step(end.seq, start, end.ended_ns, exposed, end.in_flight)]
