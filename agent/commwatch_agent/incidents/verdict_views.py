"""Incidents as verdicts: what ranks do wrong at this moment, in the form of ``/api/v1/verdicts``. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.incidents.incident import ONE_WAIT, STANDSTILLS, Incident, family

#: Kinds of incidents that are shown as verdicts.
KINDS = STANDSTILLS | {"straggler", "corruption"}
#: What a verdict has beside the fields of an incident.
_DETAILS = ("says", "source", "why", "why_code", "idle_ranks", "parameter", "step", "sides")
#: A condition that was found so many seconds ago still holds: looks are a second apart. An ended fault must not be a verdict for long.
_HOLDS_S = 2.0


def details_of(verdict: Verdict) -> dict[str, object]:
    """Return the known fields of a verdict that an incident stores in addition to its own."""
    return {name: value for name, value in asdict(verdict).items() if name in _DETAILS and value is not None}


def subject(verdict: Verdict) -> tuple[str, ...]:
    """Return what a verdict is about: a rank for a straggler, all operations of a kind for waits that are no fault, else one operation."""
    if verdict.kind == "waiting":
        return ("waiting", verdict.group_id, verdict.op)
    if verdict.kind == "straggler":
        return tuple(map(str, verdict.ranks))
    if verdict.kind == "corruption":
        return (verdict.group_id, verdict.parameter or verdict.op)
    return (verdict.group_id or verdict.group, verdict.op if verdict.seq is None else str(verdict.seq))


def verdicts_of(incidents: Iterable[Incident], now: float, job: str | None = None) -> list[Verdict]:
    """Return the open incidents whose condition holds now as verdicts, the longest first.

    Args:
        now: Unix time in s.
        job: only those of this job; ``None``: of all.
    """
    found = [
        _verdict(each, now)
        for each in incidents
        if each.kind in KINDS and each.state == "open" and now - each.last_at < _HOLDS_S and job in (None, each.job_id)
    ]
    return sorted(found, key=lambda verdict: -verdict.since_s)


def late_now(incidents: Iterable[Incident], now: float) -> dict[int, float]:
    """Return the ranks that are late now, with the share of time (0 to 1) that the others wait for each."""
    late = (each for each in verdicts_of(incidents, now) if each.kind == "straggler")
    return {rank: each.cost_share or 0.0 for each in late for rank in each.ranks}


def _verdict(incident: Incident, now: float) -> Verdict:
    details: dict[str, Any] = {name: incident.details[name] for name in _DETAILS if name in incident.details}
    return Verdict(
        incident.kind,
        incident.cause,
        incident.job_id,
        incident.group_id,
        incident.group,
        incident.seq,
        incident.op,
        list(incident.ranks),
        list(incident.waiting),
        max(0.0, now - incident.began_at),
        cost_share=incident.share if incident.kind == "straggler" else None,
        ago_s=0.0 if incident.until is None else max(0.0, now - incident.until),
        **{"says": incident.says, **details},
    )


def merged_verdicts(parts: Iterable[Iterable[Verdict]], job: str, seen: Iterable[int]) -> list[Verdict]:
    """Return the verdicts of the agents of a job, each once: as the agent has it that knows most of it; the longest first.

    Args:
        job: its name here; nodes may give a run different names.
        seen: its ranks that some agent sees. That one of them misses another one's data says nothing.
    """
    found: dict[tuple[str, ...], Verdict] = {}
    known = set(seen)
    for each in (replace(each, job_id=job) for part in parts for each in part):
        if each.cause != "unseen" or not known.issuperset(each.ranks):
            at = (family(each.kind), *subject(each))
            found[at] = max(found.get(at, each), each, key=_knowledge)
    return sorted(found.values(), key=lambda verdict: -verdict.since_s)


def _knowledge(verdict: Verdict) -> tuple[int, bool, int]:
    """Return a key that is larger for an agent that knows more: that ranks hang, of the culprit, and of more ranks."""
    how = ONE_WAIT.index(verdict.kind) if verdict.kind in ONE_WAIT else 0
    return how, verdict.cause != "unseen", len(verdict.ranks) + len(verdict.waiting)
