"""What a communication share means, in words: what it is made of, and whether it is the bottleneck. Pure."""

from __future__ import annotations

from collections.abc import Collection

from commwatch.analysis.advice import LIMIT, WORTH
from commwatch.collectors.spans import spans
from commwatch.core.units import percent

#: A part of a step spent waiting that is worth a word.
_LEAST_WAITING = 0.01
#: Waiting that is at most so many times the communication is a part of it: both are measured by clocks and windows of their own.
_ALIKE = 1.2


def split(comm: float | None, waiting: float | None, messages: float | None = None, late: Collection[int] = ()) -> str:
    """What a communication share is made of: ``8 % transfer, 44 % waiting for rank 2``.

    Args:
        waiting: the part of it that is waiting for late ranks; ``None``: not known.
        messages: the part of it that is waiting for messages; ``None``: not known, or there are none.
        late: the stragglers, where that part is waiting for them.

    Returns:
        Empty where no part of it is known to be waiting, or more was waited: then they are not of the same time.
    """
    if comm is None or max(waiting or 0.0, messages or 0.0) > _ALIKE * comm:
        return ""
    waiting = min(comm, waiting or 0.0)
    messages = min(comm - waiting, messages or 0.0)
    whom = _named(late) if late else "late ranks"
    parts = [
        f"{percent(part)} waiting for {what}"
        for part, what in ((waiting, whom), (messages, "messages"))
        if part >= _LEAST_WAITING
    ]
    return ", ".join((f"{percent(comm - waiting - messages)} transfer", *parts)) if parts else ""


def bottleneck(
    comm: float | None,
    exposed: float | None,
    waiting: float | None = None,
    messages: float | None = None,
    late: Collection[int] = (),
) -> str:
    """Whether a communication share is above the 30 % line, and hurts; empty where it is below, or not known.

    Args:
        waiting: the part of it that is waiting for late ranks; ``None``: not known.
        messages: the part of it that is waiting for messages; ``None``: not known, or there are none.
        late: the stragglers, where that part is waiting for them.
    """
    if comm is None or comm <= LIMIT:
        return ""
    if exposed is not None and exposed < WORTH:
        return "above 30 %, but hidden behind compute"
    if waiting is not None and 2 * waiting > comm:
        whom = f"{_named(late)} {'are' if len(late) > 1 else 'is'}" if late else "late ranks are"
        return f"above 30 %: {whom} the bottleneck, not the network"
    if 2 * ((waiting or 0.0) + (messages or 0.0)) > comm:
        return "above 30 %: uneven stages or a late rank are likelier than the network"
    return "above 30 %: communication is the bottleneck"


def _named(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {spans(ranks)}"


def of_some(known: int, ranks: int) -> str:
    """Of how many ranks a share is known, where these are not all: `` (3 of 4 ranks)``."""
    return f" ({known} of {ranks} ranks)" if 0 < known < ranks else ""
