"""Checksums of replicas that have ranks on several nodes: each agent gives those of its ranks, and they are compared together. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from commwatch.wire.numbers import ahead
from commwatch_agent.analysis.corruption import corruption
from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.ingest.jobs import Job
from commwatch_agent.model.views import GroupView

if TYPE_CHECKING:
    from commwatch_agent.model.corruption.replicas import Check

#: Most checksums in one answer, over all its sets and ranks.
MOST_SUMS = 32_768


@dataclass(frozen=True)
class RankChecks:
    """The first check of one rank and its latest ones, of one set of parameters; three columns, oldest first."""

    job_id: str
    group_id: str
    #: Equal on all ranks for the same parameters.
    key: str
    rank: int
    #: Of each checksum: a parameter, or neighbours that share it.
    names: list[str]
    #: Number of the step, and of the group's collectives by then.
    at: list[tuple[int, int]]
    #: Seconds since the check.
    age_s: list[float]
    #: Both sums of each parameter, as hexadecimal text.
    sums: list[str]

    def __post_init__(self) -> None:
        if not len(self.at) == len(self.age_s) == len(self.sums):
            raise ValueError("columns of different lengths")
        if any(len(each) != 32 * len(self.names) for each in self.sums):
            raise ValueError("sums do not fit the names")


def rank_checks(jobs: Iterable[Job], now_ns: int) -> list[RankChecks]:
    """Return the checks of sets that have ranks on other nodes as well; fewer of each with many parameters and ranks."""
    across = [
        (job.id, key, join, rank)
        for job in jobs
        for (_, key), join in job.replicas.items()
        for rank, totals in join.ranks.items()
        if totals.alive and len(join.ranks) < join.size
    ]
    total = sum(len(join.names) for _, _, join, _ in across)
    most = max(1, MOST_SUMS // max(1, total) - 1)
    found = []
    for job_id, key, join, rank in across:
        first, latest = join.first.get(rank), list(join.latest.get(rank, ()))[-most:]
        checks = latest if first is None or first in latest else [first, *latest]
        columns = (
            [each.at for each in checks],
            [_age_s(each, now_ns) for each in checks],
            [_text(each) for each in checks],
        )
        found.append(RankChecks(job_id, join.group_id, key, rank, list(join.names), *columns))
    return found


def _age_s(check: Check, now_ns: int) -> float:
    return round(max(0, now_ns - check.taken_ns) / 1e9, 6)


def _text(check: Check) -> str:
    return check.sums.astype(">u8").tobytes().hex()


def corruptions_across(parts: Iterable[RankChecks], groups: Mapping[tuple[str, str], GroupView]) -> Iterator[Verdict]:
    """Yield the verdicts on replicas of which the ranks of several nodes differ now.

    Args:
        groups: by job and ``group_id``.
    """
    sets: dict[tuple[str, str, str], dict[int, RankChecks]] = {}
    for part in parts:
        sets.setdefault((part.job_id, part.group_id, part.key), {})[part.rank] = part
    for (job_id, group_id, _), ranks in sets.items():
        group, names = groups.get((job_id, group_id)), {tuple(part.names) for part in ranks.values()}
        if group is not None and len(names) == 1 and len(ranks) > 1:
            yield from _judge(ranks, names.pop(), group)


def _judge(ranks: Mapping[int, RankChecks], names: tuple[str, ...], group: GroupView) -> Iterator[Verdict]:
    import numpy as np

    from commwatch_agent.model.corruption.replicas import SetJoin

    join, age_s = SetJoin(group.group_id, group.size, names), 0.0
    of_rank = {
        rank: dict(zip(part.at, zip(part.age_s, part.sums, strict=True), strict=True)) for rank, part in ranks.items()
    }
    common = set.intersection(*(set(checks) for checks in of_rank.values()))
    some = next(iter(common), (0, 0))
    for at in sorted(common, key=lambda at: (ahead(at[0], some[0]), at[1])):
        age_s = min(checks[at][0] for checks in of_rank.values())
        sums = {
            rank: np.frombuffer(bytes.fromhex(checks[at][1]), ">u8").astype(np.uint64).reshape(-1, 2)
            for rank, checks in of_rank.items()
        }
        join.judge(at[0], sums, -round(age_s * 1e9))
    for episode in join.episodes:
        if episode.latest_ns == join.judged_ns:
            yield corruption(episode, names, sorted(ranks), group, 0)
