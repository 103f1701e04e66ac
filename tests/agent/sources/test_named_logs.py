"""Which files of the ranks of jobs are followed, and how."""

from __future__ import annotations

import os
from typing import Any

from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.sources.named_logs import named_by_ranks
from commwatch_collectors.nccl.matching import LogPattern, Output
from tests.helpers import identity

UID = os.getuid()


def output(path: str = "/logs/job.log", inode: int = 7, size: int = 0) -> dict[str, Any]:
    """An entry of a names file."""
    return {"output": path, "device": 1, "inode": inode, "size": size}


def rank_of(aggregate: JobTable, job: str, rank: int, *entries: dict[str, Any], uid: int | None = UID) -> Any:
    """A rank that has named these files."""
    totals = aggregate.open(f"{job}{rank}", identity(job, rank), uid)
    totals.owner_uid = uid
    totals.learn(entries)
    return totals


def found(aggregate: JobTable, job: str = "job") -> list[LogPattern]:
    """What is to be followed for a job."""
    return named_by_ranks(aggregate.jobs.values())[job]


def test_shared_output() -> None:
    """Ranks that share a file have one pattern, from where the first of them began; ranks with files of their own have one each."""
    aggregate = JobTable()
    rank_of(aggregate, "job", 0, output(size=20), output("/logs/0", 8))
    rank_of(aggregate, "job", 1, output(size=10), output("/logs/1", 9, 5))
    assert found(aggregate) == [
        LogPattern("/logs/job.log", UID, Output((1, 7), 10)),
        LogPattern("/logs/0", UID, Output((1, 8), 0)),
        LogPattern("/logs/1", UID, Output((1, 9), 5)),
    ]


def test_names_are_no_patterns() -> None:
    """Characters of a name do not match others; a relative name, or one of an unknown user, is not followed."""
    aggregate = JobTable()
    rank_of(aggregate, "job", 0, output("/logs/[a]*"), output("job.log", 8))
    rank_of(aggregate, "job", 1, output("/logs/1", 9), uid=None)
    assert [pattern.pattern for pattern in found(aggregate)] == ["/logs/[[]a][*]"]


def test_copies_of_nccls_lines() -> None:
    """NCCL's lines in an output are left out if each of its ranks has a log of NCCL, and count if one has none."""
    aggregate = JobTable()
    first = rank_of(aggregate, "job", 0, output(), {"nccl_log": "/logs/nccl.0"})
    second = rank_of(aggregate, "job", 1, output())
    assert [pattern.output for pattern in found(aggregate)] == [None, Output((1, 7), 0)]
    second.learn([{"nccl_log": "/logs/nccl.1"}])
    assert found(aggregate)[-1].output == Output((1, 7), 0, without_nccl=True)
    assert first.outputs == second.outputs


def test_output_ends_with_its_ranks() -> None:
    """An output is over when the last of its ranks has ended; one that has left its group may still write."""
    aggregate = JobTable()
    ranks = [rank_of(aggregate, "job", rank, output()) for rank in range(2)]
    ranks[0].alive = False
    assert found(aggregate) == [LogPattern("/logs/job.log", UID, Output((1, 7), 0))]
    ranks[1].alive, ranks[1].has_left = False, True
    assert found(aggregate) == [LogPattern("/logs/job.log", UID, Output((1, 7), 0))]
    ranks[1].has_left = False
    assert found(aggregate) == [LogPattern("/logs/job.log", UID, Output((1, 7), 0, is_over=True))]


def test_two_jobs_in_one_file() -> None:
    """A file to which ranks of two jobs write is read for neither; one after the other, for the one that runs."""
    aggregate = JobTable()
    first = rank_of(aggregate, "job", 0, output())
    rank_of(aggregate, "next", 0, output(size=50))
    assert [found(aggregate, job)[0].output for job in ("job", "next")] == [
        Output((1, 7), 0, is_over=True),
        Output((1, 7), 50, is_over=True),
    ]
    first.alive = False
    assert [found(aggregate, job)[0].output for job in ("job", "next")] == [
        Output((1, 7), 0, is_over=True),
        Output((1, 7), 50),
    ]


def test_runs_before() -> None:
    """Only files of the job's latest run are followed."""
    aggregate = JobTable()
    for run, inode in (("a", 7), ("b", 8)):
        totals = aggregate.open(run, identity("job", started_ns=inode), UID, name="job", run=run)
        totals.owner_uid = UID
        totals.learn([output(f"/logs/{run}", inode)])
    assert [pattern.pattern for pattern in found(aggregate)] == ["/logs/b"]
