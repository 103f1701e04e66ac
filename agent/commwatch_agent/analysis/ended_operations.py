"""What ended operations show of groups whose ranks are all on this node: stragglers and disagreements. Pure.

``job.rank_parts`` and ``job.message_parts`` have the groups with ranks on several nodes; ``verdicts.verdicts`` judges the operations in flight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from commwatch.wire.modes import FULL
from commwatch_agent.analysis.calls.differences import Call
from commwatch_agent.ingest.jobs import Job
from commwatch_agent.ingest.rank_totals import RankTotals, op_of
from commwatch_agent.ingest.stragglers import WINDOWS_NS, Late
from commwatch_agent.model.cells import GroupInfo

#: Ranks of a job meet in most of its steps if they meet in one of so many bins of time.
_SPARSE = 2


@dataclass(frozen=True)
class Disagreement:
    """A collective that ended although its ranks were in different operations or passed different data."""

    job_id: str
    group_id: str
    seq: int
    #: What each rank passed.
    ranks: dict[int, Call]
    #: Seconds since its end.
    ago_s: float


def stragglers(jobs: Iterable[Job], now_ns: int) -> list[tuple[str, str, Late]]:
    """Return (job, ``group_id``, straggler) for groups whose ranks are all on this node; each rank of a job ``once``."""
    found: list[tuple[str, str, Late]] = []
    for job in jobs:
        rank_totals = {totals.rank: totals for totals in job.rank_totals.values() if totals.alive}
        if not rank_totals:
            continue
        from commwatch_agent.analysis.straggler_search import stragglers_in  # brings in numpy
        from commwatch_agent.analysis.waits.without_steps import confirmed

        ends = {rank: ends_of(totals) if totals.marked else [] for rank, totals in rank_totals.items()}
        turns = {rank: [] if totals.marked else ends_of(totals) for rank, totals in rank_totals.items()}
        stepping, met = _stepping(rank_totals), _meetings(job, rank_totals)
        of_groups = list[tuple[str, Late]]()
        for group_id, join in job.joins.items():
            for ranks in roles(join.window.ranks, stepping):
                judge = partial(
                    stragglers_in,
                    join.window,
                    now_ns,
                    steps_of(ends, ranks),
                    ranks=ranks,
                    stepping=_are_stepping(ranks, rank_totals),
                    turns=steps_of(turns, ranks),
                    met=met,
                )
                of_groups += [(group_id, each) for each in confirmed(judge, ends, join.window.numbers, now_ns)]
        for group_id, each in (*of_groups, *_late_senders(rank_totals, ends, now_ns)):
            found.append((job.id, group_id, each))
    return once(found)


def _meetings(job: Job, rank_totals: Mapping[int, RankTotals]) -> list[int]:
    """Return when ranks of a job met, for ``stragglers_in``; empty where they may also have met elsewhere, or in messages."""
    if any(totals.messages or groups_elsewhere(totals, rank_totals) for totals in rank_totals.values()):
        return []
    met = {number for join in job.joins.values() for number in join.window.numbers}
    return sorted(met) if met and _SPARSE * len(met) < max(met) - min(met) else []


def roles(ranks: Collection[int], stepping: Collection[int]) -> list[frozenset[int]]:
    """Return the ranks of a group that are compared with each other: those that mark steps, and those that do not.

    The others have another role in the job, such as making rollouts for the trainers.
    """
    every = frozenset(ranks)
    return [role for role in (every.intersection(stepping), every.difference(stepping)) if role]


def _stepping(rank_totals: Mapping[int, RankTotals]) -> list[int]:
    """Return the ranks that mark steps; none where one rank calls ``commwatch.step()``, which does so for all."""
    stepping = [rank for rank, totals in rank_totals.items() if totals.marked]
    return [] if len(stepping) == 1 and rank_totals[stepping[0]].steps.are_explicit else stepping


def _are_stepping(ranks: Collection[int], rank_totals: Mapping[int, RankTotals]) -> bool:
    return any(rank in rank_totals and rank_totals[rank].marked for rank in ranks)


def ends_of(totals: RankTotals) -> list[int]:
    """Return when the latest steps, or iterations, ended."""
    return [step.end_ns for step in totals.steps.totals.recent]


def once(found: Iterable[tuple[str, str, Late]]) -> list[tuple[str, str, Late]]:
    """Return, of (job, ``group_id``, straggler), each rank of a job once: with the group in which it costs most, and what it costs in others."""
    of_rank: dict[tuple[str, int], dict[str, Late]] = {}
    for job_id, group_id, late in found:
        groups = of_rank.setdefault((job_id, late.rank), {})
        groups[group_id] = max(groups.get(group_id, late), late, key=lambda each: each.cost_share)
    return [(job_id, *_in_all(groups)) for (job_id, _), groups in of_rank.items()]


def _in_all(groups: Mapping[str, Late]) -> tuple[str, Late]:
    worst = max(groups, key=lambda each: groups[each].cost_share)
    also = tuple((group_id, late.cost_share) for group_id, late in groups.items() if group_id != worst)
    return worst, groups[worst]._replace(also=also)


def _late_senders(
    rank_totals: Mapping[int, RankTotals], ends: Mapping[int, list[int]], now_ns: int
) -> Iterator[tuple[str, Late]]:
    """Yield (``group_id``, straggler) for groups in which every rank both sends and receives; ``ends`` of steps are by rank."""
    for group_id, (members, ranks) in senders(rank_totals).items():
        of_group = [rank_totals[rank] for rank in ranks]
        here = set(members) == ranks and not any(groups_elsewhere(totals, rank_totals) for totals in of_group)
        if here and all(waits_are_known(totals, now_ns) for totals in of_group):
            from commwatch_agent.analysis.straggler_search import waiting_least  # brings in numpy

            waited_ns = {totals.rank: totals.binned_waits_ns for totals in of_group}
            stepping = _are_stepping(ranks, rank_totals)
            for late in waiting_least(waited_ns, now_ns, steps_of(ends, ranks), stepping=stepping):
                yield group_id, late


def senders(rank_totals: Mapping[int, RankTotals]) -> dict[str, tuple[tuple[int, ...], set[int]]]:
    """Return the members of groups with messages, and those of them here that both send and receive, by ``group_id``.

    Only a group of which all ranks do both shows who is late: a rank that only sends waits for none, and would seem to be the straggler.
    """
    both: dict[GroupInfo, set[int]] = {}
    for rank, totals in rank_totals.items():
        ops = {(group, totals.op_name(op)) for group, op, _ in totals.messages}
        for group in {group for group, _ in ops}:
            if {(group, "send"), (group, "recv")} <= ops:
                both.setdefault(totals.group(group), set()).add(rank)
    return {info.group_id: (info.ranks, ranks) for info, ranks in both.items() if info.ranks}


def waits_are_known(totals: RankTotals, now_ns: int) -> bool:
    """Return whether all recent waits of a rank in groups of this node are known. Otherwise it would seem to wait least.

    They are not known on a GPU, and while the rank records only some operations.
    """
    shed = totals.mode != FULL or (totals.mode_since_ns and totals.mode_since_ns > now_ns - WINDOWS_NS[-1])
    return not shed and not totals.on_device


def groups_elsewhere(totals: RankTotals, rank_totals: Mapping[int, RankTotals]) -> list[str]:
    """Return the groups of a rank, by ``group_id``, that also have ranks on other nodes, or may have; ``rank_totals``: the ranks here."""
    groups = totals.groups.values()
    return [info.group_id for info in groups if info.ranks is None or not rank_totals.keys() >= set(info.ranks)]


def steps_of(ends: Mapping[int, list[int]], ranks: Collection[int]) -> list[int]:
    """Return the ends of the latest steps of one of these ranks, in ns on the clock of this node."""
    return max((ends[rank] for rank in ranks if rank in ends), key=len, default=[])


def disagreements(jobs: Iterable[Job], now_ns: int) -> Iterator[Disagreement]:
    """Yield the latest disagreements of each group whose ranks are all on this node."""
    for job in jobs:
        for group_id, join in job.joins.items():
            for seq, parts in join.odd:
                ago_s = max(0, now_ns - max(part.end_ns for part in parts)) / 1e9
                yield Disagreement(
                    job.id, group_id, seq, {part.rank: Call(*op_of(part), part.root) for part in parts}, ago_s
                )
