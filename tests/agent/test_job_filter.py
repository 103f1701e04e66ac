"""A filter by job reaches the history: nothing of other jobs is read or returned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from commwatch_agent.history.chunks import Damaged
from commwatch_agent.questions.operations import Wanted, operations
from commwatch_agent.report.report import build
from tests.helpers import MS, Trainer, Watch, group_entry, identity, mark, operation

JOBS, STEPS = ("mine", "theirs"), 100


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    """Two running jobs of two ranks, with steps and operations of several sizes; their rollups are still in memory."""
    made = Watch(tmp_path)
    with ExitStack() as running:
        for job in JOBS:
            for rank in range(2):
                trainer = running.enter_context(Trainer(made.rings / f"{job}{rank}.ring", identity(job, rank)))
                trainer.call("name", [(group_entry(0, (0, 1), group_id=f"{job}-world"),), ({"dtype": 1, "name": job},)])
                trainer.write([mark(0, 1), *(record for n in range(STEPS) for record in _step(rank, n))])
        made.tick()
        yield made


def _step(rank: int, n: int) -> list[tuple[int, ...]]:
    """Rank 1 comes a millisecond late; an operation takes 10 ms, and 10 ms more for each megabyte."""
    at, megabytes = n * 100 * MS, (0.01, 0.1, 1, 4)[n % 4]
    end = at + round((12 + 10 * megabytes) * MS)
    return [
        operation(start_ns=at + (1 + rank) * MS, end_ns=end, seq=n, size=round(megabytes * 1e6), dtype=1),
        mark(n + 1, at + 99 * MS, exposed_ns=50 * MS),
    ]


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the chunks that are unpacked."""
    seen: list[int] = []
    plain = Damaged.unpacked

    def noted(self: Damaged, path: Path, chunk: int, data: bytes) -> bytes | None:
        seen.append(chunk)
        return plain(self, path, chunk, data)

    monkeypatch.setattr(Damaged, "unpacked", noted)
    return seen


def test_operations_of_a_job(watch: Watch, unpacked: list[int]) -> None:
    """Operations of one job are found without reading the chunks of others."""
    found = operations(watch.agent, Wanted(0, 1 << 62, "mine", limit=1000))
    assert {(each.job_id, each.dtype) for each in found.operations} == {("mine", "mine")}
    assert (len(found.operations), len(unpacked)) == (2 * STEPS, 2)


def test_report_of_a_job(watch: Watch, unpacked: list[int]) -> None:
    """The facts that advice follows from are read out of the job's own chunks only."""
    report = build(watch.agent, "mine", watch.path, "", [])
    assert report is not None
    assert (report.comm_share or 0) > 0.2
    assert len(unpacked) == len(set(unpacked)) == 2


def test_live_books_of_others(watch: Watch) -> None:
    """What is in memory of another job is in none of the answers about a job."""
    assert [cell for book in watch.aggregate.rank_totals() for cell in book.live_cells()]
    for job in JOBS:
        assert [wait.wait_s for wait in watch.agent.totals(job, []).waits] == pytest.approx([0.001 * STEPS, 0])
        efficiencies, lines = watch.agent.efficiency(0, 1 << 62, job)
        assert {each.job_id for each in efficiencies} == {each.job_id for each in lines} == {job}
        assert {group.group_id for group in watch.agent.groups(job)} == {f"{job}-world"}
        _, rows = watch.agent.summary(0, 1 << 62, ["job_id"], {"job_id": job})
        assert [(row.by["job_id"], row.count) for row in rows] == [(job, 2 * STEPS)]
