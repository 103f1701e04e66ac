"""Incidents with what follows from them, as views show them: each consequence below its cause. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from commwatch_agent.incidents.answers import IncidentView

_View = TypeVar("_View", bound=IncidentView)


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
    """Return incidents as families, each incident once, in the given order."""
    every = list({each.id: each for each in incidents}.values())
    left = {each.id for each in every}
    found: list[Family[_View]] = []

    def below(cause: str, depth: int) -> Iterator[tuple[int, _View]]:
        for each in every:
            if each.consequence_of == cause and each.id in left:
                left.remove(each.id)
                yield depth, each
                yield from below(each.id, depth + 1)

    first = [each for each in every if each.consequence_of not in left]
    for each in (*first, *every):  # others only explain each other
        if each.id in left:
            left.remove(each.id)
            found.append(Family(each, tuple(below(each.id, 1))))
    return found


def uncertain(incidents: Iterable[_View]) -> list[_View]:
    """Return the pending incidents that no open one explains."""
    every = list(incidents)
    is_open = {each.id for each in every if each.state == "open"}
    return [each for each in every if each.state == "pending" and each.consequence_of not in is_open]
