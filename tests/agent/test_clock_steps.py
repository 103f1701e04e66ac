"""A wall clock that is set while a job runs: durations, joins, counters and alerts are of the monotonic clock; the history stays sane."""

from __future__ import annotations

from pathlib import Path

import pytest

from commwatch_agent.history.history import History
from commwatch_agent.model.cells import SLOT_NS
from tests.helpers import EPOCH_NS, MS, Trainer, Watch, group_entry, identity, mark, operation

HOUR_NS = 3600 * 1000 * MS
SECOND_NS = 1000 * MS
ALWAYS = (0, 1 << 62)


@pytest.mark.parametrize("step_ns", [HOUR_NS, -HOUR_NS, 24 * 365 * HOUR_NS])
def test_clock_set_under_a_job(tmp_path: Path, step_ns: int) -> None:
    """An hour on or back, or a year: nothing is lost, counted twice or measured otherwise; a job that runs is not forgotten."""
    watch = Watch(tmp_path)
    ranks = [Trainer(watch.rings / f"{rank}.ring", identity(rank=rank)) for rank in range(2)]
    try:
        for rank in ranks:
            rank.call("name", [(group_entry(),)])
        for second in range(60):
            at = second * SECOND_NS
            for number, rank in enumerate(ranks):
                late = number * 20 * MS
                rank.write(
                    [operation(start_ns=at + late, end_ns=at + 100 * MS, seq=second), mark(second, at + 200 * MS)]
                )
            stepped = step_ns if 20 <= second < 40 else 0  # there, and back again
            watch.intake.tick(at + SECOND_NS, EPOCH_NS + at + SECOND_NS + stepped)
        (job,) = watch.aggregate.jobs.values()
        books = sorted(job.rank_totals.values(), key=lambda book: book.rank)
        assert [sum(cell.count for _, cell in book.cells()) for book in books] == [60, 60]
        assert [sum(cell.duration_ns for _, cell in book.cells()) for book in books] == [6000 * MS, 4800 * MS]
        assert [sum(cell.joined for _, cell in book.cells()) for book in books] == [60, 60]
        assert [book.lateness_ns for book in books] == [{}, {0: 1200 * MS}]
        assert [book.steps.totals.count for book in books] == [59, 59]
    finally:
        for rank in ranks:
            rank.kill()
    watch.tick(100 * SECOND_NS)
    assert watch.count() == 120
    rows = watch.rows("rank")
    assert [rows[rank,].seconds for rank in (0, 1)] == pytest.approx([6.0, 4.8])
    with History(watch.path) as history:
        rings = [ring.id for ring in history.rings()]
        slots = {row.slot_ns for row in history.rollups(*ALWAYS, rings)}
        steps = history.steps(*ALWAYS, rings)
    # Rolled up by when it happened on the trainer's clock, as its ring says it lies in wall time.
    assert slots <= {EPOCH_NS - EPOCH_NS % SLOT_NS + n * SLOT_NS for n in range(8)}
    assert all(EPOCH_NS <= step.start_ns < step.end_ns <= EPOCH_NS + 60 * SECOND_NS for step in steps)


def test_clock_set_back_after_a_job(tmp_path: Path) -> None:
    """A job that is over leaves ``/metrics`` in the end, also where the clock was set back after its end."""
    watch = Watch(tmp_path)
    with Trainer(watch.rings / "a.ring") as rank:
        rank.write([operation(start_ns=0, end_ns=9)])
        watch.tick()
    watch.tick(SECOND_NS)
    watch.intake.tick(2 * SECOND_NS, EPOCH_NS - HOUR_NS)
    assert list(watch.aggregate.jobs) == ["job"]
    watch.intake.tick(400 * SECOND_NS, EPOCH_NS - HOUR_NS + 400 * SECOND_NS)
    assert list(watch.aggregate.jobs) == []


def test_clock_set_on_after_a_job(tmp_path: Path) -> None:
    """A job that has just ended stays in ``/metrics`` for its five minutes, where the clock is set on meanwhile."""
    watch = Watch(tmp_path)
    with Trainer(watch.rings / "a.ring") as rank:
        rank.write([operation(start_ns=0, end_ns=9)])
        watch.tick()
    watch.tick(SECOND_NS)
    watch.intake.tick(2 * SECOND_NS, EPOCH_NS + HOUR_NS)
    assert list(watch.aggregate.jobs) == ["job"]
