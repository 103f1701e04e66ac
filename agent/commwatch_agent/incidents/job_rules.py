"""Conditions of jobs: what ranks do wrong by ``judging.judged``, ranks that have died, and uneven work. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import fmean

from commwatch.wire import events as ev
from commwatch.wire.numbers import ahead
from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.analysis.verdicts import by_job, with_step
from commwatch_agent.analysis.waits.uneven_work import Why, says, uneven
from commwatch_agent.incidents.evidence import Evidence, KnownJob
from commwatch_agent.incidents.incident import BY_CTRL_C, LOST, STANDSTILLS, Condition, EvidenceItem
from commwatch_agent.incidents.verdict_views import details_of, subject
from commwatch_agent.model.endings import (
    INTERRUPTED,
    Ending,
    Interruption,
    ended_by,
    first_to_fail,
    how_ended,
    interruption,
)
from commwatch_agent.model.views import Failed, GroupView, RankView
from commwatch_agent.text.units import percent
from commwatch_collectors.spans import ranks as named
from commwatch_collectors.spans import spans

#: Source of verdicts that follow from what the probe records.
PROBE = "probe"
#: Seconds after which a rank counts as lost, and a disagreement as known.
_CERTAIN_S = 2.0
#: Within so many seconds a launcher has restarted the ranks of a job that it ends all at once.
_RESTARTS_S = 10.0
#: What the sentences of verdicts begin with, which the title of an incident has.
_PREFIXES = re.compile(
    "(^|; )(?:process dead|rank ended|group destroyed|stalled|waiting|stuck inside|straggler|corruption): "
)
#: Exceptions of torch and Python for want of memory.
_OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError")


def of_verdicts(evidence: Evidence) -> Iterator[Condition]:
    """Yield what ranks do wrong: hangs, stalls, ranks that have not come, ranks that disagree, stragglers, corrupt data.

    That ranks disagree counts once the calls of all of them are known, after a moment, or at the job's end: before, others may be at fault.
    The straggler of several groups is known by the one in which it costs most.
    """
    sizes = {(group.job_id, group.group_id): group.size for group in evidence.groups}
    known = [each for each in evidence.verdicts if each.job_id in evidence.jobs]
    interrupted = {(view.job_id, view.rank) for view in evidence.ranks if _is_interrupted(view, evidence)}
    for verdict in sorted(_without_echoes(known), key=lambda each: -(each.cost_share or 0.0)):
        size = sizes.get((verdict.job_id, verdict.group_id))
        job = evidence.jobs[verdict.job_id]
        is_whole = len({*verdict.ranks, *verdict.waiting}) == size
        if verdict.kind == "desync" and verdict.since_s < _CERTAIN_S and not is_whole and not job.ended:
            continue
        condition = _condition(verdict, job, size, evidence.now)
        if verdict.kind == "desync":
            condition = replace(condition, evidence=(*condition.evidence, *_raised_on(verdict, evidence)))
        by_ctrl_c = verdict.cause in LOST and any((verdict.job_id, rank) in interrupted for rank in verdict.ranks)
        yield replace(condition, variant=BY_CTRL_C, evidence=()) if by_ctrl_c else condition


def _raised_on(verdict: Verdict, evidence: Evidence) -> Iterator[EvidenceItem]:
    """Yield where the first rank of each side of a disagreement raised, as far as that is known."""
    firsts = {side[0] for side in verdict.sides or () if side}
    for view in evidence.ranks:
        if view.job_id == verdict.job_id and view.rank in firsts and view.raised and view.raised_at:
            says = f"rank {view.rank} {how_ended(view.raised, view.raised_at, view.raised_says or '', None)}"
            data = {"rank": view.rank, "raised": view.raised, "at": view.raised_at}
            yield EvidenceItem("ending", view.ended_at or evidence.now, says, data)


def _is_interrupted(view: RankView, evidence: Evidence) -> bool:
    """Return whether a signal to its launcher has ended a rank, or Ctrl-C with its job or just now: ranks that still wait for it later hang."""
    job = evidence.jobs.get(view.job_id)
    over = job is None or job.ended
    return view.stopped_by is not None or (
        view.raised == INTERRUPTED and (over or evidence.now - (view.ended_at or evidence.now) < _RESTARTS_S)
    )


def lost_ranks(evidence: Evidence) -> Iterator[Condition]:
    """Yield the ranks that died, or that an exception ended."""
    for job_id, views in by_job(evidence.ranks).items():
        if job_id in evidence.jobs:
            yield from _lost(job_id, evidence.jobs[job_id], views, evidence.now)


def uneven_work(evidence: Evidence) -> Iterator[Condition]:
    """Yield jobs whose ranks wait for others much of the time, and are late in turn."""
    for job_id, waits in evidence.waits.items():
        found, job = uneven(waits), evidence.jobs.get(job_id)
        if found is None or found.why is not Why.TURNS or job is None or job.ended:
            continue
        number, transfer = len(waits.waits), "" if waits.transfer is None else f", transfers {percent(waits.transfer)}"
        average = f"{percent(fmean(waits.waits.values()))} of the step time: mean of {number} ranks over a minute"
        data = {"kind": "uneven_work", "ranks": sorted(waits.waits)}
        yield Condition(
            kind="uneven_work",
            subject=(),
            says=f"{says(found)}, and the late rank changes",
            began_at=evidence.now,
            job_id=job_id,
            run=job.run,
            value=found.saves,
            idle_ranks=found.saves * number,
            share=found.saves,
            evidence=(EvidenceItem(PROBE, evidence.now, f"waiting takes {average}{transfer}", data),),
        )


def _without_echoes(verdicts: list[Verdict]) -> list[Verdict]:
    """Return verdicts without those of another source on a wait that the probe sees itself, too."""
    seen = {verdict.job_id for verdict in verdicts if verdict.source == PROBE and verdict.kind in STANDSTILLS}
    return [
        verdict
        for verdict in verdicts
        if verdict.source == PROBE or verdict.kind not in STANDSTILLS or verdict.job_id not in seen
    ]


def _condition(verdict: Verdict, job: KnownJob, group_size: int | None, now: float) -> Condition:
    idle, share = _idle(verdict, group_size)
    return Condition(
        kind=verdict.kind,
        subject=subject(verdict),
        says=_PREFIXES.sub(r"\1", verdict.says),
        began_at=now - verdict.since_s,
        last_at=now - verdict.ago_s if verdict.kind == "straggler" else None,
        job_id=verdict.job_id,
        run=job.run,
        cause=verdict.cause,
        value=verdict.since_s if verdict.cost_share is None else verdict.cost_share,
        ranks=tuple(verdict.ranks),
        waiting=tuple(verdict.waiting),
        group_id=verdict.group_id,
        group=verdict.group,
        op=verdict.op,
        seq=verdict.seq,
        idle_ranks=idle,
        share=share,
        details=details_of(verdict),
        evidence=(_item(verdict, now),),
    )


def _idle(verdict: Verdict, group_size: int | None) -> tuple[float | None, float | None]:
    """Return how many ranks do nothing because of a fault, on average; and the share of their time that it takes."""
    if verdict.kind == "straggler":
        share = verdict.cost_share
        return verdict.idles, share
    if verdict.kind == "corruption":
        return None, None
    if verdict.kind == "waiting":
        return float(len(verdict.waiting)), None
    return float(group_size or len({*verdict.waiting, *verdict.ranks})), 1.0


def _item(verdict: Verdict, now: float) -> EvidenceItem:
    step = None if verdict.kind == "corruption" else verdict.step
    about = {
        "kind": verdict.kind,
        "cause": verdict.cause,
        "ranks": list(verdict.ranks),
        "why": verdict.why_code,
        "step": step,
    }
    known = {name: value for name, value in about.items() if value is not None}
    return EvidenceItem(verdict.source, now, verdict.says, known)


# -- ranks that have ended too early ------------------------------------------------------------------


def left_early(evidence: Evidence) -> Iterator[Condition]:
    """Yield the ranks that had ended properly when an operation with them raised on others, and that ended the job.

    While other ranks live, ``verdicts`` has this.
    """
    of_job = by_job(evidence.ranks)
    groups = {(group.job_id, group.group_id): group for group in evidence.groups if group.aligned}
    for job_id, job in evidence.jobs.items():
        if job.ended:
            yield from _left_early(job, of_job.get(job_id, []), groups, evidence.now)


def _left_early(
    job: KnownJob, views: list[RankView], groups: Mapping[tuple[str, str], GroupView], now: float
) -> Iterator[Condition]:
    victims = [view for view in views if view.raised and view.failed_in_operation and view.ended_after is not None]
    first = min(victims, key=lambda view: view.ended_after or 0.0, default=None)
    if first is None or first.stopped_by is not None:
        return
    for each in first.failed:
        group = groups.get((first.job_id, each.group_id))
        if group is None or not each.is_latest:
            continue
        needed = (group.members or []) if each.op not in ev.P2P else [] if each.peer is None else [each.peer]
        left = [
            view.rank
            for view in views
            if view.rank in needed and _had_ended(view, first.ended_after or 0.0) and not _was_in(view, each)
        ]
        if not left:
            continue
        waiting = [view.rank for view in victims if view.rank in (group.members or needed)]
        where = f"{each.op} {each.seq} of group {group.group}"
        codes = {view.exit_status for view in views if view.rank in left and view.exit_status}
        code = f" with {ended_by('', *codes)}" if len(codes) == 1 else ""
        says = f"{named(left)} had ended{code} and did not join ({named(waiting)} raised in {where})"
        about = (first.job_id, each.group_id, group.group, each.seq, each.op)
        since_s = max(0.0, now - (first.ended_after or now))
        known = {(view.job_id, view.rank): view for view in views}
        verdict = with_step(Verdict("hang", "gone", *about, left, waiting, since_s, says), known)
        yield replace(_condition(verdict, job, group.size, now), is_final=True)


def _had_ended(view: RankView, at: float) -> bool:
    return view.state == "ended" and not view.raised and view.ended_at is not None and view.ended_at <= at


def _was_in(view: RankView, failed: Failed) -> bool:
    """Return whether a rank has ended a collective that raised on another one."""
    last = view.last_seq.get(failed.group_id)
    return failed.op not in ev.P2P and last is not None and ahead(last, failed.seq) >= 0


# -- ranks that have died ----------------------------------------------------------------------------


def _lost(job_id: str, job: KnownJob, views: list[RankView], now: float) -> Iterator[Condition]:
    """Yield the ranks of a job that died or that an exception ended, each by itself.

    While a job runs, a rank counts as lost after a moment: its launcher may be ending all of them. Once it has ended, only the first to
    fail is to blame; if several may be that, they are for information.
    """
    lost = {view.rank: view for view in views if view.state == "gone" or view.raised}
    endings = {rank: ending for rank, view in lost.items() if (ending := _ending(view)) is not None}
    stopped = interruption(endings)
    is_certain = stopped is not None and stopped.is_certain
    if not job.ended and not is_certain:
        yield from (
            _of_ranks(job_id, job, [view], now) for view in lost.values() if now - (view.ended_at or 0.0) >= _CERTAIN_S
        )
    if not job.ended:
        return
    first = first_to_fail(endings)
    if len(first) == 1 and stopped is None:
        view = lost[first[0]]
        found = _of_ranks(job_id, job, _with_alike(view, lost.values()), now)
        yield replace(found, is_final=_ended_the_job(view, lost.values()))
    elif lost and (is_certain or now - max(view.ended_at or 0.0 for view in lost.values()) >= _RESTARTS_S):
        yield _of_all(job_id, job, list(lost.values()), stopped, now)


def _ended_the_job(first: RankView, lost: Iterable[RankView]) -> bool:
    """Return whether the loss of the first rank to fail has ended its job for certain, and users have not: they may kill ranks, too.

    An exception of its own has, and a death for want of which others raised. That others ended later shows nothing: on a busy machine, so
    do ranks that were killed at once.
    """
    if first.raised:
        return not first.failed_in_operation
    return any(view.failed_in_operation for view in lost if view is not first)


def _ending(view: RankView) -> Ending | None:
    if view.ended_at is None:
        return None
    since = view.ended_at if view.ended_after is None else view.ended_after
    clean = view.state == "ended"
    times = int(since * 1e9), int(view.ended_at * 1e9)
    return Ending(
        *times,
        clean,
        view.raised or "",
        view.failed_in_operation,
        is_reported=view.end_is_reported,
        says=view.raised_says or "",
        status=view.exit_status,
        stop=view.stopped_by or 0,
        stop_ns=int((view.stopped_at or 0.0) * 1e9),
    )


def _with_alike(first: RankView, lost: Iterable[RankView]) -> list[RankView]:
    """Return the first rank to fail, with those that an equal exception at the same place ended, which is a fault of the job and not of a rank.

    Not those whose operation raised: they only lost the first.
    """
    if not first.raised or first.failed_in_operation:
        return [first]
    own = [view for view in lost if view is not first and not view.failed_in_operation]
    return [first, *(view for view in own if (view.raised, view.raised_at) == (first.raised, first.raised_at))]


def _of_ranks(job_id: str, job: KnownJob, views: list[RankView], now: float) -> Condition:
    """Return the loss of ranks that ended alike, the first of them first."""
    view = views[0]
    ranks, hosts = sorted(each.rank for each in views), sorted({each.host for each in views})
    how = how_ended(view.raised or "", view.raised_at or "", view.raised_says or "", view.exit_status)
    by = ended_by(view.raised or "", view.exit_status)
    ended_at = now if view.ended_at is None else min(now, view.ended_at)
    says = f"{named(ranks)} {how}, on {', '.join(hosts)}"
    data = {"rank": view.rank, "raised": view.raised, "at": view.raised_at, "pid": view.pid}
    data |= {"in_operation": True} if view.failed_in_operation else {}
    data |= {"status": view.exit_status} if not view.raised and view.exit_status else {}
    return Condition(
        kind="rank_lost",
        subject=(str(view.rank),),
        says=says,
        began_at=ended_at,
        job_id=job_id,
        run=job.run,
        cause=_cause(view),
        ranks=tuple(ranks),
        nodes=tuple(hosts),
        words={"rank": spans(ranks)} | ({"ended_by": by, "how": how} if by else {}),
        evidence=(EvidenceItem("ending", ended_at, says, data),),
    )


def _cause(view: RankView) -> str:
    if not view.raised:
        return "died"
    return "out_of_memory" if view.raised in _OUT_OF_MEMORY else "exception"


def _of_all(job_id: str, job: KnownJob, lost: list[RankView], stopped: Interruption | None, now: float) -> Condition:
    ended_at = min((view.ended_at for view in lost if view.ended_at is not None), default=now)
    whom = named([view.rank for view in lost])
    says = f"{whom} ended without a clean end, none of them known to be the first"
    if stopped is not None:
        ended_at, says = stopped.at_ns / 1e9, f"{stopped.how}, which ended {whom}"
    return Condition(
        kind="rank_lost",
        subject=("all",),
        says=says,
        began_at=min(now, ended_at),
        job_id=job_id,
        run=job.run,
        cause="all" if stopped is None else "interrupted",
        variant="all",
        value=float(len(lost)),
        numbers={"ranks": float(len(lost))},
        evidence=(EvidenceItem("ending", ended_at, says, {"ranks": [view.rank for view in lost]}),),
        words={} if stopped is None else {"how": stopped.says},
    )
