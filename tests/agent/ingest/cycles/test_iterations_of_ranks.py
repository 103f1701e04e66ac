"""Iterations in what the agent knows of a rank: its steps, their label, and what a step mark does to them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from commwatch.wire import events as ev
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.history.history import History
from commwatch_agent.ingest.batches import Batch, ingest, ingest_records
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.model.views import ITERATIONS, MARKS
from commwatch_agent.prometheus.exporter import Exporter
from tests.helpers import MS, Watch, group_entry, identity, mark, operation, packed, write_ring

#: An iteration takes 100 ms, of which an operation of 20 ms and one of 10 ms.
EVERY = 100 * MS


def turn(number: int, *ops: str) -> list[tuple[int, ...]]:
    """The records of one turn."""
    begin = (number + 1) * EVERY
    return [
        operation(
            op,
            start_ns=begin + at * 40 * MS,
            end_ns=begin + at * 40 * MS + (20 - 10 * at) * MS,
            seq=len(ops) * number + at,
        )
        for at, op in enumerate(ops)
    ]


def rank() -> RankTotals:
    totals = RankTotals(identity(), {})
    totals.learn([group_entry()])
    return totals


def test_shares_of_iterations() -> None:
    """Iterations have the duration and the communication of a turn; exposed time is not known, and none is long."""
    totals = rank()
    for number in range(100):
        ingest_records(totals, packed(*turn(number, "all_reduce", "all_gather")))
    steps = totals.steps.take()
    assert len(steps) > 60
    assert {(step.end_ns - step.start_ns, step.comm_ns, step.exposed_ns, step.long) for step in steps} == {
        (EVERY, 30 * MS, None, False)
    }
    assert totals.steps.source == ITERATIONS
    comm, exposed = totals.steps.totals.shares(100 * EVERY) or (None, None)
    assert comm == pytest.approx(0.3)
    assert exposed is None


def test_iterations_are_periods_once() -> None:
    """The time of a rank is counted once: in seconds before and after its iterations, and in iterations."""
    totals = rank()
    for number in range(200):
        loop = ("all_reduce", "all_gather") if number < 100 else ("all_reduce", "barrier")[:: 1 if number % 3 else -1]
        ingest_records(totals, packed(*turn(number, *loop)))
        totals.tick((number + 2) * EVERY + totals.offset_ns)
    periods = totals.steps.periods
    assert periods.duration_ns <= 200 * EVERY
    assert periods.comm_ns / periods.duration_ns == pytest.approx(0.3, rel=0.1)


def test_wait_for_a_root() -> None:
    """An iteration that is mostly a wait for a root, as for a server's next request, has no communication share."""
    totals = rank()
    for number in range(100):
        ingest_records(totals, packed(*turn(number, "broadcast", "all_reduce")))
    assert totals.steps.totals.count > 60
    assert totals.steps.totals.shares(100 * EVERY) is None


def test_mark_ends_iterations(tmp_path: Path) -> None:
    """The first step mark drops the iterations before it, in memory and in the history, and steps have the label of marks."""
    watch = Watch(tmp_path)
    ring = write_ring(watch.rings, [], [group_entry()])
    for number in range(60):
        for record in turn(number, "all_reduce", "all_gather"):
            ring.write(*record)
        watch.tick((number + 2) * EVERY)
    (job,) = QueryService(watch.path).jobs()
    assert job.step_source == ITERATIONS
    assert stored(watch) > 20
    (totals,) = watch.aggregate.rank_totals()
    for number in range(60, 80):
        for record in (*turn(number, "all_reduce", "all_gather"), mark(number - 60, (number + 1) * EVERY + 90 * MS)):
            ring.write(*record)
        watch.tick((number + 2) * EVERY)
    (job,) = QueryService(watch.path).jobs()
    assert (job.step_source, totals.steps.source) == (MARKS, MARKS)
    assert 10 <= stored(watch) == totals.steps.totals.count <= 19
    ring.release()


def stored(watch: Watch) -> int:
    with History(watch.path) as history:
        return len(history.steps(0, ev.MAX_PLAUSIBLE, [ring.id for ring in history.rings()]))


def test_no_share_in_the_metrics_of_what_may_be_idle() -> None:
    """Ranks whose iterations are mostly waiting have no share of communication for alerts; others have one, and the label of iterations."""
    for waited, known in ((EVERY // 50, True), (EVERY // 5, False)):
        aggregate = JobTable()
        ranks = [aggregate.open(str(n), identity(rank=n)) for n in range(2)]
        for totals in ranks:
            totals.learn([group_entry()])
            totals.alive = True
        for number in range(200):
            begin = (number + 1) * EVERY
            records = [
                operation(start_ns=begin + late * waited, end_ns=begin + 30 * MS, seq=number) for late in range(2)
            ]
            ingest([Batch(totals, packed(each), None) for totals, each in zip(ranks, records, strict=True)])
        page = Exporter(aggregate, threading.RLock(), lambda: 201 * EVERY, list)
        names = {(sample.name, sample.labels.get("rank")) for family in page.collect() for sample in family.samples}
        assert ("commwatch_steps_info", "0") in names
        assert (("commwatch_comm_share_ratio", "0") in names) == known


def test_restart_of_the_agent(tmp_path: Path) -> None:
    """After a restart of the agent, a rank has iterations again, with the same numbers, and marks that come later still end them."""
    first = Watch(tmp_path)
    ring = write_ring(first.rings, [], [group_entry()])
    for number in range(60):
        for record in turn(number, "all_reduce", "all_gather"):
            ring.write(*record)
        first.tick((number + 2) * EVERY)
    before = stored(first)
    first.store.close()
    second = Watch(tmp_path)
    for number in range(60, 120):
        for record in turn(number, "all_reduce", "all_gather"):
            ring.write(*record)
        second.tick((number + 2) * EVERY)
    (totals,) = second.aggregate.rank_totals()
    assert (totals.marked, totals.steps.source) == (False, ITERATIONS)
    assert stored(second) >= before + 20
    with History(second.path) as history:
        numbers = {step.seq % 2 for step in history.steps(0, ev.MAX_PLAUSIBLE, [row.id for row in history.rings()])}
    assert len(numbers) == 1
    for number in range(10):
        ring.write(*mark(number, (number + 122) * EVERY))
    second.tick(140 * EVERY)
    assert totals.steps.source == MARKS
    assert stored(second) == totals.steps.totals.count == 9
    ring.release()
