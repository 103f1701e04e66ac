"""Incidents in words, the same in all views: a title, when, at which cost, where the culprit was, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from commwatch_agent.incidents.incident import JOB_ENDED, MOMENTS, EvidenceItem
from commwatch_agent.model.endings import ended_by
from commwatch_agent.text.units import seconds, time_of_day
from commwatch_alerts.remedies import TITLES, remedy
from commwatch_collectors.spans import ranks as named

#: The kind of incident that has several sides, each with its place and stack.
DISAGREE = "desync"
#: Begin of the sentence on a stack that could not be taken; the last one of a remedy.
NO_STACK = "No Python stack of rank"
#: Titles of losses of no single rank, by cause.
_LOST = {"all": "All ranks ended", "interrupted": "Interrupted"}


class Timed(Protocol):
    """The kind, times and costs of an ``Incident`` or a view of it."""

    @property
    def kind(self) -> str: ...
    @property
    def began_at(self) -> float: ...
    @property
    def last_at(self) -> float: ...
    @property
    def ended_at(self) -> float | None: ...
    @property
    def holds(self) -> bool: ...
    @property
    def outcome(self) -> str | None: ...
    @property
    def cost_rank_s(self) -> float | None: ...


def title(kind: str, ranks: Iterable[int], cause: str = "", evidence: Iterable[EvidenceItem] = ()) -> str:
    """Return what people call an incident.

    Args:
        cause, evidence: of the incident, which tell how a rank was lost; default: not known.

    >>> title("hang", [2])
    'Hang: rank 2'
    """
    whom = list(ranks)
    name = TITLES.get(kind, kind)
    if kind == "rank_lost" and cause in _LOST:
        name = _LOST[cause]
    elif kind == "rank_lost":
        name = _how_lost(item.data for item in evidence if item.source == "ending") or name
    return f"{name}: {named(whom)}" if whom else name


def _how_lost(endings: Iterable[Mapping[str, object]]) -> str:
    """Return by what a rank was lost, as the begin of a title; empty: not known."""
    known = list(endings)
    raised = next((str(each["raised"]) for each in known if each.get("raised")), "")
    status = next((status for each in known if isinstance(status := each.get("status"), int)), None)
    by = ended_by(raised, status)
    how = "" if raised else "ended by " if (status or 0) < 0 else "ended with "
    return by and f"Rank {how}{by}"


def lasted_s(incident: Timed) -> float:
    """Return how long an incident has lasted, in s."""
    return max(0.0, (incident.last_at if incident.ended_at is None else incident.ended_at) - incident.began_at)


def when(incident: Timed) -> str:
    """Return when an incident was, as ``14:03:10 UTC, for 60.0 s, until 14:04:10 UTC``; the loss of a rank is of one moment."""
    if incident.kind in MOMENTS:
        return f"at {time_of_day(incident.began_at)}"
    since, lasted = time_of_day(incident.began_at), seconds(lasted_s(incident))
    if is_over(incident):
        return f"since {since}, for {lasted}; not seen since {time_of_day(incident.last_at)}"
    if incident.ended_at is None:
        return f"since {since}{f', for {lasted} so far' if lasted_s(incident) >= 1 else ''}"
    until = "the job ended" if incident.outcome == JOB_ENDED else time_of_day(incident.ended_at)
    return f"{since}, for {lasted}, until {until}"


def is_over(incident: Timed) -> bool:
    """Return whether an incident is only open because its alert fires on."""
    return incident.ended_at is None and not incident.holds


def end(incident: Timed) -> str:
    """Return how an incident ended, as ``Recovered after 67.5 s.``; empty: it has not ended."""
    if incident.ended_at is None:
        return ""
    if incident.outcome != JOB_ENDED:
        return f"Recovered after {seconds(lasted_s(incident))}."
    if incident.kind in MOMENTS:
        return "All ranks of the job ended with it."
    return f"It lasted until the job ended, for {seconds(lasted_s(incident))}."


def cost(incident: Timed) -> str:
    """Return what an incident costs, as ``4m00s of rank time``; empty: not known."""
    return f"{seconds(incident.cost_rank_s)} of rank time" if incident.cost_rank_s else ""


def lasted(incident: Timed) -> str:
    """Return when an incident was and what it costs, as ``since 14:03:10 UTC, for 12.0 s so far; cost 48.0 s of rank time``."""
    spent = cost(incident)
    return f"{when(incident)}{f'; cost {spent}' if spent else ''}"


def place(evidence: Iterable[EvidenceItem], kind: str = "") -> str:
    """Return where in the code the first culprit was, as ``load (train.py:88)``: where it raised, else of its stack; empty: not known.

    Ranks that disagree have several places: ``step (train.py:88) on rank 0 and test (train.py:12) on rank 1``.
    """
    items = list(evidence)
    raised = ((item, item.data.get("at")) for item in items if item.source == "ending")
    stacks = ((item, item.data.get("place")) for item in items if item.source == "stack")
    found = [(item.data.get("rank"), str(at)) for item, at in (*raised, *stacks) if at]
    if kind != DISAGREE:
        return next((at for _, at in found), "")
    of_rank = {rank: at for rank, at in reversed(found) if isinstance(rank, int)}
    places = {at: sorted(rank for rank in of_rank if of_rank[rank] == at) for _, at in sorted(of_rank.items())}
    return " and ".join(f"{at} on {named(ranks)}" for at, ranks in places.items())


def stacks(evidence: Iterable[EvidenceItem], kind: str) -> list[tuple[int, str]]:
    """Return ranks and their Python stacks: of the first culprit of which one was taken; of ranks that disagree all, each place once."""
    taken = [item.data for item in evidence if item.source == "stack" and item.data.get("stack")]
    of_places = {data.get("place") or data["rank"]: data for data in reversed(taken)}
    shown = of_places.values() if kind == DISAGREE else taken[:1]
    return sorted(((int(str(data["rank"])), str(data["stack"])) for data in shown), key=lambda of_rank: of_rank[0])


def no_stack(evidence: Iterable[EvidenceItem]) -> str:
    """Return what to install or to permit where no stack of a culprit could be taken; empty: the place is known, or it was not looked for."""
    items = list(evidence)
    missing = [item.data for item in items if item.source == "stack" and item.data.get("needs")]
    return f"{NO_STACK} {missing[0]['rank']}: {missing[0]['needs']}." if missing and not place(items) else ""


def no_place(evidence: Iterable[EvidenceItem]) -> str:
    """Return what stacks of a culprit showed that show no place of its own; empty: the place is known, or none was taken."""
    taken = [item for item in evidence if item.source == "stack" and not item.data.get("needs")]
    return "" if not taken or any(item.data.get("place") for item in taken) else taken[-1].text


def why_late(details: Mapping[str, object]) -> str:
    """Return why a straggler is late, as its sentence has it: a code of ``ingest.why_late``; empty: not known, or no straggler.

    Args:
        details: of its incident. The evidence has the reasons of earlier looks, too.
    """
    return str(details.get("why_code") or "")


def what_to_do(kind: str, cause: str, job: str, evidence: Iterable[EvidenceItem], *, is_over: bool) -> str:
    """Return what to do about an incident, with the names filled in.

    Args:
        cause: its cause; of a straggler, why it is late, where that is known.
        is_over: its process may be gone.
    """
    items = list(evidence)
    advice = [str(item.data["do"]) for item in items if item.source == "nccl_log" and item.data.get("do")]
    if advice:  # of the finding in the log
        return advice[-1]
    pid = None if is_over else next((item.data.get("pid") for item in items if item.data.get("pid")), None)
    about = {"pid": "" if pid is None else str(pid), "place": place(items), "job": job}
    advice = [
        remedy(kind, cause, {name: text for name, text in about.items() if text}),
        no_stack(items),
    ]
    return " ".join(filter(None, advice))
