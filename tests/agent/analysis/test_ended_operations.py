"""Stragglers of groups whose ranks are all on one node."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from commwatch.wire import events as ev
from commwatch.wire.modes import COUNTERS
from commwatch_agent.analysis.ended_operations import once, stragglers
from commwatch_agent.analysis.live_ranks import shows_late_ranks
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.ingest.stragglers import Late
from commwatch_agent.job.rank_parts import WINDOW_NS, parts
from tests.helpers import MS, group_entry, identity, mark, operation, packed

S = 1000 * MS
#: A collective every 100 ms; the first ends at 100 ms.
EVERY = 100 * MS
LATE_MS, TOOK_MS = 50, 10


def operations(seqs: Iterable[int], took_ms: float, op: str = "all_reduce", **more: int) -> bytes:
    """Collectives of one rank."""
    ends = {seq: (seq + 1) * EVERY for seq in seqs}
    return packed(*(operation(op, start_ns=end - int(took_ms * MS), end_ns=end, seq=seq, **more) for seq, end in ends.items()))  # fmt: skip


def node(ranks: Iterable[int], late: int | None, seqs: Iterable[int] = range(50), size: int = 4) -> JobTable:
    """The totals of an agent: some ranks of a group, all of which take 60 ms per collective except the late one."""
    aggregate, seqs = JobTable(), list(seqs)
    for rank in ranks:
        ingest_records(add(aggregate, rank, size), operations(seqs, TOOK_MS if rank == late else TOOK_MS + LATE_MS))
    return aggregate


def add(aggregate: JobTable, rank: int, size: int) -> RankTotals:
    """The totals of one rank."""
    book = aggregate.open(f"ring-{rank}", identity(rank=rank, world_size=size))
    book.learn([group_entry(0, tuple(range(size)), "world", group_id="w")])
    return book


def test_late_in_several_groups() -> None:
    """A rank that is late in several groups is named with the one in which it costs most, and has what it costs in the others; jobs are apart."""
    some, most, other = Late(0, 6, 100, None), Late(0, 40, 100, None), Late(1, 5, 100, None)
    found = [("job", "tp", some), ("job", "dp", most), ("job", "tp", other), ("next", "tp", some), ("job", "pp", some)]
    in_all = most._replace(also=(("tp", 0.06), ("pp", 0.06)))
    assert once(found) == [("job", "dp", in_all), ("job", "tp", other), ("next", "tp", some)]


def test_whole_group() -> None:
    """A group whose ranks are all on this node is judged here, and its parts are not reported."""
    here = node(range(4), late=2, seqs=range(80))
    assert parts(here.jobs.values(), 81 * EVERY)[1] == []
    ((job, group_id, late),) = stragglers(here.jobs.values(), 81 * EVERY)
    assert (job, group_id, late.rank) == ("job", "w", 2)


def pipeline(slow: int, size: int = 3, ranks: Iterable[int] | None = None) -> JobTable:
    """The totals of stages that send and receive in each step of 100 ms; the slow one waits 5 ms for it, the others 50."""
    aggregate = JobTable()
    for rank in range(size) if ranks is None else ranks:
        waited_us = 5_000 if rank == slow else 50_000
        steps = [
            record
            for step in range(120)
            for at in [step * EVERY]
            for record in (
                operation("send", start_ns=at, end_ns=at + MS, seq=step, peer=(rank - 1) % size),
                operation(
                    "recv", start_ns=at, end_ns=at + 60 * MS, seq=step, peer=(rank + 1) % size, waited_us=waited_us
                ),
                mark(step, at + 90 * MS),
            )
        ]
        ingest_records(add(aggregate, rank, size), packed(*steps))
    return aggregate


@pytest.mark.parametrize("slow", range(3))
def test_slow_stage(slow: int) -> None:
    """Of ranks that wait for each other's messages the one that waits least is the straggler."""
    ((_, group_id, late),) = stragglers(pipeline(slow).jobs.values(), 120 * EVERY)
    assert (group_id, late.rank) == ("w", slow)
    assert late.steps is not None
    assert late.cost_ns / late.steps == pytest.approx(45 * MS, rel=0.02)


def test_slow_stage_is_not_known() -> None:
    """No rank is named where not all waits of one are known, which would then seem to wait least."""
    shed, back, alone, gpu, across = (pipeline(slow=1) for _ in range(5))
    next(shed.rank_totals()).mode = COUNTERS
    next(back.rank_totals()).mode_since_ns = 110 * EVERY
    next(alone.rank_totals()).alive = False
    next(gpu.rank_totals()).on_device = True
    next(across.rank_totals()).learn([group_entry(1, (0, 1, 2, 3), "world", group_id="all")])
    for each in (shed, back, alone, gpu, across):
        assert stragglers(each.jobs.values(), 120 * EVERY) == []


def test_one_way() -> None:
    """Of ranks that only send and ranks that only receive none is a straggler: who receives always waits."""
    aggregate = JobTable()
    for rank, op in enumerate(("send", "recv")):
        made = [
            operation(op, start_ns=at, end_ns=at + 90 * MS, seq=at // EVERY, peer=1 - rank, waited_us=rank * 80_000)
            for at in range(0, 120 * EVERY, EVERY)
        ]
        ingest_records(add(aggregate, rank, 2), packed(*made))
    assert stragglers(aggregate.jobs.values(), 120 * EVERY) == []


def test_late_ranks_are_known() -> None:
    """Who is late now is known of a job that has run for 5 s, lately, with all of its ranks here or judged elsewhere, too."""
    for late in (2, None):
        here, part = node(range(4), late, seqs=range(80)), node((0, 1), late, seqs=range(80))
        begins = node(range(4), late, seqs=range(40))
        assert shows_late_ranks(here.jobs.values(), 81 * EVERY, of_all_nodes=False)
        assert shows_late_ranks(part.jobs.values(), 81 * EVERY, of_all_nodes=True)
        assert not shows_late_ranks(part.jobs.values(), 81 * EVERY, of_all_nodes=False)
        assert not shows_late_ranks(here.jobs.values(), 81 * EVERY + WINDOW_NS, of_all_nodes=True)
        assert not shows_late_ranks(begins.jobs.values(), 41 * EVERY, of_all_nodes=True)
    assert not shows_late_ranks([], 0, of_all_nodes=True)


def test_ended_job() -> None:
    """A job that has ended has no straggler, nor has its next life one of the life before."""
    ended = node(range(4), late=2, seqs=range(80))
    for book in ended.rank_totals():
        book.alive = False
    assert stragglers(ended.jobs.values(), 81 * EVERY) == []
    (job,) = ended.jobs.values()
    again = ended.open("again", identity(rank=0, world_size=4))
    again.learn([group_entry(0, (0, 1, 2, 3), "world", group_id="w")])
    assert stragglers([job], 81 * EVERY) == []


def buckets(ranks: Iterable[int], late_ms: int) -> JobTable:
    """The totals of an agent: some of four ranks that exchange eight buckets in each step of 1 s; rank 2 is late in all of them."""
    aggregate = JobTable()
    for rank in ranks:
        records = []
        for step in range(20):
            for bucket in range(8):
                first = step * 1000 + 500 + 50 * bucket
                launch, end = first + late_ms * (rank == 2), first + late_ms + 1
                records.append(operation(start_ns=launch * MS, end_ns=end * MS, seq=8 * step + bucket, flags=ev.ASYNC))
            records.append(mark(step, (step + 1) * S - MS))
        ingest_records(add(aggregate, rank, 4), packed(*records))
    return aggregate


@pytest.mark.parametrize(("late_ms", "culprits"), [(10, []), (80, [2])])
def test_buckets_beside_computation(late_ms: int, culprits: list[int]) -> None:
    """A rank late to all eight buckets of a step of 1 s is late once: by 10 ms, 1%, it is no straggler; by 80 ms it is."""
    found = [late for _, _, late in stragglers(buckets(range(4), late_ms).jobs.values(), 20 * S)]
    assert [late.rank for late in found] == culprits
    for late in found:
        assert late.steps is not None
        assert late.cost_ns / late.steps == pytest.approx(80 * MS, rel=0.02)


def test_ranks_that_meet_in_few_steps() -> None:
    """Steps without a collective count to the next one that has one, if all of the job's groups are on this node, and none has messages."""

    def averages(size: int = 2) -> JobTable:
        here = JobTable()
        for rank in range(2):
            book, took_ms = add(here, rank, size), 310 if rank == 0 else 10
            made = [
                record
                for at in range(200)
                for end in [(at + 1) * EVERY // 2]
                for record in (
                    *(
                        [operation("all_reduce", start_ns=end - took_ms * MS, end_ns=end, seq=at // 20)]
                        if at % 20 == 19
                        else []
                    ),
                    mark(at, end),
                )
            ]
            ingest_records(book, packed(*made))
        return here

    ((_, group_id, late),) = stragglers(averages().jobs.values(), 100 * EVERY)
    assert (group_id, late.rank) == ("w", 1)
    assert late.steps is not None
    assert late.cost_ns / late.steps == pytest.approx(15 * MS, rel=0.1)
    messages, elsewhere = averages(), averages()
    at = 99 * EVERY
    for book in messages.rank_totals():
        ingest_records(book, packed(operation("send", start_ns=at, end_ns=at + MS, seq=0, peer=1 - book.rank)))
    next(elsewhere.rank_totals()).learn([group_entry(1, (0, 1, 2, 3), "world", group_id="all")])
    for each in (messages, elsewhere):
        assert stragglers(each.jobs.values(), 100 * EVERY) == []
