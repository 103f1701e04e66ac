"""Conditions on a comparison, for continuous integration: ``step_p50 > +5%``. Pure.

``FIGURE > +LIMIT`` is met if B's figure is larger by more than the limit, ``FIGURE < -LIMIT`` if it is smaller. Limits are in percent of A's
figure for step times, and in percentage points (``pp``) for shares. ``incidents`` is met if B has incidents that are new or cost more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from commwatch_agent.compare.comparison import Comparison, Figure

#: Figures, and whether their change is relative.
FIGURES = {
    "step_p50": True,
    "step_p95": True,
    "step_mean": True,
    "comm_share": False,
    "exposed_share": False,
    "wait_share": False,
}
_CONDITION = re.compile(r"\s*(\w+)\s*(?:(>)\s*\+?|(<)\s*-)(\d{1,6}(?:\.\d{1,6})?)\s*(%|pp)\s*")


@dataclass(frozen=True)
class NoRegression:
    """The condition ``incidents``."""

    text: str = "incidents"

    def is_met(self, comparison: Comparison) -> bool:
        """Return whether an incident is new or costs more."""
        return any(each.is_regression for each in comparison.incidents)


@dataclass(frozen=True)
class Condition:
    """A condition on a figure; ``limit`` is positive: a relative change, or a difference of shares."""

    text: str
    figure: str
    above: bool
    limit: float

    def is_met(self, comparison: Comparison) -> bool | None:
        """Return whether the change is beyond the limit, and a difference; ``None``: not known.

        The limit applies to the measured change, not to the end of its interval: a change of 8% with an interval of 4 to 12% meets
        ``> +5%``. The interval only keeps noise from meeting it.
        """
        found = self.of(comparison)
        if found.differs is None or found.change is None:
            return None
        return found.differs and (found.change if self.above else -found.change) > self.limit

    def of(self, comparison: Comparison) -> Figure:
        """Return its figure."""
        return next(each for each in comparison.figures if each.name == self.figure)


def parse(text: str) -> Condition | NoRegression:
    """Return a condition; raise ``ValueError`` with a text for the user."""
    if text.strip() == NoRegression.text:
        return NoRegression()
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text}: give a condition such as 'step_p50 > +5%' or 'comm_share > +3pp', or incidents")
    name, above, _, limit, unit = found.groups()
    if name not in FIGURES:
        raise ValueError(f"{text}: no figure {name}; choose from {', '.join(FIGURES)}")
    if (unit == "%") is not FIGURES[name]:
        right = "percent of A's value (%)" if FIGURES[name] else "percentage points (pp)"
        raise ValueError(f"{text}: the limit of {name} is in {right}")
    return Condition(text.strip(), name, above is not None, float(limit) / 100)
