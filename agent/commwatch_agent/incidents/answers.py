"""Incidents as the API shows them, and those of several nodes merged by id. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from commwatch_agent.analysis.advice_facts import Whys
from commwatch_agent.incidents.incident import EvidenceItem, Incident, with_new
from commwatch_agent.incidents.words import place as place_of
from commwatch_agent.incidents.words import title, what_to_do, why_late
from commwatch_alerts.model import SEVERITIES

#: In this order they are listed.
_STATES = ("open", "pending", "ended")


@dataclass(frozen=True)
class IncidentView:
    """One incident. Times are Unix seconds; ``None``: not known, or not yet."""

    id: str
    #: ``hang``, ``stalled``, ``desync``, ``straggler``, ``rank_lost``, ``comm_bound`` and others (docs/incidents.md).
    kind: str
    #: ``info``, ``warning`` or ``critical``.
    severity: str
    #: ``pending``: its condition has not held for long enough; ``open``; ``ended``.
    state: str
    #: Empty for an incident of a node.
    job_id: str
    #: Host names of the nodes that it is about.
    nodes: list[str]
    #: The culprits, which may be unknown, and the ranks that wait.
    ranks: list[int]
    waiting: list[int]
    group: str
    group_id: str
    op: str
    seq: int | None
    #: When it began by the evidence, when it was concluded, when it last was there by the evidence, and when it ended.
    began_at: float
    seen_at: float
    last_at: float
    ended_at: float | None
    #: Whether it has not ended, and its condition was found in the last 15 s; an alert may fire on for longer.
    holds: bool = field(default=True, kw_only=True)
    #: ``recovered`` or ``job_ended``; ``None``: it has not ended.
    outcome: str | None
    #: Rank seconds lost so far, and the share of the time (0 to 1) while it lasted.
    cost_rank_s: float | None
    share: float | None
    #: Code of the cause, one sentence with numbers, and where in the code the first culprit is, as ``load (train.py:88)``; empty: not known.
    cause: str
    says: str
    place: str
    #: Of a straggler: the code of why it is late (``ingest.why_late``), as ``says`` has it; empty: not known.
    why_code: str = field(default="", kw_only=True)
    #: What people call it, as ``Hang: rank 2``, and what to do about it.
    title: str
    remedy: str
    #: Id of the incident that explains this one.
    consequence_of: str | None


@dataclass(frozen=True)
class IncidentDetails(IncidentView):
    """One incident with its evidence."""

    evidence: list[EvidenceItem]


_View = TypeVar("_View", bound=IncidentView)
_LISTS = frozenset({"nodes", "ranks", "waiting", "evidence"})


def view_of(incident: Incident) -> IncidentView:
    """Return an incident as lists show it."""
    return IncidentView(**_values(incident, IncidentView))


def details_of(incident: Incident) -> IncidentDetails:
    """Return an incident with its evidence."""
    return IncidentDetails(**_values(incident, IncidentDetails))


def _values(incident: Incident, kind: type[IncidentView]) -> dict[str, Any]:
    found = {each.name: getattr(incident, each.name) for each in fields(kind) if hasattr(incident, each.name)}
    why = why_late(incident.details)
    about = incident.kind, why or incident.cause, incident.job_id, incident.evidence
    found |= {
        "last_at": incident.there_until,
        "holds": incident.holds and incident.ended_at is None,
        "title": title(incident.kind, incident.ranks, incident.cause, incident.evidence),
        "place": place_of(incident.evidence, incident.kind),
        "why_code": why,
        "remedy": what_to_do(*about, is_over=incident.ended_at is not None),
    }
    return {name: list(value) if name in _LISTS else value for name, value in found.items()}


def whys_of(incidents: Iterable[IncidentView]) -> Whys:
    """Return why ranks waited, where that is known; of a rank that was late more than once, the reason of what is open, or was last."""
    every = sorted(incidents, key=lambda each: (each.ended_at is None, each.last_at))
    late = [each for each in every if each.kind == "straggler"]
    of_links = (each.share or 0.0 for each in every if each.kind == "slow_link")
    of_ranks = {rank: each.why_code for each in late for rank in each.ranks}
    at = {rank: each.place if rank == each.ranks[0] else "" for each in late for rank in each.ranks}
    costs: dict[int, float] = {}
    for each in late:
        if len(each.ranks) == 1 and each.state != "pending":
            costs[each.ranks[0]] = costs.get(each.ranks[0], 0.0) + (each.cost_rank_s or 0.0)
    return Whys(
        {rank: code for rank, code in of_ranks.items() if code},
        max(of_links, default=0.0),
        frozenset(of_ranks),
        any(each.kind == "rank_lost" and each.cause == "interrupted" for each in every),
        {rank: place for rank, place in at.items() if place},
        {rank: spent_s for rank, spent_s in costs.items() if spent_s > 0},
    )


@dataclass(frozen=True)
class IncidentFilter:
    """Which incidents are wanted; ``None``: any."""

    states: Collection[str] | None = None
    kind: str | None = None
    #: At least this severity.
    severity: str | None = None
    #: Those that lasted at some time in this range, in s of Unix time.
    since: float = 0.0
    until: float = float("inf")

    def holds(self, incident: Incident | IncidentView) -> bool:
        """Return whether an incident is wanted."""
        severe = self.severity is None or SEVERITIES.index(incident.severity) >= SEVERITIES.index(self.severity)
        lasted = incident.began_at < self.until and (incident.ended_at is None or incident.ended_at >= self.since)
        return (
            severe
            and lasted
            and self.kind in (None, incident.kind)
            and (self.states is None or incident.state in self.states)
        )


def in_order(views: Iterable[_View]) -> list[_View]:
    """Return open incidents first, then pending and ended ones; of each the worst and latest first, and consequences after their causes."""
    known = {each.id: each for each in views}

    def depth(view: _View) -> int:
        found, at = 0, view.consequence_of
        while at in known and found < len(known):
            found, at = found + 1, known[at].consequence_of
        return found

    return sorted(
        known.values(),
        key=lambda each: (
            _STATES.index(each.state),
            depth(each),
            -SEVERITIES.index(each.severity),
            -each.began_at,
            each.id,
        ),
    )


def latest_of(views: Iterable[_View], limit: int) -> list[_View]:
    """Return incidents ``in_order``, of the ended ones only the latest ``limit``."""
    ordered = in_order(views)
    ended = sorted((each for each in ordered if each.ended_at is not None), key=lambda each: -(each.ended_at or 0.0))
    dropped = {each.id for each in ended[limit:]}
    return [each for each in ordered if each.id not in dropped]


def merged(parts: Iterable[Iterable[_View]]) -> list[_View]:
    """Return the incidents of several agents, each once: as the agent has it that knows most of it, with the evidence of all."""
    found: dict[str, list[_View]] = {}
    for each in (each for part in parts for each in part):
        found.setdefault(each.id, []).append(each)
    return in_order(_united(max(views, key=_knowledge), views) for views in found.values())


def _united(best: _View, views: Collection[_View]) -> _View:
    """Return an incident with the evidence of several views of it, and what follows from that."""
    if not isinstance(best, IncidentDetails) or len(views) == 1:
        return best
    every = (item for view in (best, *views) if isinstance(view, IncidentDetails) for item in view.evidence)
    items = with_new((), every)
    remedy = what_to_do(best.kind, best.why_code or best.cause, best.job_id, items, is_over=best.ended_at is not None)
    return replace(
        best, evidence=sorted(items, key=lambda each: each.at), place=place_of(items, best.kind), remedy=remedy
    )


def _knowledge(view: IncidentView) -> tuple[object, ...]:
    """Return a key that is larger for an agent that knows more: that it is not over, whom it is about, of how many nodes."""
    return view.state != "pending", bool(view.ranks), SEVERITIES.index(view.severity), len(view.nodes), view.last_at
