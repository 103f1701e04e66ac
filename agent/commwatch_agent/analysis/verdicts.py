"""Judges a job's communication right now: hangs, stalls, ranks that disagree, stragglers (docs/verdicts.md). Pure.

The sections Verdicts and Stragglers have the rules. ``verdicts`` uses only what the ranks have in flight, so it works while a
trainer is stopped, stuck in C, or gone. It judges the ranks of one node or of many agents: it compares ages, never clocks.
``disagreement`` puts into words what the join of collectives has found.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from commwatch.wire.numbers import latest
from commwatch_agent.analysis.calls.differences import CERTAIN_S, Call, calls_in, difference
from commwatch_agent.analysis.ended_operations import Disagreement
from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.analysis.waits.outside_waits import OutsideWait, near_ranks, of_jobs, outside_waits
from commwatch_agent.analysis.waits.patience import is_behind, marks_steps, overdue, stuck_limit_s
from commwatch_agent.analysis.waits.root_waits import ALIVE, Found, due, roots
from commwatch_agent.analysis.waits.wait_graph import (
    HANG_S,
    LOST,
    RECENT_S,
    Absent,
    Wait,
    absence,
    at_fault,
    waits,
)
from commwatch_agent.model.endings import DIED
from commwatch_agent.model.views import GroupView, RankView
from commwatch_agent.text.units import seconds
from commwatch_collectors.spans import ranks as named
from commwatch_collectors.spans import spans

#: Why a rank is absent, worst first; the worst cause names the culprits.
_CAUSES = ("dead", "gone", "destroyed", "stopped", "silent", "not_joined", "not_come", "unseen")
#: Those of a rank whose wait may be usual for its job.
_PATIENT = ALIVE | {"unseen"}
#: Texts after "stalled: ", or "waiting: " where that is no fault; and most ranks whose activities are listed.
_WITH_PREFIX, _MOST_DOING = frozenset({"stopped", "silent", "not_joined", "not_come"}), 4
#: By cause, of one rank and of several.
_SAYS = {
    "dead": (f"process dead: rank {{}} {DIED}", f"process dead: ranks {{}} {DIED}"),
    "gone": ("rank ended: rank {} has ended and will not join", "rank ended: ranks {} have ended and will not join"),
    "destroyed": (
        "group destroyed: rank {} has destroyed the group and will not join; its process lives",
        "group destroyed: ranks {} have destroyed the group and will not join; their processes live",
    ),
    "stopped": (
        "rank {} has not joined; its process is stopped",
        "ranks {} have not joined; their processes are stopped",
    ),
    "not_come": (
        "rank {} has not joined; it has not started, or has not come to init_process_group",
        "ranks {} have not joined; they have not started, or have not come to init_process_group",
    ),
    "unseen": (
        "no data from rank {}: it runs elsewhere (query its agent as well), or has not communicated yet",
        "no data from ranks {}: they run elsewhere (query their agents as well), or have not communicated yet",
    ),
    "silent": (
        "rank {} has not joined; its Python code is not running (stuck in C, holding the GIL, or without a core)",
        "ranks {} have not joined; their Python code is not running (stuck in C, holding the GIL, or without a core)",
    ),
    "not_joined": (
        "rank {} has not joined; it is alive",
        "ranks {} have not joined; they are alive",
    ),
    "inside": ("rank {} has entered; its process is stopped", "ranks {} have entered; their processes are stopped"),
}


def verdicts(ranks: Iterable[RankView], groups: Iterable[GroupView]) -> list[Verdict]:
    """Return the verdicts, the longest first.

    Args:
        ranks: of any number of nodes, each rank once, in its latest life.
        groups: of any number of nodes; a group may occur once per node.
    """
    known = latest_life(ranks)
    merged = {(group.job_id, group.group_id): group for group in merged_groups(groups)}
    users, look = _users(known), _look(merged, known)
    certain: list[Verdict] = []
    found: list[Found] = []
    for group in merged.values():
        if not group.aligned:  # its sequence numbers are not comparable
            continue
        here = users.get((group.job_id, group.group_id), [])
        quarrel = _quarrel(group, here)
        if quarrel is not None:
            certain.append(quarrel)
            continue
        behind = _behind(group, here)
        if behind is not None:
            found.append(Found(behind.waiting, behind, behind.since_s))
            continue
        found += [each for wait in waits(group, here, known) for each in _judge(wait, look)]
    found += map(_of_outside, outside_waits(known))
    every = (with_step(each, known) for each in (*certain, *roots(due(found))))
    return sorted(every, key=lambda verdict: -verdict.since_s)


def with_step(verdict: Verdict, known: Mapping[tuple[str, int], RankView]) -> Verdict:
    """Return a verdict with the training step in which the ranks are that wait, if it is known of all of them and the same.

    Args:
        known: ranks by job and number.
    """
    views = [known.get((verdict.job_id, rank)) for rank in verdict.waiting or verdict.ranks]
    ended = {None if view is None else view.step for view in views}
    number = ended.pop() if len(ended) == 1 else None
    if number is None:
        return verdict
    return replace(verdict, step=number + 1, says=f"{verdict.says}, in step {number + 1}")


def _users(known: Mapping[tuple[str, int], RankView]) -> dict[tuple[str, str], list[RankView]]:
    """Return the ranks that used each group, by job and group: a job of 1,000 ranks has hundreds of groups, most of them small."""
    users: dict[tuple[str, str], list[RankView]] = {}
    for (job_id, _), view in known.items():
        under_way, failed = ({each.group_id for each in many} for many in (view.in_flight, view.failed))
        for group_id in {*view.last_seq, *view.launched_s, *under_way, *failed}:
            users.setdefault((job_id, group_id), []).append(view)
    return users


def by_job(ranks: Iterable[RankView]) -> dict[str, list[RankView]]:
    """Return ranks by their job."""
    of_job: dict[str, list[RankView]] = {}
    for rank in ranks:
        of_job.setdefault(rank.job_id, []).append(rank)
    return of_job


def latest_life(ranks: Iterable[RankView]) -> dict[tuple[str, int], RankView]:
    """Return each rank of any number of nodes once, by job and number, in the job's latest life; ranks of earlier lives are left out.

    A rank that moved to another node is reported by both agents: the one that runs counts, else the one that ended last. Those that
    run are of the latest life, although nodes may count its restarts differently. Others are if they have the count of those that run,
    or ended after all of them had started.
    """
    known: dict[tuple[str, int], RankView] = {}
    for job_id, views in by_job(ranks).items():
        running = [view for view in views if view.state == "running"]
        life = max(view.restart for view in running or views)
        began = max((view.started_at for view in running if view.started_at is not None), default=math.inf)
        for view in sorted(views, key=lambda view: (view.state == "running", view.restart, view.ended_at or 0.0)):
            if view.state == "running" or view.restart == life or (view.ended_at or -math.inf) >= began:
                known[job_id, view.rank] = view
    return known


def merged_groups(groups: Iterable[GroupView]) -> list[GroupView]:
    """Return each group once, with the ranks that used it on any node, and aligned if it is on every node."""
    merged: dict[tuple[str, str], GroupView] = {}
    for group in groups:
        at = (group.job_id, group.group_id)
        known = merged.setdefault(at, group)
        if known is not group:
            ranks = sorted({*known.ranks, *group.ranks})
            merged[at] = replace(known, ranks=ranks, aligned=known.aligned and group.aligned)
    return list(merged.values())


# -- what ranks do ------------------------------------------------------------------------------


def _quarrel(group: GroupView, here: list[RankView]) -> Verdict | None:
    """Return a verdict if ranks have different operations or data at one sequence number of a group, now or lately."""
    judged = (_disagreement(group, seq, calls, age_s) for seq, calls, age_s in calls_in(group, here))
    return next((verdict for verdict in judged if verdict is not None), None)


def disagreement(what: Disagreement, group: GroupView) -> Verdict | None:
    """Return the verdict on a collective that ended although its ranks disagreed; ``None`` if that was long ago, or no fault."""
    return _disagreement(group, what.seq, what.ranks, what.ago_s) if what.ago_s < RECENT_S else None


def _disagreement(group: GroupView, seq: int, calls: Mapping[int, Call], since_s: float) -> Verdict | None:
    """Return the verdict on the calls of ranks at one sequence number, ``since_s`` ago; ``None``: no fault."""
    what = difference(calls, group.members or ())
    if what is None:
        return None
    about = (group.job_id, group.group_id, group.group, seq, what.op)
    says = f"{what.says} ({what.op} {seq} of group {group.group})"
    others = sorted(calls.keys() - set(what.odd))
    return Verdict("desync", what.cause, *about, what.odd, others, since_s, says, sides=what.sides)


# -- ranks behind -------------------------------------------------------------------------------


def _behind(group: GroupView, here: list[RankView]) -> Verdict | None:
    """Return a verdict if some ranks launched less than others and none launches any more: for unseen ends (CUDA by default)."""
    idle = {view.rank: view.launched_s[group.group_id] for view in here if group.group_id in view.launched_s}
    at = {view.rank: view.last_seq[group.group_id] for view in here if group.group_id in view.last_seq}
    members = group.members or []
    if not members or not idle.keys() & at.keys() >= set(members) or min(idle.values()) < HANG_S:
        return None
    top = latest([at[rank] for rank in members])
    late = [rank for rank in members if at[rank] != top]
    views = {view.rank: view for view in here}
    if not late or not any(views[rank].state == "running" for rank in members if rank not in late):
        return None  # no live rank waits
    ahead = [rank for rank in members if rank not in late]
    since = min(idle[rank] for rank in ahead)
    why = {rank: absence(views[rank], group.group_id) for rank in late}
    faults = {rank: cause for rank, cause in why.items() if cause not in _PATIENT or is_behind(views[rank], since)}
    kind, cause, culprits, says = _blame(faults or why, views, is_fault=bool(faults))
    last = latest([at[rank] for rank in late])
    text = (
        f"{says} ({named(ahead)} launched operation {top} of group {group.group} {seconds(since)} ago, "
        f"{named(late)} operation {last})"
    )
    about = (group.job_id, group.group_id, group.group, top, "")
    return Verdict(kind, cause, *about, culprits, ahead, since, text)


# -- what a wait means --------------------------------------------------------------------------


class _Look(NamedTuple):
    """What is known of all jobs."""

    #: By job and ``group_id``; by job and rank.
    groups: Mapping[tuple[str, str], GroupView]
    known: Mapping[tuple[str, int], RankView]
    #: By job: whether its ranks mark steps (``None``: not known), and the ranks of this node.
    steps: Mapping[str, bool | None]
    near: Mapping[str, Collection[int]]


def _look(groups: Mapping[tuple[str, str], GroupView], known: Mapping[tuple[str, int], RankView]) -> _Look:
    jobs = of_jobs(known)
    steps = {job_id: marks_steps(views.values()) for job_id, views in jobs.items()}
    return _Look(groups, known, steps, {job_id: near_ranks(views) for job_id, views in jobs.items()})


def _judge(wait: Wait, look: _Look) -> Iterator[Found]:
    """Yield what a wait means."""
    if wait.since_s < CERTAIN_S:
        return
    if not wait.missing:
        yield from _all_inside(wait, look.known)
        return
    job_id, known, near = wait.group.job_id, look.known, look.near.get(wait.group.job_id, ())
    absent = [Absent(rank, wait.group.group_id) for rank in wait.missing]
    blamed = {root for each in absent for root in at_fault(each, job_id, look.groups, known)}
    why: dict[int, str] = {}
    for rank, group_id in sorted(blamed):
        cause = absence(known.get((job_id, rank)), group_id)
        cause = "not_come" if cause == "unseen" and rank in near else cause
        why[rank] = min(cause, why.get(rank, cause), key=_CAUSES.index)
    views = {rank: known[job_id, rank] for rank in why if (job_id, rank) in known}
    late = {
        rank: cause
        for rank, cause in why.items()
        if cause not in _PATIENT or overdue(wait, views.get(rank), look.steps.get(job_id), is_here=cause == "not_come")
    }
    kind, cause, culprits, says = _blame(late or why, views, is_fault=bool(late))
    # A missing rank may go on without one that has ended properly.
    certain = cause == "dead" or (cause in LOST and why.keys() <= set(wait.missing))
    is_due = certain or (wait.since_s > wait.limit_s and not wait.raised)
    if is_due or not wait.raised:
        yield Found(wait.inside, _verdict(wait, kind, cause, culprits, says), wait.since_s, is_due)


def _all_inside(wait: Wait, known: Mapping[tuple[str, int], RankView]) -> Iterator[Found]:
    """Yield what it means that all ranks of a group have been inside an operation for long."""
    if wait.since_s <= wait.limit_s:
        return
    group_id = wait.group.group_id
    stopped = [rank for rank in wait.inside if absence(known.get((wait.group.job_id, rank)), group_id) == "stopped"]
    if stopped:
        yield Found(
            wait.inside,
            _verdict(wait, "hang", "stopped", stopped, f"stalled: {_says('inside', stopped)}"),
            wait.since_s,
        )
        return
    first = " the group's first operation, whose connections are being set up or cannot be" if wait.is_first else ""
    says = f"stuck inside: every rank has entered{first}; check the network between them"
    kind = "stalled" if wait.is_first else "hang"
    kind = kind if wait.since_s > stuck_limit_s(wait) else "waiting"
    yield Found(wait.inside, _verdict(wait, kind, "stuck", list(wait.inside), says), wait.since_s)


def _of_outside(wait: OutsideWait) -> Found:
    about = (wait.job_id, "", wait.about, None, wait.call)
    waiting = sorted(set(wait.inside) - set(wait.culprits))
    verdict = Verdict("init_incomplete", wait.cause, *about, wait.culprits, waiting, wait.since_s, wait.says)
    return Found(wait.inside, verdict, wait.since_s, wait.is_due)


def _blame(
    missing: Mapping[int, str], views: Mapping[int, RankView], *, is_fault: bool = True
) -> tuple[str, str, list[int], str]:
    """Return kind, cause, culprits and text of a verdict on ranks that have not come, each with why (``absence``)."""
    causes: dict[str, list[int]] = {}
    for rank, why in missing.items():
        causes.setdefault(why, []).append(rank)
    there = [cause for cause in _CAUSES if cause in causes]
    kind = "waiting" if not is_fault else "hang" if there[0] in {*LOST, "stopped"} else "stalled"
    prefix = "stalled" if is_fault else "waiting"
    parts = [_says(each, causes[each]) + _doing(each, causes[each], views) for each in there]
    says = (f"{prefix}: {part}" if each in _WITH_PREFIX else part for each, part in zip(there, parts, strict=True))
    return kind, there[0], causes[there[0]], "; ".join(says)


def _says(cause: str, ranks: list[int]) -> str:
    return _SAYS[cause][len(ranks) > 1].format(spans(ranks))


def _doing(cause: str, ranks: list[int], views: Mapping[int, RankView]) -> str:
    """Return what ranks do that are alive, as far as that is known."""
    if cause not in ("not_joined", "silent"):
        return ""
    known = [(rank, views[rank].activity) for rank in ranks if rank in views]
    doing = [(rank, activity.says) for rank, activity in known if activity is not None]
    if not doing:
        return " but doing something else" if cause == "not_joined" else ""
    if len(ranks) == 1:
        return f"{' and' if cause == 'not_joined' else ', and the rank'} {doing[0][1]}"
    return ": " + ", ".join(f"rank {rank} {says}" for rank, says in doing[:_MOST_DOING])


def _verdict(wait: Wait, kind: str, cause: str, culprits: list[int], says: str) -> Verdict:
    op = next(iter(wait.inside.values()))
    where = f"{op.op} {op.seq} of group {wait.group.group}"
    waiting = sorted(set(wait.inside) - set(culprits)) if cause != "stuck" else []
    verb = "raised in" if wait.raised else "in"
    whom = f"{named(waiting)} {verb}" if waiting else verb
    since = "" if wait.raised else f" for {seconds(wait.since_s)}"  # the incident has when it raised
    return Verdict(
        kind=kind,
        cause=cause,
        job_id=wait.group.job_id,
        group_id=wait.group.group_id,
        group=wait.group.group,
        seq=op.seq,
        op=op.op,
        ranks=sorted(culprits),
        waiting=waiting,
        since_s=wait.since_s,
        says=f"{says} ({whom} {where}{since})",
    )
