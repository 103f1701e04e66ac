"""Rare pauses of one rank, for which all others wait: a new data loader, a checkpoint, a compilation. Pure.

They are left out of the shares of the steps, as long steps, and a straggler is a rank that is late in more of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median_low

from commwatch_agent.analysis.advice_facts import Pauses
from commwatch_agent.analysis.waits.uneven_work import Beyond
from commwatch_agent.model.views import StepView

#: Least number of long steps in which the rank pauses.
_LEAST = 5
#: How many times as long as the rank itself each other one waits in long steps, at least.
_TIMES = 3


def pauses_of(steps_of: Mapping[int, Sequence[StepView]], beyond: Mapping[int, Beyond | None]) -> Pauses | None:
    """Return the rank for which the others wait in long steps; ``None``: there is none, or it is not known.

    Args:
        steps_of: all steps of each rank, the long ones among them.
        beyond: of these, as ``beyond_usual`` returns it.
    """
    waited_s = {rank: each.waited for rank, each in beyond.items() if each is not None and steps_of[rank]}
    if len(waited_s) < 2 or len(waited_s) < len(steps_of):
        return None
    rank = min(waited_s, key=lambda each: waited_s[each])
    others_s = [waited for other, waited in waited_s.items() if other != rank]
    of_others = [{step.seq for step in steps if step.long} for other, steps in steps_of.items() if other != rank]
    # The others wait in the same steps: one without inputs waits in many steps of others, and has none itself.
    long = [step for step in steps_of[rank] if step.long and all(step.seq in numbers for numbers in of_others)]
    if len(long) < _LEAST or min(others_s) <= _TIMES * waited_s[rank]:
        return None
    whole_s = fmean(sum(step.duration_s for step in steps) for steps in steps_of.values())
    longest_s = max(step.duration_s for step in long)
    return Pauses(rank, len(long), len(steps_of[rank]), longest_s, min(1.0, median_low(others_s) / whole_s))
