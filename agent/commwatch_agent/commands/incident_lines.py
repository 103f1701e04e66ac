"""Incidents as lines of a terminal: each cause before its consequences, and what both commands say of one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from commwatch_agent.incidents.answers import IncidentView
from commwatch_agent.incidents.words import cost, when

_View = TypeVar("_View", bound=IncidentView)


def causes(incidents: Iterable[_View]) -> list[_View]:
    """Return the incidents that no other one of them explains."""
    every = list(incidents)
    here = {each.id for each in every}
    return [each for each in every if each.consequence_of not in here]


def consequences(cause: _View, incidents: Sequence[_View], depth: int = 1) -> Iterator[tuple[int, _View]]:
    """Yield the incidents that one explains, and those that these explain, each with its distance from the first."""
    for each in incidents:
        if each.consequence_of == cause.id:
            yield depth, each
            yield from consequences(each, incidents, depth + 1)


def uncertain(incidents: Iterable[_View]) -> list[_View]:
    """Return the pending incidents that no open one explains."""
    every = list(incidents)
    is_open = {each.id for each in every if each.state == "open"}
    return [each for each in every if each.state == "pending" and each.consequence_of not in is_open]


def happened(incidents: Iterable[_View]) -> list[_View]:
    """Return the incidents of an ended job as they began."""
    return sorted(incidents, key=lambda each: each.began_at)


def lasted(incident: IncidentView) -> str:
    """Return when an incident was and what it costs, as ``since 14:03:10 UTC, for 12.0 s so far, 48.0 s of rank time``."""
    return ", ".join(filter(None, (when(incident), cost(incident))))


def about(incident: IncidentView) -> str:
    """Return what an incident is, where in the code, when, and what it costs, in one line."""
    at = f" in {incident.place}" if incident.place else ""
    return f"{incident.title}{at}, {lasted(incident)}"
