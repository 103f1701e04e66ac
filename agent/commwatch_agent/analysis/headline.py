"""Explains a communication share in words: its parts, and whether it is the bottleneck. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from statistics import fmean

from commwatch_agent.analysis.advice_facts import BOTTLENECK_SHARE, CORES_RULE, LATE_RULE, WORTH
from commwatch_agent.ingest.why_late import IN_SHORT, OWN, SCARCE_CORES
from commwatch_agent.model.views import RankView
from commwatch_agent.text.units import in_hundredths, percent
from commwatch_collectors.spans import ranks as named

#: Smaller shares of a step spent waiting are not mentioned.
_LEAST_WAITING = 0.01
#: Waiting up to this factor above communication is still a part of it, because their clocks and windows differ.
_ALIKE = 1.2
_UNEVEN = ": uneven stages or a late rank are more likely the cause than the network"


def with_late(costs: Iterable[float], waiting: float | None) -> float | None:
    """Return the share of time that ranks wait for late ones, the mean over all ranks, if it costs them so much by stragglers alone.

    Args:
        costs: of each straggler, as a mean over all ranks.
        waiting: as measured, perhaps over a longer time, and without waits for messages; ``None``: not known.
    """
    return max((share for share in (waiting, *costs) if share is not None), default=None)


def mean_core_wait(ranks: Iterable[RankView]) -> float | None:
    """Return the mean of ``RankView.core_wait_share`` (0 to 1) of the ranks for which it is known; ``None``: of none."""
    known = [rank.core_wait_share for rank in ranks if rank.core_wait_share is not None]
    return fmean(known) if known else None


def awaited(late: Mapping[int, float], waiting: float | None) -> list[int]:
    """Return the stragglers if at least half of the waiting is for them, else none.

    Args:
        late: share of time (0 to 1) that the others wait for each straggler.
        waiting: share of time that ranks wait for late ones, the mean over all ranks; ``None``: not known.
    """
    return sorted(late) if 2 * max(late.values(), default=0.0) >= (waiting or 0.0) else []


def first(comm: float, waiting: float, late: Collection[int], why: str, cores: float | None) -> str:
    """Return what to look at first, for headline and advice: the rule on late ranks, that on CPU cores, or neither (empty).

    A late rank comes first if the others wait for it a tenth of the time. But ranks without cores are late, too, so it comes before these only if it
    explains most of the communication, or its reason is its own.

    Args:
        late, why, cores: as for ``bottleneck``.
    """
    is_worth = bool(late) and waiting >= WORTH
    if (late and 2 * waiting > comm) or (is_worth and why in OWN):
        return LATE_RULE
    if cores is not None and cores >= SCARCE_CORES:
        return CORES_RULE
    return LATE_RULE if is_worth else ""


def split(comm: float | None, waiting: float | None, messages: float | None = None, late: Collection[int] = ()) -> str:
    """Return the parts of a communication share in words: ``8% transfer, 44% waiting for rank 2``; rounded, they add up to it.

    Where the waiting is as long as the communication, the parts are not known: ``mostly waiting for rank 2``.

    Args:
        comm: communication share, 0 to 1; ``None``: not known.
        waiting: its part spent waiting for late ranks; ``None``: not known.
        messages: its part spent waiting for messages; ``None``: not known, or there are none.
        late: the stragglers, if ``waiting`` is for them.

    Returns:
        Empty if no part is known to be waiting, or if the waiting is longer, because then their windows differ.
    """
    if comm is None or max(waiting or 0.0, messages or 0.0) > _ALIKE * comm:
        return ""
    whom = named(late) if late else "late ranks"
    waiting = waiting or 0.0
    if waiting >= _LEAST_WAITING and in_hundredths(waiting) >= in_hundredths(comm):
        # Of a time that differs a little. What is left for the transfer is not known, and not 0.
        return f"mostly waiting for {whom}"
    messages = min(comm - waiting, messages or 0.0)
    parts = [
        f"{percent(part)} waiting for {what}"
        for part, what in ((waiting, whom), (messages, "messages"))
        if part >= _LEAST_WAITING
    ]
    rest = in_hundredths(comm) - sum(in_hundredths(part) for part in (waiting, messages) if part >= _LEAST_WAITING)
    return ", ".join((f"{max(0, rest)}% transfer", *parts)) if parts else ""


def bottleneck(
    comm: float | None,
    exposed: float | None,
    waiting: float | None = None,
    messages: float | None = None,
    late: Collection[int] = (),
    *,
    why: str = "",
    cores: float | None = None,
    iterations: bool = False,
    stragglers: Collection[int] = (),
) -> str:
    """Return in words whether a communication share is the bottleneck; empty if it is at most 30%, or not known.

    The network can be the bottleneck only if the transfer alone, without any waiting, is above 30%.

    Args:
        waiting: its part spent waiting for late ranks; ``None``: not known.
        messages: its part spent waiting for messages; ``None``: not known, or there are none.
        late: the stragglers, if ``waiting`` is for them.
        why: why they are late, as ``ingest.why_late.common_why`` returns it.
        cores: share of the time that main threads wait for a CPU core, as ``mean_core_wait`` returns it; ``None``: not known.
        iterations: the steps are turns of a cycle of operations, perhaps those of a server, whose ranks wait for its next request.
        stragglers: all of them, also if less than half of the waiting is for them.
    """
    if comm is None or comm <= BOTTLENECK_SHARE:
        return ""
    if exposed is not None and exposed < WORTH:
        return "above 30%, but hidden behind compute"
    others = sorted(set(stragglers) - set(late))
    which = first(comm, waiting or 0.0, late, why, cores)
    if which == LATE_RULE:
        says = _of_late(comm, waiting, messages, late, why)
    elif which == CORES_RULE:
        says = f": look first at the CPUs, as main threads wait for a core {percent(cores)} of the time"
    else:
        says = _of_parts(comm, waiting, messages, iterations=iterations)
    return f"above 30%{says}" + (f"; late: {named(others)}" if others else "")


def _of_late(comm: float, waiting: float | None, messages: float | None, late: Collection[int], why: str) -> str:
    """Return that named ranks are the bottleneck, or what they lack, or that they are late; ``late``: one at least."""
    if 2 * (waiting or 0.0) > comm:
        return f": {_late_are(late, why)} the bottleneck, not the network"
    if why in IN_SHORT:
        return f": look first at {named(late)}, {IN_SHORT[why]}"
    who = f": look first at {named(late)}, which {'are' if len(late) > 1 else 'is'} late"
    is_much = comm - (waiting or 0.0) - (messages or 0.0) > BOTTLENECK_SHARE
    return f"{who}; transfer alone is above 30%, too" if is_much else who


def _of_parts(comm: float, waiting: float | None, messages: float | None, *, iterations: bool) -> str:
    """Return what a share above 30% means by its parts alone."""
    if waiting is None and messages is None:
        return "; how much of it is waiting for late ranks is not known"
    late, waits = waiting or 0.0, (waiting or 0.0) + (messages or 0.0)
    if 2 * waits > comm and iterations:
        return ": ranks wait for one another, or for the next request, rather than for the network"
    if 2 * waits > comm:
        late_only = 2 * late > comm
        return ": late ranks are the bottleneck, not the network" if late_only else _UNEVEN
    is_much = comm - waits > BOTTLENECK_SHARE
    return ": communication is the bottleneck" if is_much else " only because ranks wait for one another"


def _late_are(late: Collection[int], why: str) -> str:
    """Return who the bottleneck is, with the reason if that is known, and the verb; ``late``: one at least."""
    reason = f", {IN_SHORT[why]}," if why in IN_SHORT else ""
    return f"{named(late)}{reason} {'are' if len(late) > 1 else 'is'}"


def of_some(known: int, ranks: int) -> str:
    """Return for how many ranks a share is known, as `` (3 of 4 ranks)``; empty if for all or none."""
    return f" ({known} of {ranks} ranks)" if 0 < known < ranks else ""
