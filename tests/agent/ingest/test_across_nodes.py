"""Groups with ranks on other nodes: their collectives are never complete on this node."""

from __future__ import annotations

import random

from commwatch.wire import events as ev
from commwatch_agent.ingest.batches import Batch, ingest, ingest_records
from commwatch_agent.ingest.collective_join import MOST_PENDING, GroupJoin, Part
from commwatch_agent.ingest.jobs import JobTable
from tests.helpers import MS, group_entry, identity, operation, packed

HERE, SIZE = (0, 1, 5), 8


def record(seq: int, rank: int) -> tuple[int, ...]:
    """A rank's part in a collective, or every tenth time in an operation with a root."""
    op, end = "broadcast" if seq % 10 == 9 else "all_reduce", (seq + 1) * MS
    return operation(op, start_ns=end - rank, end_ns=end, seq=seq, peer=0, dtype=1)


def read(job: JobTable, turns: list[dict[int, range]]) -> GroupJoin:
    """Read the parts that each rank has in each turn."""
    opened = {rank: job.open(str(rank), identity(rank=rank)) for rank in HERE}
    for totals in opened.values():
        totals.learn([group_entry(ranks=tuple(range(SIZE))), {"dtype": 1, "name": "float32"}])
    for turn in turns:
        ingest([
            Batch(opened[rank], packed(*(record(seq, rank) for seq in seqs), first=seqs.start), seqs.stop)
            for rank, seqs in turn.items()
        ])  # fmt: skip
    ((_, join),) = job.jobs["job"].joins.items()
    return join


def in_turns(number: int, chance: random.Random) -> list[dict[int, range]]:
    """Up to 300 collectives a turn; no rank is far ahead of another."""
    turns, begun = [], dict.fromkeys(HERE, 0)
    for upto in range(0, number + 300, 300):
        ends = {rank: min(number, upto + chance.randrange(100)) for rank in HERE}
        turns.append({rank: range(begun[rank], ends[rank]) for rank in HERE})
        begun = ends
    return [*turns, {rank: range(begun[rank], number) for rank in HERE}]


def waiting(join: GroupJoin) -> list[tuple[int, list[Part]]]:
    """What waits, without the totals behind it."""
    return [(seq, [part._replace(totals=None) for part in parts]) for seq, parts in join.waiting()]


def one_by_one(turns: list[dict[int, range]]) -> GroupJoin:
    """A join that takes the same parts one after the other."""
    join = GroupJoin(SIZE)
    for turn in turns:
        for rank, seqs in turn.items():
            for seq in seqs:
                op, _, _, _, _, size, launch, _, _, start, end, *_ = record(seq, rank)
                if op == ev.OP_CODE["all_reduce"]:
                    assert join.add(seq, Part(rank, op, launch, end, end - start, None, size, "float32")) is None
    return join


def test_parts_that_wait() -> None:
    """The latest parts that wait are those of a join that takes part after part, whenever and how often it is asked."""
    for seed in range(6):
        turns = in_turns(900 * (seed + 1), random.Random(seed))
        found, expected = read(JobTable(), turns), one_by_one(turns)
        mine = [(seq, [part._replace(own_ns=0, run=None) for part in parts]) for seq, parts in waiting(found)]
        theirs = [(seq, [part._replace(own_ns=0, run=None) for part in parts]) for seq, parts in waiting(expected)]
        assert mine == theirs
        assert len(mine) == min(MOST_PENDING, expected.unjoined + len(theirs))
        assert found.unjoined == expected.unjoined
        assert waiting(found) == waiting(found)


def test_parts_do_not_become_many() -> None:
    """Parts without a reader take hardly more memory than those in a join."""
    join = read(JobTable(), in_turns(20_000, random.Random(1)))
    kept = [len(parts) for parts in vars(join)["_kept"]]
    assert MOST_PENDING * len(HERE) < sum(kept) < 2 * MOST_PENDING * len(HERE)


def test_last_rank_comes() -> None:
    """Once all ranks are here, what has waited is joined, and so is what follows."""
    job = JobTable()
    first, second = (job.open(str(rank), identity(rank=rank)) for rank in (0, 1))
    for totals in (first, second):
        totals.learn([group_entry()])
    reduces = [operation(start_ns=n * MS, end_ns=n * MS + 500_000, seq=n) for n in range(40)]
    ingest_records(first, packed(*reduces))
    ((_, join),) = job.jobs["job"].joins.items()
    assert [seq for seq, _ in join.waiting()] == list(range(39, -1, -1))
    later = [operation(start_ns=n * MS, end_ns=n * MS + 9, seq=n) for n in range(40, 45)]
    ingest_records(first, packed(*later, first=40))
    ingest_records(
        second, packed(*(operation(start_ns=n * MS + 400_000, end_ns=n * MS + 500_000, seq=n) for n in range(40)))
    )
    assert [seq for seq, _ in join.waiting()] == [44, 43, 42, 41, 40]
    waits = {totals.rank: sum(cell.wait_ns for _, cell in totals.cells()) for totals in (first, second)}
    assert waits == {0: 40 * 400_000, 1: 0}
