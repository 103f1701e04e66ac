"""Uneven work: ranks wait for each other for much of their step time, and none of them is late all the time. Pure.

One criterion for the advice, which reads the history, and for the incident, which reads the last minute (``step_waits``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from statistics import mean, median
from typing import NamedTuple

from commwatch_agent.analysis.advice_facts import WORTH
from commwatch_agent.ingest.step_accounting import LEAST_STEPS
from commwatch_agent.text.units import percent

#: Ranks are late in turn if each waits at least this part of the mean wait.
_ALIKE = 0.6
#: Waiting must be so many times as long as the transfers. Otherwise ranks may leave these one after the other, which looks as if they were late.
_TIMES = 1.5
#: Share of the waiting that waiting for a core must explain.
_EXPLAINS = 0.5
#: Enough for a conclusion: so many steps of a rank, or so many seconds of them.
ENOUGH_STEPS, ENOUGH_S = 20, 30.0


class StepWaits(NamedTuple):
    """How the ranks of a job wait in their usual steps; all shares are of the step time, 0 to 1."""

    #: Waiting for late ranks and messages, by rank, where it is known.
    waits: Mapping[int, float]
    #: Communication without the waiting for late ranks; ``None``: no such waiting is known.
    transfer: float | None
    #: Communication that compute waits for, with the waiting for late ranks; ``None``: not known.
    exposed: float | None
    #: Time in which the main threads were ready to run but had no core, on average; ``None``: not known.
    for_cores: float | None = None


class Why(Enum):
    """What keeps ranks waiting of which none is late all the time."""

    #: They are late in turn.
    TURNS = "turns"
    #: Some wait much longer than others.
    SOME = "some"
    #: Long transfers, which they leave one after the other.
    TRANSFERS = "transfers"


class Uneven(NamedTuple):
    """What ranks lose because their work is uneven; shares of the step time, 0 to 1."""

    why: Why
    #: What ranks wait that wait least and most.
    least: float
    most: float
    #: What they would save if no rank waited.
    saves: float


def uneven(found: StepWaits) -> Uneven | None:
    """Return what uneven work costs a job without stragglers and pipelines; ``None``: too little, or the ranks compete for cores."""
    waits = found.waits.values()
    if len(waits) < 2:
        return None
    least, most, average = min(waits), max(waits), mean(waits)
    in_turn = least >= _ALIKE * average
    saves = average if in_turn else most
    saves = at_most_exposed(saves, found.exposed, 1 if in_turn else len(waits))
    if saves < WORTH or (found.for_cores is not None and found.for_cores >= _EXPLAINS * average):
        return None
    if found.transfer is not None and _TIMES * found.transfer > average:
        return Uneven(Why.TRANSFERS, least, most, saves)
    return Uneven(Why.TURNS if in_turn else Why.SOME, least, most, saves)


def at_most_exposed(waited: float, exposed: float | None, ranks: int) -> float:
    """Return what waiting costs at most, as a share of the step time: what is hidden behind compute costs nothing.

    Args:
        waited: share of the step time.
        exposed: that of all ranks on average; ``None``: not known.
        ranks: how many these are, if all that is exposed may be of one of them.
    """
    return waited if exposed is None else min(waited, exposed * ranks)


def says(found: Uneven) -> str:
    """Return in words how long ranks wait."""
    least, most = percent(found.least), percent(found.most)
    return f"each rank waits for others {least if least == most else f'{least} to {most}'} of its step time"


# -- what it needs ------------------------------------------------------------------------------


def waited_share(
    waited: float, steps: Sequence[float], usual: Collection[float | None], long: Collection[float | None]
) -> float | None:
    """Return the share of its usual steps that a rank waited; ``None``: not known, or part of its waiting was outside these steps.

    Args:
        waited: in all steps; this and the following are in one unit of time.
        steps: durations of the usual ones, ``LEAST_STEPS`` at least.
        usual, long: communication of the usual and of the long steps; ``None``: not known.
    """
    more, total = longer(long, usual), sum(steps)
    if len(steps) < LEAST_STEPS or more is None or waited - more > total:
        return None
    return max(0.0, waited - more) / total


def longer(long: Collection[float | None], usual: Collection[float | None]) -> float | None:
    """Return the communication in long steps beyond the usual: waiting for a checkpoint. ``None``: not known."""
    if not long:
        return 0.0
    known = [comm for comm in usual if comm is not None]
    if None in long or not known:
        return None
    return sum(max(0.0, comm - median(known)) for comm in long if comm is not None)
