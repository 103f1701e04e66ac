"""Late ranks of groups with ranks on several nodes: the parts that one agent reports, and the stragglers in the parts of all agents."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest

from commwatch.wire import events as ev
from commwatch_agent.analysis.ended_operations import stragglers
from commwatch_agent.analysis.straggler_search import stragglers_in
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.collective_join import MOST_PENDING
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.stragglers import Late
from commwatch_agent.job.rank_parts import MOST_PARTS, WINDOW_NS, RankParts, late_across, parts, put_together
from tests.agent.analysis.test_ended_operations import EVERY, LATE_MS, S, add, buckets, node, operations
from tests.helpers import MS, group_entry, mark, operation, packed


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


@pytest.mark.parametrize(("blocked_us", "culprits"), [(None, [1]), (0, []), (10_000, []), (60_000, [1])])
def test_hidden_behind_compute(blocked_us: int | None, culprits: list[int]) -> None:
    """A rank of another node is late by the time for which this one was blocked before it began, not by what this one computed meanwhile."""
    agents = []
    for rank in (0, 1):
        took, flags = 10 * MS if rank else 60 * MS, ev.ASYNC | (0 if blocked_us is None else ev.WAIT_SEEN)
        records = [mark(0, 1)]
        for n in range(1, 51):
            end = n * EVERY
            one = operation(start_ns=end - took, end_ns=end, seq=n, flags=flags, waited_us=blocked_us or 0)
            records += [one, mark(n, end + MS)]
        agents.append(JobTable())
        ingest_records(add(agents[-1], rank, 2), packed(*records))
    assert [late.rank for late in named(parts_of(*agents))] == culprits


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


def steps(ranks: Iterable[int], step_ms: int, late_ms: int, every: int = 1, number: int = 120) -> JobTable:
    """The totals of an agent: some of four ranks with six all_reduces at the end of each step; rank 2 comes late to those of every so many."""
    aggregate = JobTable()
    for rank in ranks:
        records = []
        for step in range(number):
            begin, late = step * step_ms * MS, late_ms * MS if step % every == 0 else 0
            for n in range(6):
                end = begin + (step_ms - 100 + 10 * n) * MS + 1
                launch = end - 9 * MS if n or rank == 2 else end - 9 * MS - late
                records.append(operation(start_ns=launch, end_ns=end, seq=6 * step + n))
            records.append(mark(step, begin + step_ms * MS - MS))
        ingest_records(add(aggregate, rank, 4), packed(*records))
    return aggregate


@pytest.mark.parametrize(
    ("step_ms", "late_ms", "every", "culprits"),
    [(3000, 400, 1, [2]), (20_000, 2000, 1, [2]), (3000, 100, 1, []), (400, 250, 8, [2]), (400, 250, 100, [])],
    ids=["long", "longer", "little", "in one of eight", "once"],
)
def test_steps_across_nodes(step_ms: int, late_ms: int, every: int, culprits: list[int]) -> None:
    """A rank of another node is late as on one node: compared step by step, however long they are, and if it is late in few of them."""
    now_ns = 120 * step_ms * MS
    here = steps(range(4), step_ms, late_ms, every)
    assert [late.rank for _, _, late in stragglers(here.jobs.values(), now_ns)] == culprits
    found = parts_of(steps((0, 1), step_ms, late_ms, every), steps((2, 3), step_ms, late_ms, every), now_ns=now_ns)
    assert [late.rank for _, _, late in late_across(found)] == culprits


def test_steps_are_bounded() -> None:
    """An answer has a thousand steps at most, the latest; and a few, however old they are."""
    quick = JobTable()
    marks = packed(*(mark(step, 10 * step * MS) for step in range(2000)))
    ingest_records(add(quick, 0, 4), operations(range(190, 200), 1) + marks)
    (found,) = parts_of(quick, now_ns=20 * S)
    assert (len(found.steps_s), found.steps_s[0], found.steps_s[-1]) == (1024, 0.01, 10.24)
    (found,) = parts_of(steps([0], 20_000, 0, number=9), now_ns=180 * S)
    assert found.steps_s == pytest.approx([20 * n + 0.001 for n in range(7)])
    assert len(found.seq) == 6 * 7 - 6
