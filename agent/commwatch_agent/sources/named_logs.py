"""The log files that the ranks of jobs have named: NCCL's, and those that are the ranks' own output. Pure."""

from __future__ import annotations

import glob
from collections.abc import Collection, Iterable, Iterator

from commwatch_agent.analysis.live_ranks import run_key
from commwatch_agent.ingest.jobs import Job
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.model.names_file import OutputFile
from commwatch_collectors.nccl.matching import LogPattern, Output


def named_by_ranks(jobs: Iterable[Job]) -> dict[str, list[LogPattern]]:
    """Return by job the files that the ranks of its latest run have named; each must belong to the user of its rank.

    Lines of an output do not show whose they are, so it is read as long as ranks of one job have it, and of no other.
    """
    ranks = {
        job.id: [totals for totals in job.rank_totals.values() if totals.run_key == run]
        for job, run in ((job, run_key(job)) for job in jobs)
    }
    writers: dict[tuple[int, int], set[str]] = {}
    for job, of_job in ranks.items():
        for totals in of_job:
            for file in totals.outputs if totals.alive or totals.has_left else ():
                writers.setdefault(file.inode, set()).add(job)
    return {
        job: [*_of_nccl(of_job), *_outputs(of_job, {inode for inode, by in writers.items() if by == {job}})]
        for job, of_job in ranks.items()
    }


def _of_nccl(ranks: Iterable[RankTotals]) -> Iterator[LogPattern]:
    for totals in ranks:
        if totals.owner_uid is not None and totals.nccl_log is not None and totals.nccl_log.startswith("/"):
            yield LogPattern(glob.escape(totals.nccl_log), totals.owner_uid)


def _outputs(ranks: Iterable[RankTotals], running: Collection[tuple[int, int]]) -> Iterator[LogPattern]:
    """Yield the files that are the output of ranks; ``running``: those to which only ranks of this job write now."""
    shared: dict[tuple[str, tuple[int, int], int], list[tuple[OutputFile, RankTotals]]] = {}
    for totals in ranks:
        for file in totals.outputs:
            if totals.owner_uid is not None and file.path.startswith("/"):
                shared.setdefault((file.path, file.inode, totals.owner_uid), []).append((file, totals))
    for (path, inode, uid), by in shared.items():
        start = min(file.size for file, _ in by)
        has_logs = all(totals.nccl_log is not None for _, totals in by)
        yield LogPattern(glob.escape(path), uid, Output(inode, start, inode not in running, has_logs))
