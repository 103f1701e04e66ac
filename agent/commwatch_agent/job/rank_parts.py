"""Late ranks of groups with ranks on several nodes: what each agent reports of its ranks, and what all reports show. Pure.

Such a group is never complete in one agent, so no agent judges it alone. Each agent reports the parts of its ranks; one joins those of all
agents by (``group_id``, ``seq``) and by ages, because clocks of nodes differ.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from commwatch.wire import events as ev
from commwatch.wire.numbers import in_order
from commwatch_agent.analysis.ended_operations import ends_of, once, roles, steps_of
from commwatch_agent.ingest.collective_join import MOST_PENDING, NOT_KNOWN_NS, GroupJoin, Part
from commwatch_agent.ingest.jobs import Job
from commwatch_agent.ingest.rank_totals import RankTotals, op_of
from commwatch_agent.ingest.stragglers import LEAST_PERIODS, WINDOWS_NS, Late, LateWindow

#: Most parts in one answer, over all its groups and ranks.
MOST_PARTS = 16_384
#: Most parts that the answers of all agents should have together, and fewest collectives of a group to judge by.
_MOST_OF_ALL, _LEAST = 500_000, 64
#: An answer has the parts of this time up to now.
WINDOW_NS = WINDOWS_NS[-1]
#: Longer times (30 years) are not plausible.
MOST_S = 1e9
#: Fewest steps to judge by, however long they take: those of the fewest periods, the one before, and one whose parts may have gone. And most.
_LEAST_STEPS, _MOST_STEPS = LEAST_PERIODS + 2, 1024


@dataclass(frozen=True)
class RankParts:
    """The latest symmetric operations of one rank in a group with ranks on other nodes: columns, newest first, and its steps."""

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
    #: The rank marks steps (``roles``); seconds since the ends of the latest ones, newest first, or of iterations if it marks none.
    stepping: bool = False
    steps_s: list[float] = field(default_factory=list)
    #: One more column: seconds that the rank was blocked in it (``collective_join.Part.blocked_ns``); ``None``: perhaps all of its duration.
    #: Empty: of an agent that does not know it.
    blocked_s: list[float | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        blocked_s = self.blocked_s or self.seq
        columns = (self.seq, self.op, self.duration_s, self.age_s, self.own_s, self.run, blocked_s)
        if len({len(column) for column in columns}) > 1:
            raise ValueError("columns of different lengths")
        known_s = (each for each in (*self.own_s, *self.blocked_s) if each is not None)
        times_s = (*self.duration_s, *self.age_s, *self.steps_s, *known_s)
        runs = all(run is None or 0 <= run < ev.MAX_PLAUSIBLE for run in self.run)
        if not (0 <= self.rank < 1 << 31 and runs and all(0 <= time_s < MOST_S for time_s in times_s)):
            raise ValueError("numbers out of range")


def most_collectives(columns: int) -> int:
    """Return how many collectives of a group to request; ``columns``: pairs of a group and a rank that the answers have together."""
    return max(_LEAST, min(MOST_PENDING, _MOST_OF_ALL // max(1, columns)))


def parts(jobs: Iterable[Job], now_ns: int, limit: int = MOST_PENDING) -> tuple[int, list[RankParts]]:
    """Return the parts of the last 30 s, or of the last steps if they are longer, that wait for ranks of other nodes.

    Args:
        limit: most collectives (the latest) of a group.

    Returns:
        The limit in effect, which is lower with many groups and ranks; and the parts.
    """
    across = [(job, groups) for job in jobs if (groups := _across(job))]
    columns_of_all = sum(len(ranks) for _, groups in across for ranks in groups.values())
    limit = max(1, min(limit, MOST_PARTS // max(1, columns_of_all)))
    found = []
    for job, groups in across:
        alive = {totals.rank: totals for totals in job.rank_totals.values() if totals.alive}
        steps = {rank: latest_steps(totals, now_ns) for rank, totals in alive.items()}
        for group_id, ranks in groups.items():
            join = job.joins[group_id]
            columns = {
                rank: RankParts(
                    job.id, group_id, join.size, rank, [], [], [], [], [], [], alive[rank].marked, steps[rank]
                )
                for rank in ranks
            }
            _fill(columns, islice(join.waiting(), limit), now_ns)
            found += [column for column in columns.values() if column.seq]
    return limit, found


def latest_steps(totals: RankTotals, now_ns: int) -> list[float]:
    """Return the seconds since the ends of the latest steps or iterations of a rank, newest first: of 30 s, or at least a few."""
    ages = [max(0, now_ns - end_ns) for end_ns in reversed(ends_of(totals))]
    some = max(_LEAST_STEPS, bisect_right(ages, WINDOW_NS))
    return [_s(age) for age in ages[: min(some, _MOST_STEPS)]]


def _across(job: Job) -> dict[str, list[int]]:
    """Return this node's ranks of each group that also has ranks on other nodes, by ``group_id``."""
    here: dict[str, set[int]] = {}
    for totals in job.rank_totals.values():
        if totals.alive:
            for info in totals.groups.values():
                here.setdefault(info.group_id, set()).add(totals.rank)
    return {at: sorted(ranks) for at, ranks in here.items() if at in job.joins and len(ranks) < job.joins[at].size}


def _fill(columns: dict[int, RankParts], waiting: Iterable[tuple[int, list[Part]]], now_ns: int) -> None:
    window_ns = {rank: _window_ns(column) for rank, column in columns.items()}
    for seq, collective in waiting:
        for part in collective:
            column = columns.get(part.rank)
            if column is not None and part.totals.owner.alive and now_ns - part.end_ns < window_ns[part.rank]:
                column.seq.append(seq)
                column.op.append(op_of(part)[0])
                column.duration_s.append(round(part.duration_ns / 1e9, 7))
                column.own_s.append(round(part.own_ns / 1e9, 7) if part.own_ns < NOT_KNOWN_NS else None)
                column.run.append(part.run)
                column.blocked_s.append(round(part.blocked_ns / 1e9, 7) if part.blocked_ns < NOT_KNOWN_NS else None)
                column.age_s.append(_s(max(0, now_ns - part.end_ns)))


def _window_ns(column: RankParts) -> int:
    """Return how old parts of a rank may be."""
    return max([WINDOW_NS, *map(to_ns, column.steps_s[-1:])])


def _s(age_ns: int) -> float:
    return round(age_ns / 1e9, 6)


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
    from commwatch_agent.ingest.lateness import Collectives, add_late, lost, own_lateness, split, table
    from commwatch_agent.ingest.own_time import NO_RUN

    #: By number: op, duration, own time, run and blocked time of each rank, and the end of the first one.
    collectives: dict[int, list[tuple[str, int, int, int, int, int]]] = {}
    for column in ranks:
        times_s = column.duration_s, column.own_s, column.blocked_s or [None] * len(column.seq), column.age_s
        for seq, op, run, *of_part in zip(column.seq, column.op, column.run, *times_s, strict=True):
            took, own, blocked_ns, age = (NOT_KNOWN_NS if time_s is None else to_ns(time_s) for time_s in of_part)
            part = op, took, own, NO_RUN if run is None else run, blocked_ns, -age
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
        _, duration, owns, runs, blocked, ends = (
            table(values) for values in zip(*([[0], *each[1:]] for each in joined), strict=True)
        )
        rank = table([[column.rank for column in ranks]] * len(joined))
        made = Collectives(0 * ends[:, 0], ends[:, 0], rank, split(duration)[0], owns, runs, lost(duration, blocked))
        add_late([made], own_lateness([made], [join]), [join])
    return join.window


def to_ns(seconds: float) -> int:
    """Return seconds as nanoseconds."""
    return round(seconds * 1e9)


def ends_from(steps_s: Sequence[float]) -> list[int]:
    """Return when steps ended that agents report as ages, newest first: in order, in ns before now, which is 0."""
    return [-to_ns(age_s) for age_s in reversed(steps_s)]


def late_across(parts: Iterable[RankParts]) -> list[tuple[str, str, Late]]:
    """Return (job, ``group_id``, straggler) for groups with ranks on several nodes; each rank of a job ``once``."""
    found: list[tuple[str, str, Late]] = []
    parts = list(parts)
    of_jobs: dict[str, dict[int, RankParts]] = {}
    for part in parts:
        of_jobs.setdefault(part.job_id, {})[part.rank] = part
    for job, group_id, window in put_together(parts):
        of_job = of_jobs[job]
        stepping = {rank for rank, part in of_job.items() if part.stepping}
        for ranks in roles(window.ranks, stepping if len(stepping) > 1 else ()):
            found += [(job, group_id, late) for late in _late(window, ranks, of_job)]
    return once(found)


def _late(window: LateWindow, ranks: frozenset[int], of_job: Mapping[int, RankParts]) -> list[Late]:
    """Return the stragglers among some ranks of a group, as on one node; now is 0."""
    from commwatch_agent.analysis.straggler_search import stragglers_in  # brings in numpy
    from commwatch_agent.analysis.waits.without_steps import confirmed

    known = [of_job[rank] for rank in sorted(ranks) if rank in of_job]
    ends = {part.rank: ends_from(part.steps_s) for part in known}
    marks = {part.rank: ends[part.rank] for part in known if part.stepping}
    turns = {part.rank: ends[part.rank] for part in known if not part.stepping}
    # No minimum window: agents send at most the latest 1,024 collectives of a group, less than a second of a fast job.
    judge = partial(
        stragglers_in,
        window,
        0,
        steps_of(marks, ranks),
        least_ns=0,
        ranks=ranks,
        stepping=bool(marks),
        turns=steps_of(turns, ranks),
    )
    return confirmed(judge, marks, window.numbers, 0)
