"""Which waits are causes, and which only follow from them: a rank that waits itself is not at fault for those that wait for it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.text.units import seconds
from commwatch_collectors.spans import ranks as named

#: Causes of the absence of a rank that may itself wait for others.
ALIVE = frozenset({"not_joined", "silent", "not_come"})


class Found(NamedTuple):
    """A verdict, and the ranks that are inside what it is about."""

    inside: Collection[int]
    verdict: Verdict
    #: How long they have been inside, in s.
    since_s: float
    #: Whether that is long enough for the verdict to be given.
    is_due: bool = True


def due(found: list[Found]) -> list[Found]:
    """Return the verdicts to be given, with those on the waits in which the culprits are that live.

    Such a wait must be at least half as long as that for the culprit. A culprit that was in other waits meanwhile goes on with its work.
    """
    given = [each for each in found if each.is_due]
    too_short: dict[tuple[str, int], list[Found]] = {}
    for each in found:
        for rank in () if each.is_due else each.inside:
            too_short.setdefault((each.verdict.job_id, rank), []).append(each)
    for each in given:  # which grows
        for rank in each.verdict.ranks if each.verdict.cause in ALIVE else ():
            of_rank = too_short.get((each.verdict.job_id, rank), [])
            given += [other for other in of_rank if 2 * other.since_s >= each.since_s and other not in given]
    return given


def roots(found: list[Found]) -> list[Verdict]:
    """Remove verdicts whose culprits only wait themselves; if they wait for each other in a ring, report that."""
    where: dict[tuple[str, int], list[Verdict]] = {}
    for each in found:
        for rank in each.inside:
            where.setdefault((each.verdict.job_id, rank), []).append(each.verdict)
    kept: list[Verdict] = []
    rings: dict[str, list[Verdict]] = {}
    for verdict in (each.verdict for each in found):
        if verdict.cause not in ALIVE or not verdict.ranks:
            kept.append(verdict)
            continue
        free = [
            rank for rank in verdict.ranks if all(other is verdict for other in where.get((verdict.job_id, rank), ()))
        ]
        if free:  # only ranks that wait nowhere else are culprits
            kept.append(verdict if free == verdict.ranks else replace(verdict, ranks=free))
        elif _comes_back(verdict, where) and not _is_told_outside(verdict, where):
            rings.setdefault(verdict.job_id, []).append(verdict)
    return kept + [_of_ring(ring) for ring in rings.values()]


def _of_ring(ring: list[Verdict]) -> Verdict:
    """Return one verdict on waits of ranks for each other.

    If all waits are of the same ranks, those that are not where most of them wait are at fault; else those for which others wait.
    """
    first, *others = sorted(ring, key=lambda verdict: (verdict.group_id, verdict.seq or 0, verdict.op, verdict.waiting))
    sides = [list(each) for each in dict.fromkeys(tuple(each.waiting) for each in (first, *others)) if each]
    order = replace(first, kind="desync", cause="order", sides=sides)
    if not others:  # it has the other waits in its text
        return replace(order, says=f"ranks wait for each other in different groups: {first.says}")
    every = {rank for each in ring for rank in (*each.ranks, *each.waiting)}
    most = max(len(each.waiting) for each in ring)
    crowds = [set(each.waiting) for each in ring if len(each.waiting) == most]
    is_minority = len(crowds) == 1 and all({*each.ranks, *each.waiting} == every for each in ring)
    ranks = every - crowds[0] if is_minority else {rank for each in ring for rank in each.ranks}
    groups = " in different groups" if any(each.group_id != first.group_id for each in others) else ""
    where = "; ".join(f"{named(each.waiting)} in {_where_of(each)}" for each in (first, *others))
    says, since_s = f"ranks wait for each other{groups}: {where}", max(each.since_s for each in ring)
    return replace(order, ranks=sorted(ranks), waiting=sorted(every - ranks), since_s=since_s, says=says)


def _where_of(verdict: Verdict) -> str:
    """Return where ranks wait, since when, and for which others."""
    what = verdict.op if verdict.seq is None else f"{verdict.op or 'operation'} {verdict.seq} of group {verdict.group}"
    return f"{what} for {seconds(verdict.since_s)}, without {named(verdict.ranks)}"


def _is_told_outside(verdict: Verdict, where: Mapping[tuple[str, int], list[Verdict]]) -> bool:
    """Return whether a verdict on a wait of its culprits outside operations has both waits in its text."""
    others = (other for rank in verdict.ranks for other in where.get((verdict.job_id, rank), ()))
    return verdict.kind != "init_incomplete" and any(other.kind == "init_incomplete" for other in others)


def _comes_back(start: Verdict, where: dict[tuple[str, int], list[Verdict]]) -> bool:
    """Return whether following culprits from wait to wait leads back to ``start``, and never to a rank that waits for none."""
    seen: set[int] = set()
    todo = [start]
    back = False
    while todo:
        verdict = todo.pop()
        if id(verdict) in seen:
            continue
        seen.add(id(verdict))
        for rank in verdict.ranks:
            following = [other for other in where.get((verdict.job_id, rank), ()) if other is not verdict]
            if not following or verdict.cause not in ALIVE:
                return False  # this rank waits for none: that verdict is the root
            back = back or start in following
            todo += following
    return back
