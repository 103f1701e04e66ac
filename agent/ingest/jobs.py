"""All jobs of this node, with the totals of their ranks. Pure: no clock, no file; times are parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from commwatch.ingest.collective_join import GroupJoin
from commwatch.ingest.rank_totals import RankTotals

if TYPE_CHECKING:
    from commwatch.core.corruption.collectives import GroupChecks
    from commwatch.core.corruption.replicas import SetJoin


class Job:
    """The ranks of one job on this node, over all its restarts."""

    def __init__(self, job_id: str) -> None:
        self.id = job_id
        self.joins: dict[str, GroupJoin] = {}
        #: Sets of replicated parameters, by ``group_id`` and key.
        self.replicas: dict[tuple[str, str], SetJoin] = {}
        #: Checked collectives, by ``group_id``.
        self.checked: dict[str, GroupChecks] = {}
        self.rank_totals: dict[str, RankTotals] = {}
        #: Monotonic time when its last rank was found ended; ``None`` while one runs.
        self.ended_ns: int | None = None

    @property
    def owners(self) -> set[int]:
        """The users who wrote its rings."""
        return {totals.owner_uid for totals in self.rank_totals.values() if totals.owner_uid is not None}


class Aggregate:
    """All jobs of this node.

    Args:
        keep_ended_ns: how long the series of an ended job stay in ``/metrics``.
    """

    def __init__(self, keep_ended_ns: int = 300_000_000_000) -> None:
        self.jobs: dict[str, Job] = {}
        self._keep_ended_ns = keep_ended_ns

    def open(self, uid: str, identity: dict[str, Any]) -> RankTotals:
        """Create the totals of a new ring and return them; raises ``KeyError`` or ``TypeError`` for a damaged identity."""
        job_id = str(identity["job"])
        job = self.jobs.get(job_id) or Job(job_id)
        totals = RankTotals(identity, job.joins, job.replicas, job.checked)
        if any(other.rank == totals.rank for other in job.rank_totals.values()):
            for join in job.joins.values():
                join.restart()
            job.replicas.clear()
            job.checked.clear()
        self.jobs[job_id] = job
        job.rank_totals[uid] = totals
        job.ended_ns = None
        return totals

    def retire(self, now_ns: int) -> None:
        """Drop the jobs that ended more than ``keep_ended_ns`` ago."""
        for job in list(self.jobs.values()):
            if any(totals.alive for totals in job.rank_totals.values()):
                job.ended_ns = None
            elif job.ended_ns is None:
                job.ended_ns = now_ns
            elif now_ns - job.ended_ns > self._keep_ended_ns:
                del self.jobs[job.id]

    def rank_totals(self) -> Iterator[RankTotals]:
        """Yield the totals of every rank of every job."""
        for job in self.jobs.values():
            yield from job.rank_totals.values()

    def peers(self) -> set[str]:
        """Return the addresses of agents of other nodes that ranks have reported, for jobs that are in memory."""
        return {address for totals in self.rank_totals() for address in totals.peers}
