"""Late ranks among those of several nodes that send each other messages, such as the stages of a pipeline. Pure.

The late one waits least (``straggler_search.waiting_least``). Each agent reports how long its ranks waited in each tenth of a second. They also
wait in collectives with ranks of other nodes, which follow from ``rank_parts``. Times are ages, because clocks of nodes differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from commwatch_agent.analysis.ended_operations import groups_elsewhere, senders, steps_of, waits_are_known
from commwatch_agent.ingest.jobs import Job
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.ingest.stragglers import BIN_NS, MOST_BINS, WINDOWS_NS, Late
from commwatch_agent.job.rank_parts import MOST_PARTS, MOST_S, RankParts, ends_from, latest_steps, to_ns

#: Most ranks of an answer, of each of their groups.
MOST_RANKS = MOST_PARTS // 256


@dataclass(frozen=True)
class MessageParts:
    """How long one rank waited lately, in a group whose ranks send each other messages and are on several nodes."""

    job_id: str
    group_id: str
    #: Ranks of the group, on all nodes.
    members: list[int]
    rank: int
    #: Seconds that it waited in each tenth of a second (``stragglers.BIN_NS``) up to now, newest first: for messages, and in collectives
    #: of groups of its node.
    waits_s: list[float]
    #: Its groups with collectives that wait for ranks of other nodes (``RankParts``), and seconds back to the first of them that is known.
    across: list[str]
    known_s: float
    #: As in ``RankParts``.
    stepping: bool
    steps_s: list[float]

    def __post_init__(self) -> None:
        times_s = (*self.waits_s, *self.steps_s, self.known_s)
        if not (
            self.rank in self.members and len(self.waits_s) <= MOST_BINS and all(0 <= each < MOST_S for each in times_s)
        ):
            raise ValueError("numbers out of range")


def message_parts(jobs: Iterable[Job], columns: Iterable[RankParts], limit: int, now_ns: int) -> list[MessageParts]:
    """Return the waits of ranks whose waits are all known, or follow from those of other nodes.

    Args:
        columns, limit: the answer of ``rank_parts.parts``.
    """
    found = []
    of_rank: dict[tuple[str, int], list[RankParts]] = {}
    for column in columns:
        of_rank.setdefault((column.job_id, column.rank), []).append(column)
    for job in jobs:
        alive = {totals.rank: totals for totals in job.rank_totals.values() if totals.alive}
        across_nodes = {at: each for at, each in senders(alive).items() if not each[1] >= set(each[0])}
        known = {
            rank
            for rank in set[int]().union(*(ranks for _, ranks in across_nodes.values()))
            if waits_are_known(alive[rank], now_ns) and not _waits_at_roots(job, alive[rank], alive, now_ns)
        }
        for group_id, (members, ranks) in across_nodes.items():
            for rank in sorted(ranks & known):
                whose, across = (job.id, group_id, list(members)), of_rank.get((job.id, rank), [])
                found.append(_part(whose, alive[rank], across, limit, now_ns))
    return found[:MOST_RANKS]


def _part(
    whose: tuple[str, str, list[int]], totals: RankTotals, across: list[RankParts], limit: int, now_ns: int
) -> MessageParts:
    cut_s = [each.age_s[-1] for each in across if len(each.seq) >= limit]
    return MessageParts(
        *whose,
        totals.rank,
        waits_s=_latest(totals, now_ns),
        across=[each.group_id for each in across],
        known_s=min(cut_s, default=MOST_BINS * BIN_NS / 1e9),
        stepping=totals.marked,
        steps_s=latest_steps(totals, now_ns),
    )


def _latest(totals: RankTotals, now_ns: int) -> list[float]:
    """Return the waits of a rank by tenth of a second, newest first, in s."""
    bins, now = totals.binned_waits_ns, now_ns // BIN_NS
    oldest = max((now - at for at in bins if 0 <= now - at < MOST_BINS), default=-1)
    return [round(bins.get(now - age, 0) / 1e9, 6) for age in range(oldest + 1)]


def _waits_at_roots(job: Job, totals: RankTotals, alive: Mapping[int, RankTotals], now_ns: int) -> bool:
    """Return whether a rank was lately in an operation with a root and ranks of other nodes: launches show who waited, and clocks differ."""
    joins = [job.joins[each] for each in groups_elsewhere(totals, alive) if each in job.joins]
    return any(join.is_rooted_since(now_ns - WINDOWS_NS[-1]) for join in joins)


def late_senders(messages: Iterable[MessageParts], columns: Iterable[RankParts]) -> Iterator[tuple[str, str, Late]]:
    """Yield (job, ``group_id``, straggler) for the groups of which the waits of all ranks are known."""
    groups: dict[tuple[str, str], dict[int, MessageParts]] = {}
    for part in messages:  # an agent that was queried under two names counts once
        groups.setdefault((part.job_id, part.group_id), {})[part.rank] = part
    collectives: dict[tuple[str, str], dict[int, RankParts]] = {}
    for column in columns:
        collectives.setdefault((column.job_id, column.group_id), {})[column.rank] = column
    waits = {at: _waits_in(ranks) for at, ranks in collectives.items()}
    for (job_id, group_id), ranks in groups.items():
        if any(ranks.keys() != set(part.members) for part in ranks.values()):
            continue
        if any(not waits.get((job_id, each)) for part in ranks.values() for each in part.across):
            continue
        from commwatch_agent.analysis.straggler_search import waiting_least  # brings in numpy

        known = int(min(to_ns(part.known_s) for part in ranks.values()) // BIN_NS)
        waited_ns = {
            rank: _waited_ns(part, [waits[job_id, each] for each in part.across], known) for rank, part in ranks.items()
        }
        stepping = any(part.stepping for part in ranks.values())
        steps = steps_of({rank: ends_from(part.steps_s) for rank, part in ranks.items() if part.stepping}, list(ranks))
        for late in waiting_least(waited_ns, 0, steps, stepping=stepping):
            yield job_id, group_id, late


def _waits_in(ranks: Mapping[int, RankParts]) -> dict[int, dict[int, int]]:
    """Return how long each rank of a group blocked for the last one, in ns by tenth of a second back; empty: ranks are missing."""
    if any(len(ranks) != column.group_size for column in ranks.values()):
        return {}
    shortest: dict[int, list[float]] = {}
    for column in ranks.values():
        for seq, duration_s in zip(column.seq, column.duration_s, strict=True):
            shortest.setdefault(seq, []).append(duration_s)
    found: dict[int, dict[int, int]] = {}
    for rank, column in ranks.items():
        bins = found.setdefault(rank, {})
        for seq, duration_s, age_s, run in zip(column.seq, column.duration_s, column.age_s, column.run, strict=True):
            if run is None and len(shortest[seq]) == len(ranks):
                age = to_ns(age_s) // BIN_NS
                bins[age] = bins.get(age, 0) + to_ns(duration_s - min(shortest[seq]))
    return found


def _waited_ns(part: MessageParts, across: Iterable[Mapping[int, Mapping[int, int]]], known: int) -> dict[int, int]:
    """Return how long a rank waited in all, by bin of time; now is bin 0."""
    waited = {-age: to_ns(wait_s) for age, wait_s in enumerate(part.waits_s) if age < known}
    for waits in across:
        for age, wait_ns in waits.get(part.rank, {}).items():
            if age < known:
                waited[-age] = waited.get(-age, 0) + wait_ns
    return waited
