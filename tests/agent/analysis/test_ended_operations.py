"""Stragglers of groups on one node; of groups across nodes, the parts that one agent reports, and the stragglers in the parts of all agents."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest

from commwatch.wire import events as ev
from commwatch.wire.modes import COUNTERS
from commwatch_agent.analysis.ended_operations import (
    MOST_PARTS,
    WINDOW_NS,
    RankParts,
    once,
    parts,
    put_together,
    stragglers,
)
from commwatch_agent.analysis.live_ranks import shows_late_ranks
from commwatch_agent.analysis.straggler_search import stragglers_in
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.collective_join import MOST_PENDING
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.ingest.stragglers import Late
from commwatch_agent.nodes.merging import late_across
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


def parts_of(*aggregates: JobTable, now_ns: int = 51 * EVERY, limit: int = MOST_PENDING) -> list[RankParts]:
    """The parts that several agents report, each agent one second later than the previous one."""
    return [
        column
        for number, aggregate in enumerate(aggregates)
        for column in parts(aggregate.jobs.values(), now_ns + number * 1_000 * MS, limit)[1]
    ]


def named(columns: Iterable[RankParts]) -> list[Late]:
    """Who is late in the groups that are whole."""
    return [each for _, _, window in put_together(columns) for each in stragglers_in(window, 0, least_ns=0)]


def test_agent_with_some_ranks_blames_nobody() -> None:
    """An agent that sees two of four ranks names none of them as late; it reports their parts, newest first."""
    here = node((0, 1), late=1)
    assert stragglers(here.jobs.values(), 51 * EVERY) == []
    limit, (first, second) = parts(here.jobs.values(), 51 * EVERY)
    assert limit == MOST_PENDING
    assert (first.job_id, first.group_id, first.group_size, first.rank, second.rank) == ("job", "w", 4, 0, 1)
    assert first.seq == list(range(49, -1, -1))
    assert set(first.op) == {"all_reduce"}
    assert set(first.duration_s) == {0.06}
    assert set(second.duration_s) == {0.01}
    assert first.age_s[:2] == pytest.approx([0.1, 0.2])


def test_late_in_several_groups() -> None:
    """A rank that is late in several groups is named with the one in which it costs most; jobs are apart."""
    some, most, other = Late(0, 6, 100, None), Late(0, 40, 100, None), Late(1, 5, 100, None)
    found = [("job", "tp", some), ("job", "dp", most), ("job", "tp", other), ("next", "tp", some), ("job", "pp", some)]
    assert once(found) == [("job", "dp", most), ("job", "tp", other), ("next", "tp", some)]


def test_whole_group() -> None:
    """A group whose ranks are all on this node is judged here, and its parts are not reported."""
    here = node(range(4), late=2, seqs=range(80))
    assert parts(here.jobs.values(), 81 * EVERY)[1] == []
    ((job, group_id, late),) = stragglers(here.jobs.values(), 81 * EVERY)
    assert (job, group_id, late.rank) == ("job", "w", 2)


@pytest.mark.parametrize("late", range(4))
def test_put_together(late: int) -> None:
    """The parts of two agents name the late rank and what it cost, even if they were reported a second apart."""
    (who,) = named(parts_of(node((0, 1), late), node((2, 3), late)))
    assert who.rank == late
    assert who.window_ns == 48 * EVERY  # no second in it that is none, and without the first period: it began before
    assert who.cost_ns == 48 * LATE_MS * MS


def test_one_rank_a_node() -> None:
    """Agents with one rank each: the whole difference is the lateness."""
    (who,) = named(parts_of(node([0], 1, size=2), node([1], 1, size=2)))
    assert (who.rank, who.cost_ns) == (1, 48 * LATE_MS * MS)


def test_nobody_is_late() -> None:
    """If all ranks are slow, none is late; if the parts of a node are missing, there is no verdict."""
    assert named(parts_of(node((0, 1), None), node((2, 3), None))) == []
    assert named(parts_of(node((0, 1), 1))) == []


def test_roles_across_nodes() -> None:
    """Of ranks on two nodes, those that mark steps are not compared with those that do not; where one rank marks them, all are."""
    found = parts_of(node((0, 1), late=3), node((2, 3), late=3))
    for stepping, late in (((0, 1, 2), []), ((0, 1), [3]), ((0,), [3]), ((), [3]), ((0, 1, 2, 3), [3])):
        columns = [replace(each, stepping=each.rank in stepping) for each in found]
        assert [who.rank for _, _, who in late_across(columns)] == late


def test_told_twice() -> None:
    """An agent that was queried under two names counts once."""
    here, there = node((0, 1), 3), node((2, 3), 3)
    (who,) = named(parts_of(here, there, here))
    assert (who.rank, who.cost_ns) == (3, 48 * LATE_MS * MS)


def test_only_complete_ones() -> None:
    """Only collectives with the parts of all ranks count, and only if all ranks were in the same symmetric operation."""
    here, there = node((0, 1), 3, seqs=range(40)), node((2, 3), 3, seqs=range(20, 60))
    (who,) = named(parts_of(here, there, now_ns=61 * EVERY))
    assert (who.rank, who.cost_ns) == (3, 19 * LATE_MS * MS)
    columns = parts_of(node((0, 1), 3), node((2, 3), 3))
    assert named([replace(columns[0], op=["barrier"] * 50), *columns[1:]]) == []
    assert named([replace(column, op=["broadcast"] * 50) for column in columns]) == []


def test_rooted_and_unobserved_operations_are_not_told() -> None:
    """What no join takes is in no part: rooted operations, ends seen late or not at all, groups used before the probe came."""
    here = JobTable()
    book = add(here, 0, 2)
    ingest_records(book, operations(range(5), 10, "broadcast"))
    ingest_records(book, operations(range(5, 10), 10, flags=ev.UNTIMED))
    ingest_records(book, operations(range(10, 15), 10, flags=ev.ASYNC, timing=ev.BY_WAIT))
    ingest_records(book, operations(range(15, 20), 10, flags=ev.UNALIGNED))
    ingest_records(book, operations(range(20, 25), 10, flags=ev.FAILED))
    assert parts_of(here) == []
    assert book.compared[0].count == 0
    ingest_records(book, operations(range(25, 28), 10))
    assert [column.seq for column in parts_of(here)] == [[27, 26, 25]]
    assert (book.compared[0].count, book.compared[0].duration_ns) == (3, 30 * MS)


def test_the_dead_and_the_old_are_not_told() -> None:
    """Parts of ranks that are no more, and those older than the window, are left out."""
    here = node((0, 1), late=None)
    assert [len(column.seq) for column in parts_of(here, now_ns=WINDOW_NS + 20 * EVERY)] == [30, 30]
    assert parts_of(here, now_ns=2 * WINDOW_NS) == []
    next(here.rank_totals()).alive = False
    assert [column.rank for column in parts_of(here)] == [1]


def test_bounds() -> None:
    """An answer holds at most so many collectives of a group, the latest, and fewer where there are many groups and ranks."""
    assert [column.seq for column in parts_of(node((0, 1), None), limit=3)] == [[49, 48, 47]] * 2
    ranks, size = 64, 128
    crowd = JobTable()
    for rank in range(ranks):
        ingest_records(add(crowd, rank, size), operations(range(500), 1))
    limit, columns = parts(crowd.jobs.values(), 501 * EVERY)
    assert (limit, len(columns)) == (MOST_PARTS // ranks, ranks)
    assert sum(len(column.seq) for column in columns) <= MOST_PARTS
    assert columns[0].seq[0] == 499


def test_late_out_of_another_operation() -> None:
    """A rank that another group's operation delays is not late by its own fault; its idle peer is."""
    for idles, culprits in ((0, []), (30, [1])):
        here = [node((), None), node((), None)]
        for rank, aggregate in enumerate(here):
            book = add(aggregate, rank, 2)
            book.learn([group_entry(1, (0, 1, 2, 3), "other", group_id="o")])
            records = []
            for seq in range(20):
                left = seq * EVERY + (45 if rank else 5) * MS  # rank 1 comes out of the other group's 40 ms later
                launch = left + idles * rank * MS
                records += [
                    operation(start_ns=seq * EVERY, end_ns=left, seq=seq, group=1),
                    operation("barrier", start_ns=launch, end_ns=seq * EVERY + 90 * MS, seq=seq),
                ]
            ingest_records(book, packed(*records))
        columns = [column for column in parts_of(*here, now_ns=21 * EVERY) if column.group_id == "w"]
        assert {own for column in columns for own in column.own_s} == {0.0, *([idles / 1e3] if idles else [])}
        assert [who.rank for who in named(columns)] == culprits


def pipeline(slow: int, size: int = 3) -> JobTable:
    """The totals of stages that send and receive in each step of 100 ms; the slow one waits 5 ms for it, the others 50."""
    aggregate = JobTable()
    for rank in range(size):
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


@pytest.mark.parametrize(("late_ms", "culprits"), [(10, []), (80, [2])])
def test_buckets_across_nodes(late_ms: int, culprits: list[int]) -> None:
    """The same of ranks on two nodes, put together."""
    found = named(parts_of(buckets((0, 1), late_ms), buckets((2, 3), late_ms), now_ns=20 * S))
    assert [late.rank for late in found] == culprits
    for late in found:
        assert late.cost_ns / late.window_ns == pytest.approx(0.08, rel=0.1)


def test_damaged_columns() -> None:
    """Columns of different lengths are refused."""
    with pytest.raises(ValueError, match="different lengths"):
        RankParts("job", "w", 2, 0, [1, 2], ["all_reduce"], [0.1], [0.1], [None], [None])


@pytest.mark.parametrize(
    ("rank", "duration_s", "age_s", "own_s"),
    [(1 << 31, 0.1, 0.1, None), (0, 1e300, 0.1, 0.1), (0, 0.1, math.nan, None), (0, 0.1, 0.1, math.inf), (0, -0.1, 0.1, None)],
)  # fmt: skip
def test_damaged_numbers(rank: int, duration_s: float, age_s: float, own_s: float | None) -> None:
    """Impossible numbers are refused like the answer of something that is not an agent, and cause no error later."""
    with pytest.raises(ValueError, match="out of range"):
        RankParts("job", "w", 2, rank, [1], ["all_reduce"], [duration_s], [age_s], [own_s], [None])
