"""What ended operations show: stragglers and disagreements of groups on this node, and parts of groups over several nodes. Pure.

A group with ranks on several nodes is never complete in one agent, so no agent judges it. Each agent returns its parts;
``put_together`` joins those of all agents by (``group_id``, ``seq``) and by ages, because clocks of nodes differ.
``verdicts.verdicts`` judges the operations in flight instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from commwatch.wire import events as ev
from commwatch.wire.modes import FULL
from commwatch.wire.numbers import in_order
from commwatch_agent.analysis.calls.differences import Call
from commwatch_agent.core.cells import GroupInfo
from commwatch_agent.ingest.collective_join import MOST_PENDING, NOT_KNOWN_NS, GroupJoin, Part
from commwatch_agent.ingest.jobs import Job
from commwatch_agent.ingest.rank_totals import RankTotals, op_of
from commwatch_agent.ingest.stragglers import WINDOWS_NS, Late, LateWindow

#: Most parts in one answer, over all its groups and ranks.
MOST_PARTS = 16_384
#: Most parts that the answers of all agents should have together, and fewest collectives of a group to judge by.
_MOST_OF_ALL, _LEAST = 500_000, 64
#: An answer has the parts of this time up to now.
WINDOW_NS = WINDOWS_NS[-1]
#: Longer times (30 years) are not plausible.
MOST_S = 1e9


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


@dataclass(frozen=True)
class RankParts:
    """The latest symmetric operations of one rank in a group with ranks on other nodes; six columns, newest first."""

    job_id: str
    group_id: str
    #: Ranks of the group, on all nodes.
    group_size: int
    rank: int
    seq: list[int]
    op: list[str]
    duration_s: list[float]
    #: Seconds since the end.
    age_s: list[float]
    #: Seconds that the rank itself took before the launch (``collective_join.Part.own_ns``); ``None``: not known.
    own_s: list[float | None]
    #: Number of the run that the operation is in (``collective_join.OwnLateness``); ``None``: none, the rank blocked in it.
    run: list[int | None]
    #: The rank marks steps (``roles``).
    stepping: bool = False

    def __post_init__(self) -> None:
        columns = (self.seq, self.op, self.duration_s, self.age_s, self.own_s, self.run)
        if len({len(column) for column in columns}) > 1:
            raise ValueError("columns of different lengths")
        times_s = (*self.duration_s, *self.age_s, *(own for own in self.own_s if own is not None))
        runs = all(run is None or 0 <= run < ev.MAX_PLAUSIBLE for run in self.run)
        if not (0 <= self.rank < 1 << 31 and runs and all(0 <= time_s < MOST_S for time_s in times_s)):
            raise ValueError("numbers out of range")


# -- on one node --------------------------------------------------------------------------------


def stragglers(jobs: Iterable[Job], now_ns: int) -> list[tuple[str, str, Late]]:
    """Return (job, ``group_id``, straggler) for groups whose ranks are all on this node; each rank of a job ``once``."""
    found: list[tuple[str, str, Late]] = []
    for job in jobs:
        rank_totals = {totals.rank: totals for totals in job.rank_totals.values() if totals.alive}
        if not rank_totals:
            continue
        from commwatch_agent.analysis.straggler_search import stragglers_in  # brings in numpy

        ends = {rank: _ends(totals) if totals.marked else [] for rank, totals in rank_totals.items()}
        turns = {rank: [] if totals.marked else _ends(totals) for rank, totals in rank_totals.items()}
        stepping = _stepping(rank_totals)
        of_groups = [
            (group_id, each)
            for group_id, join in job.joins.items()
            for ranks in roles(join.window.ranks, stepping)
            for each in stragglers_in(
                join.window,
                now_ns,
                _steps(ends, ranks),
                ranks=ranks,
                stepping=_are_stepping(ranks, rank_totals),
                turns=_steps(turns, ranks),
            )
        ]
        for group_id, each in (*of_groups, *_late_senders(rank_totals, ends, now_ns)):
            found.append((job.id, group_id, each))
    return once(found)


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


def _ends(totals: RankTotals) -> list[int]:
    """Return when the latest steps, or iterations, ended."""
    return [step.end_ns for step in totals.steps.totals.recent]


def once(found: Iterable[tuple[str, str, Late]]) -> list[tuple[str, str, Late]]:
    """Return, of (job, ``group_id``, straggler), each rank of a job once, with the group in which it costs most of the time."""
    worst: dict[tuple[str, int], tuple[str, str, Late]] = {}
    for each in found:
        job_id, _, late = each
        known = worst.setdefault((job_id, late.rank), each)
        if late.cost_share > known[2].cost_share:
            worst[job_id, late.rank] = each
    return list(worst.values())


def _late_senders(
    rank_totals: Mapping[int, RankTotals], ends: Mapping[int, list[int]], now_ns: int
) -> Iterator[tuple[str, Late]]:
    """Yield (``group_id``, straggler) for groups in which every rank both sends and receives; ``ends`` of steps are by rank."""
    for group_id, ranks in _senders(rank_totals).items():
        of_group = [rank_totals[rank] for rank in ranks]
        if all(_waits_are_known(totals, rank_totals, now_ns) for totals in of_group):
            from commwatch_agent.analysis.straggler_search import waiting_least  # brings in numpy

            waited_ns = {totals.rank: totals.binned_waits_ns for totals in of_group}
            stepping = _are_stepping(ranks, rank_totals)
            for late in waiting_least(waited_ns, now_ns, _steps(ends, ranks), stepping=stepping):
                # Where no step is marked, the first rank may wait for requests that it hands on.
                if stepping or late.rank != min(ranks):
                    yield group_id, late


def _senders(rank_totals: Mapping[int, RankTotals]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of groups in which every rank sends and receives, by ``group_id``.

    Other groups are left out, because a rank that only sends waits for none, and would seem to be the straggler.
    """
    both: dict[GroupInfo, set[int]] = {}
    for rank, totals in rank_totals.items():
        ops = {(group, totals.op_name(op)) for group, op, _ in totals.messages}
        for group in {group for group, _ in ops}:
            if {(group, "send"), (group, "recv")} <= ops:
                both.setdefault(totals.group(group), set()).add(rank)
    return {info.group_id: info.ranks for info, ranks in both.items() if info.ranks and set(info.ranks) == ranks}


def _waits_are_known(totals: RankTotals, rank_totals: Mapping[int, RankTotals], now_ns: int) -> bool:
    """Return whether all recent waits of a rank are known. Otherwise it would seem to wait least.

    They are not known on a GPU, while the rank records only some operations, and if it has groups with ranks on other nodes.
    """
    shed = totals.mode != FULL or (totals.mode_since_ns and totals.mode_since_ns > now_ns - WINDOWS_NS[-1])
    here = all(info.ranks is not None and rank_totals.keys() >= set(info.ranks) for info in totals.groups.values())
    return not shed and not totals.on_device and here


def _steps(ends: Mapping[int, list[int]], ranks: Collection[int]) -> list[int]:
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


def most_collectives(columns: int) -> int:
    """Return how many collectives of a group to request; ``columns``: pairs of a group and a rank that the answers have together."""
    return max(_LEAST, min(MOST_PENDING, _MOST_OF_ALL // max(1, columns)))


def parts(jobs: Iterable[Job], now_ns: int, limit: int = MOST_PENDING) -> tuple[int, list[RankParts]]:
    """Return the parts of the last 30 s that wait for ranks of other nodes.

    Args:
        limit: most collectives (the latest) of a group.

    Returns:
        The limit in effect, which is lower with many groups and ranks; and the parts.
    """
    across = [(job, group_id, ranks) for job in jobs for group_id, ranks in _across(job).items()]
    limit = max(1, min(limit, MOST_PARTS // max(1, sum(len(ranks) for _, _, ranks in across))))
    found = []
    for job, group_id, ranks in across:
        join = job.joins[group_id]
        marked = {totals.rank for totals in job.rank_totals.values() if totals.alive and totals.marked}
        columns = {
            rank: RankParts(job.id, group_id, join.size, rank, [], [], [], [], [], [], rank in marked) for rank in ranks
        }
        _fill(columns, islice(join.waiting(), limit), now_ns)
        found += [column for column in columns.values() if column.seq]
    return limit, found


def _across(job: Job) -> dict[str, list[int]]:
    """Return this node's ranks of each group that also has ranks on other nodes, by ``group_id``."""
    here: dict[str, set[int]] = {}
    for totals in job.rank_totals.values():
        if totals.alive:
            for info in totals.groups.values():
                here.setdefault(info.group_id, set()).add(totals.rank)
    return {at: sorted(ranks) for at, ranks in here.items() if at in job.joins and len(ranks) < job.joins[at].size}


def _fill(columns: dict[int, RankParts], waiting: Iterable[tuple[int, list[Part]]], now_ns: int) -> None:
    for seq, collective in waiting:
        for part in collective:
            column = columns.get(part.rank)
            if column is not None and part.totals.owner.alive and now_ns - part.end_ns < WINDOW_NS:
                column.seq.append(seq)
                column.op.append(op_of(part)[0])
                column.duration_s.append(round(part.duration_ns / 1e9, 7))
                column.own_s.append(round(part.own_ns / 1e9, 7) if part.own_ns < NOT_KNOWN_NS else None)
                column.run.append(part.run)
                column.age_s.append(round(max(0, now_ns - part.end_ns) / 1e9, 6))


# -- over many ----------------------------------------------------------------------------------


def put_together(columns: Iterable[RankParts]) -> Iterator[tuple[str, str, LateWindow]]:
    """Yield job, ``group_id`` and joined collectives of each group with all its ranks; now is 0, ends are minus ages."""
    groups: dict[tuple[str, str], dict[int, RankParts]] = {}
    for column in columns:  # an agent that was queried under two names counts once
        groups.setdefault((column.job_id, column.group_id), {})[column.rank] = column
    for (job_id, group_id), ranks in groups.items():
        size = next(iter(ranks.values())).group_size
        if len(ranks) == size:
            yield job_id, group_id, _join([ranks[rank] for rank in sorted(ranks)])


def _join(ranks: list[RankParts]) -> LateWindow:
    """Join the complete collectives. All ends are the first rank's, because two agents measure ages at two moments."""
    from commwatch_agent.ingest.lateness import Collectives, add_late, own_lateness, split, table
    from commwatch_agent.ingest.own_time import NO_RUN

    #: By number: op, duration, own time and run of each rank, and the end of the first one.
    collectives: dict[int, list[tuple[str, int, int, int, int]]] = {}
    for column in ranks:
        rows = zip(column.seq, column.op, column.duration_s, column.age_s, column.own_s, column.run, strict=True)
        for seq, op, duration_s, age_s, own_s, run in rows:
            own = NOT_KNOWN_NS if own_s is None else _ns(own_s)
            part = op, _ns(duration_s), own, NO_RUN if run is None else run, -_ns(age_s)
            collectives.setdefault(seq, []).append(part)
    joined = [
        list(zip(*collective, strict=True))
        for collective in map(collectives.__getitem__, in_order(collectives))  # as ``OwnLateness`` requires
        if len(collective) == len(ranks)
        and len({part[0] for part in collective}) == 1
        and collective[0][0] in ev.SYMMETRIC
    ]
    join = GroupJoin(len(ranks))
    if joined:
        _, duration, owns, runs, ends = (
            table(values) for values in zip(*([[0], *each[1:]] for each in joined), strict=True)
        )
        rank = table([[column.rank for column in ranks]] * len(joined))
        made = Collectives(0 * ends[:, 0], ends[:, 0], rank, split(duration)[0], owns, runs)
        add_late([made], own_lateness([made], [join]), [join])
    return join.window


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
