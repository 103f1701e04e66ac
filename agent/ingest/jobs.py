"""All jobs in sight, with the books of their ranks. Pure: no clock, no file; times are parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from commwatch.ingest.collective_join import GroupJoin
from commwatch.ingest.rank_totals import RankTotals


class Job:
    """The ranks of one job on this node, in all lives of their processes."""

    def __init__(self, job_id: str) -> None:
        self.id = job_id
        self.joins: dict[str, GroupJoin] = {}
        self.books: dict[str, RankTotals] = {}
        #: When its last rank was found gone, on the monotonic clock; ``None`` while one lives.
        self.ended_ns: int | None = None


class Aggregate:
    """All jobs in sight.

    Args:
        keep_ended_ns: how long the series of an ended job stay in ``/metrics``.
    """

    def __init__(self, keep_ended_ns: int = 300_000_000_000) -> None:
        self.jobs: dict[str, Job] = {}
        self._keep_ended_ns = keep_ended_ns

    def open(self, uid: str, identity: dict[str, Any]) -> RankTotals:
        """The book of a ring that has come into sight; raises ``KeyError`` or ``TypeError`` on a damaged identity."""
        job_id = str(identity["job"])
        job = self.jobs.get(job_id) or Job(job_id)
        book = RankTotals(identity, job.joins)
        if any(other.rank == book.rank for other in job.books.values()):
            for join in job.joins.values():
                join.restart()
        self.jobs[job_id] = job
        job.books[uid] = book
        job.ended_ns = None
        return book

    def retire(self, now_ns: int) -> None:
        """Forget the jobs that ended long enough ago."""
        for job in list(self.jobs.values()):
            if any(book.alive for book in job.books.values()):
                job.ended_ns = None
            elif job.ended_ns is None:
                job.ended_ns = now_ns
            elif now_ns - job.ended_ns > self._keep_ended_ns:
                del self.jobs[job.id]

    def books(self) -> Iterator[RankTotals]:
        """Every rank of every job."""
        for job in self.jobs.values():
            yield from job.books.values()
