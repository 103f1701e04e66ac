"""Incidents with what follows from them, as views show them: each consequence below its cause. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from commwatch_agent.incidents.answers import IncidentView
from commwatch_agent.incidents.incident import ONE_WAIT, SHARES, STANDSTILLS

_View = TypeVar("_View", bound=IncidentView)
#: Most by which the begin of one wait differs between two incidents, in s.
_AT_ONCE_S = 1.0


@dataclass(frozen=True)
class Family(Generic[_View]):
    """An incident that no other one of them explains, and its consequences."""

    cause: _View
    #: With the distance of each from the cause, 1 or more.
    effects: tuple[tuple[int, _View], ...]

    @property
    def every(self) -> list[_View]:
        """All of them."""
        return [self.cause, *(each for _, each in self.effects)]


def families(incidents: Iterable[_View]) -> list[Family[_View]]:
    """Return incidents as families, each incident once, in the given order; a long wait is left out below the stall or hang that it became."""
    every = list({each.id: each for each in incidents}.values())
    left = {each.id for each in every}
    became = _became_faults(every)
    found: list[Family[_View]] = []

    def below(cause: str, depth: int) -> Iterator[tuple[int, _View]]:
        for each in every:
            if each.consequence_of == cause and each.id in left:
                left.remove(each.id)
                if each.id in became:
                    yield from below(each.id, depth)
                else:
                    yield depth, each
                    yield from below(each.id, depth + 1)

    first = [each for each in every if each.consequence_of not in left]
    for each in (*first, *every):  # others only explain each other
        if each.id in left:
            left.remove(each.id)
            found.append(Family(each, tuple(below(each.id, 1))))
    return found


def _became_faults(every: Collection[IncidentView]) -> set[str]:
    """Return the ids of the long waits that became a stall or a hang."""
    faults = [each for each in every if each.kind in ONE_WAIT]
    waits = (each for each in every if each.kind == "waiting")
    return {each.id for each in waits if any(_is_one_wait(each, fault) for fault in faults)}


def _is_one_wait(a: IncidentView, b: IncidentView) -> bool:
    where_a, where_b = ((each.job_id, each.group_id, each.op, each.seq) for each in (a, b))
    return where_a == where_b and abs(a.began_at - b.began_at) <= _AT_ONCE_S


def uncertain(incidents: Iterable[_View]) -> list[_View]:
    """Return the pending incidents that no open one explains; while a job makes no progress, shares of its last steps are no news."""
    every = list(incidents)
    is_open = {each.id for each in every if each.state == "open"}
    stuck = {each.job_id for each in every if each.state == "open" and each.kind in STANDSTILLS}
    return [
        each
        for each in every
        if each.state == "pending"
        and each.consequence_of not in is_open
        and not (each.job_id in stuck and each.kind in SHARES)
    ]
