"""What ``commwatch diagnose`` knows, and its conclusion in words: open incidents, what is not certain yet, and what happened to an ended job. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from commwatch.wire.errors import INCOMPLETE
from commwatch.wire.events import P2P
from commwatch.wire.numbers import ahead
from commwatch_agent.analysis.rank_state import shedding, state
from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.incidents.answers import IncidentDetails
from commwatch_agent.incidents.families import families, uncertain
from commwatch_agent.incidents.words import NO_STACK, is_over, lasted, no_place, stacks, when
from commwatch_agent.model.endings import how_ended, is_death
from commwatch_agent.model.views import InFlight, JobView, RankView
from commwatch_agent.report.what_happened import ended_by, ending, happened
from commwatch_agent.sources.stack_capture import Evidence
from commwatch_agent.text import terminal_text
from commwatch_agent.text.plain_table import folded
from commwatch_agent.text.terminal_text import MOST_CELLS
from commwatch_agent.text.units import counted, seconds, time_of_day
from commwatch_alerts.model import INFO
from commwatch_collectors.spans import missing_ranks
from commwatch_collectors.spans import ranks as named

#: A shorter time without the end of an operation says nothing, in s; and a longer one is wrong if it never was so long: ranks of which none waits for
#: another may compile or load data.
_PAUSE_S, _LONG_S = 5.0, 60.0
#: An operation that takes no longer than this, in s, or than so many times its usual time, is no news; and most ranks whose activities are listed.
_WAIT_S, _TIMES, _MOST_DOING = 3.0, 5, 3
#: Within so many seconds, a launcher has started the ranks of a job again.
_STARTS_AGAIN_S = 60.0
#: Kinds of which an ended job is not well even if it recovered, unless they are for information: all ranks were ended at once.
_FATAL = frozenset({"rank_lost", "hang", "desync"})
#: How a rank is that does not go on, by ``rank_state.state``; one that is silent may be in a long call into C.
_TROUBLES = {"stopped": "is stopped", "zombie": "has ended", "silent": "does not run its Python code"}
_EVIDENCE = {"python_stack": "Python stack", "flight_recorder": "PyTorch's Flight Recorder, dumped to"}


@dataclass
class Diagnosis:
    """The answers of all agents, or of the history on an ended job."""

    #: The running jobs, each run once.
    jobs: list[JobView] = field(default_factory=list)
    #: Their ranks, and what these do wrong at this moment.
    ranks: list[RankView] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    #: Those that are open or pending; of an ended job all that were open.
    incidents: list[IncidentDetails] = field(default_factory=list)
    #: Agents that did not answer, by URL, with the reason.
    silent: dict[str, str] = field(default_factory=dict)
    #: Names of running jobs on nodes whose agents do not know each other.
    apart: list[str] = field(default_factory=list)
    #: The job that was asked for, if it has ended.
    ended: JobView | None = None
    #: The latest ended job, and if no job runs its incidents; ``None``: there is none.
    latest: JobView | None = None
    of_latest: list[IncidentDetails] = field(default_factory=list)

    @property
    def open(self) -> list[IncidentDetails]:
        """The open incidents."""
        return [each for each in self.incidents if each.state == "open"]


def without_look(incidents: Iterable[IncidentDetails]) -> set[tuple[str, int]]:
    """Return the ranks, by job and number, whose stacks `diagnose` does not take itself.

    They wait, have a stack already, or are only late: a late rank works all the time, so one look finds any place of a step.
    """
    found = list(incidents)
    waiting = {(each.job_id, rank) for each in found for rank in each.waiting}
    late = {(each.job_id, rank) for each in found if each.kind == "straggler" for rank in each.ranks}
    still = {(each.job_id, rank) for each in found if each.kind != "straggler" for rank in each.ranks}
    evidence = ((each.job_id, item) for each in found for item in each.evidence)
    seen = {
        (job, int(str(item.data["rank"])))
        for job, item in evidence
        if item.source == "stack" and item.data.get("stack")
    }
    return waiting | (late - still) | seen


class Doubt(NamedTuple):
    """Why a job is not healthy for certain."""

    says: str
    #: Something is wrong, but no incident yet.
    is_wrong: bool


def exit_code(seen: Diagnosis, found: Iterable[Doubt]) -> int:
    """Return 0 if nothing is wrong, 1 if something is, 3 if nothing is known to be but some agents did not answer."""
    if seen.ended is not None:
        fatal = any(each.kind in _FATAL and each.severity != INFO for each in seen.incidents)
        wrong = fatal or (seen.ended.failed is not False and bool(ended_by(happened(seen.incidents))))
    else:
        wrong = any(each.severity != INFO and not is_over(each) for each in seen.open)
    wrong = wrong or any(doubt.is_wrong for doubt in found)
    return 1 if wrong else INCOMPLETE if seen.silent else 0


# -- what is not certain -----------------------------------------------------------------------------


def doubts(seen: Diagnosis, now: float) -> list[Doubt]:
    """Return why the running jobs are not healthy for certain, beside open incidents, or a failed one may not be over; ``now``: Unix time in s."""
    past = seen.ended or (None if seen.jobs else seen.latest)
    if past is not None:
        return [*_between_lives(past, now)]
    by_job = {job.job_id: [view for view in seen.ranks if view.job_id == job.job_id] for job in seen.jobs}
    found = [doubt for job in seen.jobs for doubt in _of_job(job, by_job[job.job_id], seen, now)]
    return found + [
        Doubt(f"{each.title} ({_where(each)}), {when(each)}: {each.says}", False) for each in uncertain(seen.incidents)
    ]


def _between_lives(job: JobView, now: float) -> Iterator[Doubt]:
    """Yield a doubt if the launcher of a job that has failed may start it again."""
    may_restart = job.state != "running" and job.failed and job.exit_code is None
    if may_restart and now - job.last_seen_at < _STARTS_AGAIN_S:
        before = f", as {counted(job.restarts, 'time')} before" if job.restarts else ""
        # All at once are often ended by a user.
        at_once = len(job.ranks) > 1 and is_death(job.ending.removeprefix(f"{named(job.ranks)} "))
        yield Doubt(f"whether the launcher of {job.job_id} starts it again{before}", not at_once)


def _of_job(job: JobView, views: list[RankView], seen: Diagnosis, now: float) -> Iterator[Doubt]:
    blamed = {rank for each in seen.open if each.job_id == job.job_id for rank in each.ranks}
    for view in views:
        how = _trouble(view, now)
        if how and view.rank not in blamed:
            yield Doubt(f"rank {view.rank} ({job.job_id}) {how}", state(view) != "silent")
    running = [view for view in views if view.state == "running"]
    if missing := missing_ranks((view.rank for view in views), job.world_size):
        yield Doubt(f"no data from {missing} ({job.job_id})", False)
    part = shedding((view.rank, view.probe_mode) for view in running)
    if part is not None:
        yield Doubt(f"{job.job_id} is {part}; a hang shows only the missing ranks", False)
    elif not any(each.job_id == job.job_id for each in seen.open):
        yield from _awaited(job.job_id, running) or _progress(job.job_id, views)


def _trouble(view: RankView, now: float) -> str:
    """Return why a rank cannot go on; empty: it can, or it has ended properly."""
    if view.state == "gone" or view.raised:
        how = how_ended(view.raised or "", view.raised_at or "", view.raised_says or "", view.exit_status)
        return how if view.ended_at is None else f"{how} {seconds(max(0.0, now - view.ended_at))} ago"
    return _TROUBLES.get(state(view), "")


def _awaited(job_id: str, running: list[RankView]) -> list[Doubt]:
    """Return a doubt if ranks have been in an operation for far longer than is usual for it and at its place, with those that have not come so far."""
    waits = [(op, view.rank) for view in running for op in view.in_flight if not op.queued and _is_long(op)]
    if not waits:
        return []
    op, _ = max(waits, key=lambda wait: wait[0].age_s)
    inside = sorted(rank for each, rank in waits if (each.group_id, each.seq, each.op) == (op.group_id, op.seq, op.op))
    says = f"{named(inside)} of {job_id} in {op.op} {op.seq} of group {op.group} for {seconds(op.age_s)}, usually {seconds(op.usual_s)}"
    missing = [] if op.op in P2P else [view for view in running if _has_not_come(view, op)]
    if missing:
        says += f"; {named([view.rank for view in missing])} {'has' if len(missing) == 1 else 'have'} not come so far"
    doing = [f"rank {view.rank} {view.activity.says}" for view in missing if view.activity is not None][:_MOST_DOING]
    return [Doubt(f"{says} ({', '.join(doing)})" if doing else says, False)]


def _is_long(op: InFlight) -> bool:
    """Return whether an operation takes longer than its kind usually does, and than it ever did at this place."""
    longest_s = max(_WAIT_S, (op.place and op.place.longest_s) or 0.0)
    return op.usual_s is not None and op.age_s > max(longest_s, _TIMES * op.usual_s)


def _has_not_come(view: RankView, op: InFlight) -> bool:
    """Return whether a rank of the group has neither ended a collective nor is inside."""
    last = view.last_seq.get(op.group_id)
    is_inside = any((each.group_id, each.seq) == (op.group_id, op.seq) for each in view.in_flight)
    return last is not None and ahead(op.seq, last) > 0 and not is_inside


def _progress(job_id: str, views: list[RankView]) -> Iterator[Doubt]:
    """Yield a doubt if a job is quiet for longer than ever before, or if that is not known."""
    running = [view for view in views if view.state == "running"]
    if views and not running:
        yield Doubt(f"no rank of {job_id} runs any more", False)
        return
    quiet_s = min((view.quiet_s for view in running if view.quiet_s is not None), default=None)
    longest_s = max((view.longest_quiet_s for view in running if view.longest_quiet_s is not None), default=None)
    if quiet_s is not None and quiet_s <= _PAUSE_S:
        return
    if quiet_s is None or longest_s is None:
        begun = any(view.records for view in views)
        says = f"whether {job_id} makes progress is not known" if begun else f"{job_id} has not communicated yet"
        yield Doubt(says, False)
    elif quiet_s > longest_s:
        says = f"no operation or step of {job_id} has ended for {seconds(quiet_s)}; before, the longest such time was {seconds(longest_s)}"
        yield Doubt(says, quiet_s > _LONG_S)


# -- text --------------------------------------------------------------------------------------------


def text(seen: Diagnosis, found: list[Doubt], taken: Collection[Evidence], again: str, cells: int = MOST_CELLS) -> str:
    """Return the diagnosis as text for people, in lines of at most ``cells`` cells.

    Args:
        taken: what was captured of ranks besides the evidence of the incidents.
        again: the command, to which the name of an ended job is added.
    """
    lines = [f"{url} does not answer: {why}" for url, why in seen.silent.items()]
    lines += [
        f"the agents of {job} do not know each other (setting peers): what their ranks do wrong together is not seen"
        for job in seen.apart
    ]
    if seen.ended is not None:
        past = [*_past(seen.ended, seen.incidents), *_doubts(seen, found)]
        parts = [*blocks(sorted(seen.incidents, key=lambda each: each.began_at)), past]
    else:
        parts = [
            *blocks(seen.open, {(each.job_id, each.rank) for each in taken if each.kind == "python_stack"}),
            [*_present(seen, found, again)],
        ]
    for each in sorted(taken, key=lambda each: (each.job_id, each.rank, each.kind)):
        head = f"rank {each.rank} of {each.job_id}, {_EVIDENCE[each.kind]}:"
        parts.append([head, *(f"  {line}" for line in each.text.splitlines())])
    return "\n\n".join(terminal_text.lines(folded(part, cells)) for part in [lines, *parts] if part)


def _present(seen: Diagnosis, found: list[Doubt], again: str) -> Iterator[str]:
    if not seen.jobs:
        yield "no running job"
        if seen.latest is not None:
            yield last_job(seen.latest, seen.of_latest, again)
    elif all(map(is_over, seen.open)):
        running = sum(view.state == "running" for view in seen.ranks)
        size = sum(job.world_size for job in seen.jobs)
        ranks = counted(running, "rank") if running >= size else f"{running} of {counted(size, 'rank')}"
        wrong = "something is wrong" if any(doubt.is_wrong for doubt in found) else "no verdict yet"
        yield f"{wrong if found else 'healthy'}: {counted(len(seen.jobs), 'running job')}, {ranks}"
    yield from _doubts(seen, found)


def _doubts(seen: Diagnosis, found: Iterable[Doubt]) -> Iterator[str]:
    for doubt in found:
        yield f"{'no incident yet' if doubt.is_wrong and seen.jobs else 'not yet certain'}: {doubt.says}"


def last_job(job: JobView, incidents: list[IncidentDetails], again: str) -> str:
    """Return how the latest job ended, and how to ask what happened to it."""
    return f"{_ending(job, incidents)}; `{again} {shlex.quote(job.job_id)}` shows what happened"


def _past(job: JobView, incidents: list[IncidentDetails]) -> list[str]:
    if incidents:
        return [_ending(job, incidents)]
    where = f"`commwatch report {shlex.quote(job.job_id)}` shows where its time went"
    return [f"{_ending(job, incidents)}; it had no incident: {where}"]


def _ending(job: JobView, incidents: list[IncidentDetails]) -> str:
    if job.state == "running":  # its agent has ended before
        return f"{job.job_id} was last seen at {time_of_day(job.last_seen_at)}"
    how = ending(job, incidents)
    at = "" if " at " in how else f" at {time_of_day(job.last_seen_at)}"
    return f"{job.job_id} {'failed' if job.failed else 'ended'}{at}{how and f': {how}'}"


def blocks(incidents: list[IncidentDetails], taken: Collection[tuple[str, int]] = frozenset()) -> Iterator[list[str]]:
    """Yield the lines of each incident, with its consequences; ``taken``: the ranks, by job and number, of which this command has a stack."""
    for one in families(incidents):
        each = one.cause
        effects = [f"{'  ' * depth}Consequence: {effect.title}, {lasted(effect)}" for depth, effect in one.effects]
        head = f"{'OVER' if is_over(each) else each.severity.upper()}  {each.title} ({_where(each)})"
        has_stack = any((each.job_id, rank) in taken for rank in each.ranks)
        yield [head, *(f"  {line}" for line in _about(each, has_stack=has_stack)), *effects]


def _about(incident: IncidentDetails, *, has_stack: bool) -> Iterator[str]:
    yield incident.says
    if incident.place and incident.place not in incident.says:
        yield f"in {incident.place}"
    if not incident.place and (showed := no_place(incident.evidence)):
        yield showed
    yield lasted(incident)
    remedy = incident.remedy.partition(f" {NO_STACK}")[0] if has_stack else incident.remedy
    if remedy and not is_over(incident):
        yield f"To do: {remedy}"
    taken = stacks(incident.evidence, incident.kind)
    for rank, text in taken:
        yield "Python stack:" if len(taken) == 1 else f"Python stack of rank {rank}:"
        yield from (f"  {line}" for line in text.splitlines())


def _where(incident: IncidentDetails) -> str:
    return incident.job_id or ", ".join(incident.nodes)


def as_json(seen: Diagnosis, taken: Iterable[Evidence]) -> str:
    """Return the diagnosis as JSON text for programs."""
    about = {
        "verdicts": [asdict(each) for each in seen.verdicts],
        "incidents": [asdict(each) for each in seen.incidents],
        "silent": seen.silent,
        "evidence": [asdict(each) for each in taken],
    }
    return json.dumps(about if seen.ended is None else {**about, "job": asdict(seen.ended)}, indent=2)
