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


class Comm(NamedTuple):
    """The communication of a rank in one step, in any unit of time; ``None``: not known."""

    seq: int
    comm: float | None
    long: bool


class Beyond(NamedTuple):
    """The communication of a rank in its long steps beyond that of its usual ones."""

    longer: float
    #: What another rank did not have in the same step: waiting, as for a rank that saves a checkpoint. What all ranks have is a transfer.
    waited: float


def beyond_usual(ranks: Mapping[int, Collection[Comm]]) -> dict[int, Beyond | None]:
    """Return by rank what it communicated in its long steps beyond the usual; ``None``: not known."""
    numbers = {step.seq for steps in ranks.values() for step in steps if step.long}
    more: dict[int, dict[int, float]] = {}
    of_steps: dict[int, list[float]] = {}
    for rank, steps in ranks.items():
        known = [step.comm for step in steps if not step.long and step.comm is not None]
        usual = median(known) if known and numbers else None
        found = {
            step.seq: max(0.0, step.comm - usual)
            for step in steps
            if usual is not None and step.comm is not None and step.seq in numbers
        }
        more[rank] = found
        for seq, longer in found.items():
            of_steps.setdefault(seq, []).append(longer)
    # What even the rank has that has least; 0 where no other rank has the step.
    of_all = {seq: min(found) if len(found) > 1 else 0.0 for seq, found in of_steps.items()}
    beyond: dict[int, Beyond | None] = {}
    for rank, steps in ranks.items():
        long = [step.seq for step in steps if step.long]
        own = [more[rank][seq] for seq in long if seq in more[rank]]
        is_known = len(own) == len(long)
        beyond[rank] = Beyond(sum(own), sum(own) - sum(of_all[seq] for seq in long)) if is_known else None
    return beyond


def waited_share(waited: float, steps: Sequence[float], beyond: Beyond | None, comm: float | None) -> float | None:
    """Return the share of its usual steps that a rank waited; ``None``: not known, or part of its waiting was outside these steps.

    A rank waits in communication only, so what is more was outside these steps, too.

    Args:
        waited: in all steps; this and the following are in one unit of time.
        steps: durations of the usual ones, ``LEAST_STEPS`` at least.
        beyond: as ``beyond_usual`` returns it.
        comm: comm share of the usual steps; ``None``: not known.
    """
    total = sum(steps)
    if len(steps) < LEAST_STEPS or beyond is None or waited - beyond.waited > total:
        return None
    share = max(0.0, waited - beyond.waited) / total
    return share if comm is None else min(share, comm)
