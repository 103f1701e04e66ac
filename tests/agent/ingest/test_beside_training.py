"""Operations in which a thread is blocked that does not train."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from commwatch.wire import events as ev
from commwatch_agent.analysis.ended_operations import stragglers
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.job.rank_parts import parts
from tests.helpers import MS, group_entry, identity, mark, operation, packed

EVERY = 100 * MS
STEPS = 120
TRAINING, SIDE = 0, 1


def records(rank: int, flags: int, late: int | None) -> Iterator[tuple[int, ...]]:
    """Steps with a collective at their end, to which ``late`` comes 50 ms later, and a heartbeat in their middle, to which rank 0 comes 40 ms later."""
    for seq in range(STEPS):
        begin, took = seq * EVERY, 10 if rank == late or late is None else 60
        yield operation(
            group=SIDE, start_ns=begin + (45 if rank == 0 else 5) * MS, end_ns=begin + 46 * MS, seq=seq, flags=flags
        )
        yield operation(group=TRAINING, start_ns=begin + (99 - took) * MS, end_ns=begin + 99 * MS, seq=seq)
        yield mark(seq, begin + 100 * MS, exposed_ns=10 * MS)


def job(flags: int, late: int | None = None, here: int = 2, size: int = 2) -> tuple[JobTable, list[RankTotals]]:
    table, ranks = JobTable(), list[RankTotals]()
    for rank in range(here):
        totals = table.open(f"ring-{rank}", identity(rank=rank, world_size=size))
        members = tuple(range(size))
        totals.learn(
            [
                group_entry(TRAINING, members, "world", group_id="w"),
                group_entry(SIDE, members, "heartbeat", group_id="h"),
            ]
        )
        ingest_records(totals, packed(*records(rank, flags, late)))
        ranks.append(totals)
    return table, ranks


def named(table: JobTable) -> list[tuple[str, int]]:
    return [(group_id, late.rank) for _, group_id, late in stragglers(table.jobs.values(), STEPS * EVERY)]


@pytest.mark.parametrize(("flags", "expected"), [(0, [("h", 0)]), (ev.BESIDE, [])])
def test_no_rank_is_late(flags: int, expected: list[tuple[str, int]]) -> None:
    """A rank that comes late to operations beside the training is no straggler; to those that block it, it is one."""
    assert named(job(flags)[0]) == expected


@pytest.mark.parametrize("late", [0, 1])
def test_late_to_the_training(late: int) -> None:
    """A rank that is late in the training is named, and a rank that is late only in operations beside the training is not."""
    assert named(job(ev.BESIDE, late)[0]) == [("w", late)]


def test_no_part_of_the_steps() -> None:
    """Operations beside the training are counted, and are no communication of a step; a rank does not wait in them."""
    _, (first, second) = job(ev.BESIDE)
    for totals in (first, second):
        assert {step.comm_ns for step in list(totals.steps.take())[1:]} == {10 * MS}
        cells = [(key.group, key.startup, cell) for _, key, cell in totals.lately(STEPS * EVERY)]
        assert {(group, startup) for group, startup, cell in cells if group == SIDE and cell.count} == {(SIDE, True)}
        assert {cell.joined for group, _, cell in cells if group == SIDE} == {0}
        assert any(cell.joined for group, _, cell in cells if group == TRAINING)


def test_not_reported_to_other_nodes() -> None:
    """The parts of a group with ranks on other nodes have no operations beside the training."""
    table, _ = job(ev.BESIDE, here=1)
    assert {column.group_id for column in parts(table.jobs.values(), STEPS * EVERY)[1]} == {"w"}
