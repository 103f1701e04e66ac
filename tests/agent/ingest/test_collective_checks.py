"""Comparing the checksums of collectives over the ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest

from commwatch.wire import events as ev
from commwatch.wire.numbers import NUMBERS
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.model.corruption.collectives import MOST_GROUPS, Fault
from tests.helpers import group_entry, identity, packed

#: Time between two collectives.
S = 1_000_000_000
#: Checksums by place, the input from ``INPUT`` down.
Values = dict[int, int]


class Job:
    """The ranks of a job that check the collectives of one group."""

    def __init__(self, ranks: int, here: int | None = None) -> None:
        self.aggregate = JobTable()
        self.size = ranks
        self.ranks = [self.open(rank) for rank in range(ranks if here is None else here)]

    def open(self, rank: int) -> RankTotals:
        """A rank that knows the group."""
        totals = self.aggregate.open(f"{rank}", identity(rank=rank, world_size=self.size))
        totals.learn([group_entry(0, tuple(range(self.size)))])
        return totals

    @staticmethod
    def records(op: str, number: int, values: Values, **more: int) -> bytes:
        """The records of one rank's check."""
        code = -ev.OP_CODE[op]
        each = (
            ev.Checksum(0, code, place, number, len(values), value, 3 * value, more.get("taken_ns", S * (number + 1)))
            for place, value in values.items()
        )
        return packed(*(checksum.fields() for checksum in each))

    def check(self, op: str, number: int, *values: Values) -> None:
        """Each rank checks a collective."""
        for totals, of_rank in zip(self.ranks, values, strict=True):
            ingest_records(totals, self.records(op, number, of_rank))

    @property
    def checks(self) -> Any:
        """The checks of the group."""
        (job,) = self.aggregate.jobs.values()
        (checks,) = job.checked.values()
        return checks

    @property
    def found(self) -> list[tuple[Fault, int, int | None]]:
        """The faults, with the first collective that had it, and a right one before."""
        return [(each.fault, each.first, each.right) for each in self.checks.episodes]


def gathered(ranks: int, **wrong: int) -> list[Values]:
    """What ranks have of an all_gather in which rank r gives 7 + r; ``wrong``: other values, such as ``at_2_of_0``, or ``of_1_for_all``."""
    given = [7 + rank for rank in range(ranks)]
    values = [{ev.INPUT: given[rank], **dict(enumerate(given))} for rank in range(ranks)]
    for what, value in wrong.items():
        _, at, _, of = what.split("_")
        for rank in range(ranks) if at == "all" else [int(at)]:
            values[rank][ev.INPUT if of == "input" else int(of)] = value
    return values


def sent(ranks: int, root: int, **wrong: int) -> list[Values]:
    """What ranks have of a broadcast of 9; ``wrong``: by rank, such as ``rank_1``."""
    values = [{0: wrong.get(f"rank_{rank}", 9)} for rank in range(ranks)]
    values[root][ev.INPUT] = 9
    return values


def exchanged(ranks: int, *wrong: tuple[int, int]) -> list[Values]:
    """What ranks have of an all_to_all in which rank r gives 10 * r + k to rank k; ``wrong``: pairs of giver and receiver whose slice is wrong."""
    values: list[Values] = [{} for _ in range(ranks)]
    for of in range(ranks):
        for to in range(ranks):
            values[of][ev.INPUT - to] = 10 * of + to
            values[to][of] = 10 * of + to if (of, to) not in wrong else 99
    return values


def test_equal() -> None:
    """Equal data has no fault; the records are neither operations nor damaged."""
    job = Job(3)
    job.check("all_reduce", 0, {0: 5}, {0: 5}, {0: 5})
    job.check("all_gather", 1, *gathered(3))
    job.check("broadcast", 2, *sent(3, 1))
    job.check("all_to_all", 3, *exchanged(3))
    assert (job.found, job.checks.compared) == ([], 4)
    assert [(totals.nonsense, dict(totals.cells())) for totals in job.ranks] == [(0, {})] * 3


def test_all_reduce() -> None:
    """The rank with another result is named; of two, neither is known to be right; of three that all differ, none is."""
    job = Job(3)
    job.check("all_reduce", 0, {0: 5}, {0: 5}, {0: 5})
    job.check("all_reduce", 4, {0: 5}, {0: 5}, {0: 6})
    job.check("all_reduce", 5, {0: 1}, {0: 1}, {0: 6})
    job.check("all_reduce", 6, {0: 1}, {0: 2}, {0: 6})
    assert job.found == [
        (Fault("all_reduce", "result", (2,), None), 4, 0),
        (Fault("all_reduce", "diverged", (0, 1, 2), None), 6, 5),
    ]
    assert [episode.number for episode in job.checks.episodes] == [2, 1]
    job = Job(2)
    job.check("all_reduce", 3, {0: 5}, {0: 6})
    assert job.found == [(Fault("all_reduce", "one_of", (0, 1), None), 3, None)]


def test_all_gather() -> None:
    """What the giver of each part has summed is right: receivers, the giver, or the giver's own copy are at fault."""
    job = Job(4)
    job.check("all_gather", 0, *gathered(4, at_2_of_0=1))
    job.check("all_gather", 1, *gathered(4, at_2_of_0=1, at_3_of_0=1))
    job.check("all_gather", 2, *gathered(4, at_1_of_input=1))
    job.check("all_gather", 3, *gathered(4, at_0_of_3=1, at_1_of_3=1, at_2_of_3=1))
    job.check("all_gather", 4, *gathered(4, at_3_of_3=1))
    assert [fault for fault, *_ in job.found] == [
        Fault("all_gather", "received", (2,), 0),
        Fault("all_gather", "received", (2, 3), 0),
        Fault("all_gather", "sent", (1,), 1),
        Fault("all_gather", "sent", (3,), 3),
        Fault("all_gather", "result", (3,), 3),
    ]
    job = Job(2)
    job.check("all_gather", 0, *gathered(2, at_1_of_0=1))
    assert [fault for fault, *_ in job.found] == [Fault("all_gather", "one_of", (0, 1), 0)]


def test_all_to_all() -> None:
    """Of a wrong slice, giver and receiver are named; if a rank has wrong slices with several ranks, it alone is."""

    def found(*wrong: tuple[int, int], ranks: int = 4) -> list[tuple[str, tuple[int, ...], int | None]]:
        job = Job(ranks)
        job.check("all_to_all", 0, *exchanged(ranks, *wrong))
        assert all((episode.fault.op, episode.number) == ("all_to_all", 1) for episode in job.checks.episodes)
        return [(fault.cause, fault.ranks, fault.source) for fault, *_ in job.found]

    assert found((2, 0)) == [("one_of", (0, 2), 2)]
    assert found((2, 0), (0, 2)) == [("one_of", (0, 2), 0), ("one_of", (0, 2), 2)]
    assert found((0, 1), (2, 3)) == [("one_of", (0, 1), 0), ("one_of", (2, 3), 2)]
    assert found((0, 2), (1, 2), (3, 2)) == [("received", (2,), 0), ("received", (2,), 1), ("received", (2,), 3)]
    assert found((1, 0), (1, 3)) == [("sent", (1,), 1)]
    assert found((1, 0), (3, 1)) == [("sent", (1,), 1), ("received", (1,), 3)]
    assert found((3, 3)) == [("received", (3,), 3)]
    assert found((3, 3), (3, 0)) == [("sent", (3,), 3), ("received", (3,), 3)]
    assert found((0, 1), (1, 2), (2, 0)) == [("one_of", (0, 1), 0), ("one_of", (1, 2), 1), ("one_of", (0, 2), 2)]
    assert found((1, 0), ranks=2) == [("one_of", (0, 1), 1)]


def test_broadcast() -> None:
    """The root has what all must receive, even if most have something else."""
    job = Job(4)
    job.check("broadcast", 0, *sent(4, 1, rank_2=1))
    job.check("broadcast", 1, *sent(4, 1, rank_2=1, rank_3=1))
    job.check("broadcast", 2, *sent(4, 1, rank_0=1, rank_2=1, rank_3=1))
    job.check("broadcast", 3, *sent(4, 1, rank_0=1, rank_2=2, rank_3=1))
    assert [fault for fault, *_ in job.found] == [
        Fault("broadcast", "received", (2,), 1),
        Fault("broadcast", "received", (2, 3), 1),
        Fault("broadcast", "sent", (1,), 1),
        Fault("broadcast", "diverged", (0, 1, 2, 3), 1),
    ]


def test_ranks_of_other_nodes() -> None:
    """Ranks of one node are compared among themselves; without the giver, most of them are right. Single ranks are not compared."""
    job = Job(8, here=3)
    values = gathered(8, at_1_of_6=1)[:3]
    for number in (0, 20, 40):  # the rings of this node are found within 10 s
        job.check("all_gather", number, *values)
    assert job.found == [(Fault("all_gather", "result", (1,), None), 0, None)]
    job = Job(8, here=3)
    for number in (0, 20, 40):
        job.check("all_to_all", number, *exchanged(8, (6, 1), (2, 7), (0, 2))[:3])
    assert job.found == [(Fault("all_to_all", "one_of", (0, 2), 0), 0, None)]
    job = Job(8, here=1)
    job.check("all_gather", 0, gathered(8)[0])
    job.check("all_gather", 20, gathered(8)[0])
    assert (job.found, job.checks.compared) == ([], 0)


def test_left_out() -> None:
    """A collective that a rank has not checked is not judged, nor are different operations, nor a rank that has ended."""
    job = Job(3)
    ingest_records(job.ranks[0], job.records("all_reduce", 1, {0: 1}))
    ingest_records(job.ranks[1], job.records("all_reduce", 1, {0: 2}))
    job.check("all_reduce", 2, {0: 1}, {0: 1}, {0: 1})
    ingest_records(job.ranks[0], job.records("broadcast", 3, {0: 1}))
    ingest_records(job.ranks[1], job.records("all_reduce", 3, {0: 2}))
    ingest_records(job.ranks[2], job.records("all_reduce", 3, {0: 2}))
    assert job.found == []
    for number in range(1000, 3000):  # its checks cost too much, so that it leaves most of them out
        ingest_records(job.ranks[1], job.records("all_reduce", number, {0: 1}))
    job.check("all_reduce", 5000, {0: 1}, {0: 2}, {0: 1})
    assert [fault for fault, *_ in job.found] == [Fault("all_reduce", "result", (1,), None)]


def test_in_pieces() -> None:
    """Checks are complete although their records arrive mixed, in pieces, and in any order of the ranks."""
    job = Job(3)
    rows: list[tuple[int, bytes]] = []
    for number in range(6):
        values = gathered(3, **({"at_1_of_2": 1} if number == 4 else {}))
        for rank in range(3):
            records = job.records("all_gather", number, values[rank])
            rows += [(rank, records[at : at + ev.RECORD_SIZE]) for at in range(0, len(records), ev.RECORD_SIZE)]
    random.Random(0).shuffle(rows)
    for rank, record in rows:
        ingest_records(job.ranks[rank], record)
    assert job.checks.compared == 6
    assert [(fault, first) for fault, first, _ in job.found] == [(Fault("all_gather", "received", (1,), 2), 4)]


def test_damaged() -> None:
    """Records with impossible places, counts or operations raise nothing; memory stays bounded."""
    job = Job(2)
    for number in range(100):
        ingest_records(job.ranks[0], job.records("all_gather", number, dict.fromkeys(range(50, 200), 1)))
        ingest_records(job.ranks[0], job.records("all_reduce", number, {-70: 1, 0: 2}))
        ingest_records(job.ranks[0], job.records("all_to_all", 100 + number, {-7: 1, 0: 2}))
        ingest_records(job.ranks[1], job.records("all_to_all", 100 + number, {-2: 1, 0: 2}))
    strange = ev.Checksum(0, -200, 0, 1, 1, 1, 1, S)
    elsewhere = ev.Checksum(9, -1, 0, 1, 1, 1, 1, S)
    ingest_records(job.ranks[0], packed(strange.fields(), elsewhere.fields()))
    job.check("all_reduce", 500, {0: 1}, {0: 1})
    assert (job.found, job.checks.compared) == ([], 101)
    assert len(job.checks._filling[0]) <= 16
    (every,) = job.aggregate.jobs.values()
    assert len(every.checked) <= MOST_GROUPS


def test_restart() -> None:
    """A rank that starts again begins anew: what its earlier life has checked is forgotten."""
    job = Job(2)
    job.check("all_reduce", 0, {0: 1}, {0: 2})
    assert len(job.found) == 1
    job.aggregate.open("again", identity(rank=0, world_size=2, restart=1))
    (every,) = job.aggregate.jobs.values()
    assert every.checked == {}


@pytest.mark.parametrize("begin", [5, NUMBERS - 2])
def test_numbers_go_on(begin: int) -> None:
    """The right check before a wrong one is the latest, also where the numbers of collectives go on at 0."""
    job = Job(3)
    for after in range(4):
        job.check("all_gather", (begin + after) % NUMBERS, *gathered(3))
    job.check("all_gather", (begin + 4) % NUMBERS, *gathered(3, at_2_of_0=1))
    ((_, first, right),) = job.found
    assert (first, right) == ((begin + 4) % NUMBERS, (begin + 3) % NUMBERS)
