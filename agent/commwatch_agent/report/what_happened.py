"""What happened in a run, by its incidents: the first part of its report, and what its length, costs and end are. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from commwatch_agent.incidents.answers import IncidentDetails, IncidentView
from commwatch_agent.incidents.families import Family, families
from commwatch_agent.incidents.incident import JOB_ENDED, STANDSTILLS
from commwatch_agent.incidents.stacks import is_of_user, main_thread
from commwatch_agent.incidents.words import DISAGREE, lasted, lasted_s, no_place, stacks, when
from commwatch_agent.ingest.stragglers import COSTS
from commwatch_agent.ingest.why_late import NO_CORE, QUOTA, SCARCE_CORES
from commwatch_agent.model.endings import exit_says
from commwatch_agent.model.views import JobView
from commwatch_agent.report import html_frame
from commwatch_agent.text.plain_table import paragraph
from commwatch_agent.text.units import counted, percent
from commwatch_alerts.model import INFO, SEVERITIES
from commwatch_collectors.spans import ranks as named

#: A fault, and what followed from it.
Happened = Family[IncidentDetails]
_View = TypeVar("_View", bound=IncidentView)
#: Most causes in full, consequences of each, and frames of a stack.
_MOST, _MOST_EFFECTS, _MOST_FRAMES = 6, 4, 8
#: Incidents that end with one run of the ranks end at times that differ by less.
_AT_ONCE_S = 3.0
#: Stands for a blank at which a line is not broken.
_WHOLE = "\0"


def happened(incidents: Iterable[_View]) -> list[Family[_View]]:
    """Return faults with their consequences: the most severe first, and of those the earliest."""
    found = families(sorted((each for each in incidents if each.state != "pending"), key=_began))
    return sorted(found, key=lambda one: -SEVERITIES.index(one.cause.severity))


def _began(incident: IncidentView) -> float:
    return incident.began_at


def ended_by(found: Sequence[Family[_View]]) -> str:
    """Return what ended a job that failed by its incidents, as ``Hang: rank 2``, or how its rank was lost; empty: none did."""
    first = _fatal(found)
    return "" if first is None else first.says if first.kind == "rank_lost" else first.title


def ending(job: JobView, incidents: Iterable[IncidentView]) -> str:
    """Return how a job ended, by its incidents if they show why it failed; empty: nothing failed, or nothing is known."""
    by = ended_by(happened(incidents)) if job.failed else ""
    return "; ".join(filter(None, (exit_says(job.exit_code) if job.exit_code else "", by))) if by else job.ending


def culprits(found: Sequence[Happened]) -> set[int]:
    """Return the ranks that are to blame for what happened."""
    return {rank for one in found if one.cause.severity != INFO or _lasted_to_the_end(one) for rank in one.cause.ranks}


def _fatal(found: Sequence[Family[_View]]) -> _View | None:
    """Return the fault that ended a job that failed; ``None``: not known. Earlier faults ended runs after which the launcher started the ranks again."""
    lasted_on = [one for one in found if _lasted_to_the_end(one)]
    over_at = max((each.ended_at or 0.0 for one in lasted_on for each in one.every), default=0.0)
    last = (one.cause for one in lasted_on if any((each.ended_at or 0.0) > over_at - _AT_ONCE_S for each in one.every))
    return min(last, key=_began, default=None)


def _lasted_to_the_end(one: Family[_View]) -> bool:
    """Return whether a run ended while ranks did nothing, or after one was lost."""
    ended = [each.kind for each in one.every if each.outcome == JOB_ENDED]
    lost = "rank_lost" in ended and one.cause.severity != INFO
    return lost or any(kind in STANDSTILLS for kind in ended)


def last_at(found: Iterable[Happened]) -> float:
    """Return until when a fault of the ranks lasted, in s of Unix time; 0: there was none."""
    every = (each for one in found for each in one.every if each.kind in STANDSTILLS)
    return max((each.began_at + lasted_s(each) for each in every), default=0.0)


def standstill_s(found: Iterable[Happened]) -> float:
    """Return the rank seconds that passed while ranks of a group did nothing; of faults at one time, those of the costliest."""
    total_s = until = worst_s = 0.0
    every = (each for one in found for each in one.every if each.kind in STANDSTILLS)
    for each in sorted(every, key=_began):
        if each.began_at >= until:
            total_s, worst_s = total_s + worst_s, 0.0
        until, worst_s = max(until, each.began_at + lasted_s(each)), max(worst_s, each.cost_rank_s or 0.0)
    return total_s + worst_s


def late_within(incidents: Iterable[IncidentView], since: float, until: float) -> dict[int, float]:
    """Return the ranks that were late in a time, with the share of it (0 to 1) that the others waited for each; those of at least 5%."""
    shares: dict[int, float] = {}
    for each in (each for each in incidents if each.kind == "straggler" and each.state != "pending"):
        lasts = lasted_s(each)
        inside_s = min(until, each.began_at + lasts) - max(since, each.began_at)
        if each.cost_rank_s and each.waiting and lasts > 0 and inside_s > 0 and until > since:
            share = each.cost_rank_s / len(each.waiting) / lasts * inside_s / (until - since)
            shares |= {rank: shares.get(rank, 0.0) + share for rank in each.ranks}
    return {rank: min(1.0, share) for rank, share in sorted(shares.items()) if share >= COSTS}


def scarce_cores(waited: float | None, found: Sequence[Happened]) -> str:
    """Return in one sentence that the ranks lacked CPU cores; empty: they did not, it is not known, or a late rank lacked more, which is among what happened.

    Args:
        waited: as ``headline.mean_core_wait`` returns it.
    """
    starved = any(each.why_code in {NO_CORE, QUOTA} for one in found for each in one.every)
    if waited is None or waited < SCARCE_CORES or starved:
        return ""
    return (
        f"The ranks lacked CPU cores: their main threads were ready to run, but had no core, {percent(waited)} of the time "
        "(mean of the ranks, over their last half minute at most), which makes compute and communication longer."
    )


def lines(found: Sequence[Happened], cells: int, *, failed: bool, scarce: str = "") -> Iterator[str]:
    """Yield what happened as lines for a terminal of ``cells`` columns; none if nothing did.

    Args:
        failed: the job has failed.
        scarce: what ``scarce_cores`` returns.
    """
    if not found and not scarce:
        return
    yield from ("  what happened", "")
    of_cores = (*paragraph(scarce, cells, first="  * ", rest="    "), "") if scarce else ()
    ended = failed and bool(found)  # what ended the job comes first
    yield from () if ended else of_cores
    for one in _in_full(found, failed=failed):
        yield from paragraph(_marked(one, found, failed=failed), cells, first="  * ", rest="    ")
        for text in _about(one.cause):
            yield from _wrapped(text, one.cause, cells)
        yield from _frames(one.cause)
        if one.cause.remedy:
            yield from _wrapped(f"to do: {one.cause.remedy}", one.cause, cells)
        for _, effect in one.effects[:_MOST_EFFECTS]:
            yield from paragraph(f"therefore: {_head(effect)}", cells, first="    ", rest="      ")
        if len(one.effects) > _MOST_EFFECTS:
            yield f"    and {counted(len(one.effects) - _MOST_EFFECTS, 'more consequence')}"
        yield ""
    yield from of_cores if ended else ()
    rest = _in_short(found, failed=failed)
    if rest:
        yield from (*paragraph(f"also: {rest}", cells, first="  "), "")


def _marked(one: Happened, found: Sequence[Happened], *, failed: bool) -> str:
    """Return the head of a fault with its severity, or that it ended the job."""
    if not _ended_it(one, found, failed=failed):
        return f"{one.cause.severity.upper()}  {_head(one.cause)}"
    # Users, or a machine without memory, may have ended all ranks of a job that made no progress.
    together = any(
        each.kind == "rank_lost" and each.cause in ("interrupted", "all") for one in found for each in one.every
    )
    return f"{'UNTIL THE END' if together and one.cause.kind in STANDSTILLS else 'ENDED THE JOB'}  {_head(one.cause)}"


def _wrapped(text: str, about: IncidentDetails, cells: int) -> Iterator[str]:
    """Yield a text in lines that are not broken inside foreign names."""
    for name in filter(None, (about.group, about.place, about.job_id, *about.nodes)):
        text = text.replace(name, name.replace(" ", _WHOLE))
    yield from (line.replace(_WHOLE, " ") for line in paragraph(text, cells, first="    "))


def html(found: Sequence[Happened], *, failed: bool, scarce: str = "") -> list[str]:
    """Return what happened as parts of a page; none if nothing did; ``failed`` and ``scarce`` as for ``lines``."""
    if not found and not scarce:
        return []
    of_cores = [f"<p>{html_frame.text(scarce)}</p>"] if scarce else []
    ended = failed and bool(found)
    parts = ["<h2>What happened</h2>", *(() if ended else of_cores)]
    for one in _in_full(found, failed=failed):
        parts.append(f"<h3>{html_frame.text(_marked(one, found, failed=failed))}</h3>")
        parts += [f"<p>{html_frame.text(text[:1].upper() + text[1:])}</p>" for text in _about(one.cause)]
        for title, frames in _stacks(one.cause):
            parts.append(f"<details><summary>{title}</summary><pre>{html_frame.text(frames)}</pre></details>")
        parts += [f"<p>To do: {html_frame.text(one.cause.remedy)}</p>"] if one.cause.remedy else []
        effects = "".join(f"<li>{html_frame.text(_head(effect))}</li>" for _, effect in one.effects)
        parts += [f"<p>Therefore:</p><ul>{effects}</ul>"] if effects else []
    parts += of_cores if ended else []
    rest = _in_short(found, failed=failed)
    return [*parts, f"<p>Also: {html_frame.text(rest)}</p>"] if rest else parts


def _ended_it(one: Happened, found: Sequence[Happened], *, failed: bool) -> bool:
    return failed and one.cause is _fatal(found)


def _in_full(found: Sequence[Happened], *, failed: bool) -> list[Happened]:
    """Return what is shown in full: what ended the job comes first."""
    full = [one for one in found if one.cause.severity != INFO or _lasted_to_the_end(one)]
    return sorted(full, key=lambda one: not _ended_it(one, found, failed=failed))[:_MOST]


def _in_short(found: Sequence[Happened], *, failed: bool) -> str:
    """Return the titles of what is not shown in full."""
    full = _in_full(found, failed=failed)
    rest = (one.cause for one in found if one not in full)
    return "; ".join(_head(each) if each.ranks else f"{each.says}, {when(each)}" for each in rest)


def _head(incident: IncidentDetails) -> str:
    return f"{incident.title}, {lasted(incident)}"


def _about(incident: IncidentDetails) -> Iterator[str]:
    """Yield what is known of an incident as sentences: what it was at first, if that differs, what it is, and where."""
    sources = {"probe", "ras", "flight_recorder"}
    causes = [(item.data.get("cause"), item.text) for item in incident.evidence if item.source in sources]
    if causes and causes[0][0] != incident.cause:
        yield f"at first: {causes[0][1]}"
    yield incident.says
    if incident.place and incident.place not in incident.says:
        over_time = (item.text for item in incident.evidence if item.source == "stack" and "part" in item.data)
        whom = "the ranks were" if incident.kind == DISAGREE else f"{named(incident.ranks[:1])} was"
        yield next(over_time, f"{whom} in {incident.place}")
    if not incident.place and (showed := no_place(incident.evidence)):
        yield showed


def _stacks(incident: IncidentDetails) -> list[tuple[str, str]]:
    """Return the Python stacks of an incident with their titles; several where ranks disagree."""
    found = stacks(incident.evidence, incident.kind)
    return [("Python stack" + (f" of rank {rank}" if len(found) > 1 else ""), text) for rank, text in found]


def _frames(incident: IncidentDetails) -> Iterator[str]:
    for title, text in _stacks(incident):
        yield from _frames_of(title, main_thread(text))


def _frames_of(title: str, frames: list[str]) -> Iterator[str]:
    yield from [f"    {title}, the innermost frame first:"] if frames else []
    shown = frames
    if len(frames) > _MOST_FRAMES:  # those of libraries are the first that a reader can do without
        shown = [*frames[:1], *filter(is_of_user, frames[1:])][:_MOST_FRAMES]
    yield from (f"      {frame}" for frame in shown)
    if shown != frames:
        yield f"      … {counted(len(frames) - len(shown), 'more frame')}: `commwatch diagnose` shows them"
