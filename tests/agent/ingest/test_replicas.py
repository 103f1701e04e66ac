"""Comparing the checksums of replicas over the ranks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from commwatch.wire import events as ev
from commwatch.wire.numbers import NUMBERS
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.rank_totals import RankTotals
from tests.helpers import group_entry, identity, operation, packed

NAMES = ["a", "b", "c"]
#: Time between two steps.
S = 1_000_000_000
#: Ranks, in which places, which, first wrong step, the right one before.
Found = tuple[tuple[int, ...], tuple[int, ...], str, int, int | None]


class Job:
    """The ranks of a job, and their checks: by default all checksums are equal."""

    def __init__(self, ranks: int, names: list[str] | None = None, world: int = 0) -> None:
        self.aggregate = JobTable()
        self.names = NAMES if names is None else names
        self.ranks = [self.open(rank, world or ranks) for rank in range(ranks)]

    def open(self, rank: int, ranks: int) -> RankTotals:
        """A rank that has announced its set."""
        totals = self.aggregate.open(f"{rank}", identity(rank=rank, world_size=ranks))
        entry = {"replicas": 0, "in": 0, "key": "k", "tensors": self.names}
        totals.learn([group_entry(0, tuple(range(ranks))), entry])
        return totals

    def records(self, count: int, wrong: dict[int, int] | None = None, number: int | None = None) -> bytes:
        """The records of one rank's check; ``wrong``: other sums, by place."""
        at = 10 * count if number is None else number
        sums = ((place, 7 * place + (wrong or {}).get(place, 0)) for place in range(len(self.names)))
        each = (ev.Checksum(0, 0, place, count, at, value, 3 * value + count, count * S) for place, value in sums)
        return packed(*(checksum.fields() for checksum in each))

    def check(self, count: int, wrong: dict[int, dict[int, int]] | None = None) -> None:
        """All ranks make a check; ``wrong``: by rank and place."""
        for rank, totals in enumerate(self.ranks):
            ingest_records(totals, self.records(count, (wrong or {}).get(rank)))

    @property
    def found(self) -> list[Found]:
        """The episodes."""
        (job,) = self.aggregate.jobs.values()
        every = [episode for join in job.replicas.values() if join.runs for episode in join.episodes]
        return [(each.odd.ranks, each.odd.places, each.odd.which, each.first, each.right) for each in every]


def test_equal() -> None:
    """Equal ranks have no episode; their records are neither operations nor damaged."""
    job = Job(3)
    for count in (1, 100, 200):
        job.check(count)
    assert job.found == []
    assert [(totals.nonsense, dict(totals.cells())) for totals in job.ranks] == [(0, {})] * 3
    assert [totals.read for totals in job.ranks] == [9] * 3


def test_one_rank() -> None:
    """The rank that differs is named, with its parameters, the first wrong step and the right one before; later ones add parameters."""
    job = Job(4)
    for count in (1, 100, 200):
        job.check(count)
    job.check(300, {2: {1: 5}})
    job.check(400, {2: {1: 5, 2: 1}})
    assert job.found == [((2,), (1, 2), "rank", 300, 200)]


def test_two_ranks() -> None:
    """Of two ranks neither is known to be right; of four, two and two neither; several wrong ranks of five are named."""
    job = Job(2)
    job.check(1)
    job.check(2, {0: {0: 1}})
    assert job.found == [((0, 1), (0,), "one_of", 2, 1)]
    job = Job(4)
    job.check(1)
    job.check(2, {0: {0: 1}, 3: {0: 1}})
    assert job.found == [((0, 1, 2, 3), (0,), "one_of", 2, 1)]
    job = Job(5)
    job.check(1)
    job.check(2, {0: {0: 1}, 3: {0: 2}})
    assert job.found == [((0, 3), (0,), "rank", 2, 1)]


def test_all_differ() -> None:
    """Three ranks of which no two agree are no single wrong rank."""
    job = Job(3)
    job.check(1)
    job.check(2, {0: {0: 1}, 1: {0: 2}})
    assert job.found == [((0, 1, 2), (0,), "all", 2, 1)]


def test_never_equal() -> None:
    """What was never equal is not judged; what becomes equal is, from then on."""
    job = Job(3)
    for count in (1, 2, 3):
        job.check(count, {1: {0: count}})
    assert job.found == []
    job.check(4)
    job.check(5, {1: {0: 9}})
    assert job.found == [((1,), (0,), "rank", 5, 4)]


def test_restored() -> None:
    """After the ranks agree again, the time of the latest difference stays behind that of the latest check."""
    job = Job(3)
    job.check(1)
    job.check(2, {1: {0: 9}})
    job.check(3)
    (join,) = next(iter(job.aggregate.jobs.values())).replicas.values()
    (episode,) = join.episodes
    assert (episode.since_ns, episode.latest_ns, join.judged_ns, join.checks) == (2 * S, 2 * S, 3 * S, 3)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_in_pieces(size: int) -> None:
    """A check whose records are read in pieces, among operations, is judged once it is complete."""
    job = Job(3)
    job.check(1)
    for rank, totals in enumerate(job.ranks):
        records = job.records(2, {0: 4} if rank == 2 else None)
        for at in range(0, len(records), size * ev.RECORD_SIZE):
            ingest_records(totals, records[at : at + size * ev.RECORD_SIZE] + packed(operation(start_ns=1, end_ns=2)))
    assert job.found == [((2,), (0,), "rank", 2, 1)]


def test_lost_records() -> None:
    """A check of which records were lost is not judged, and the next one is."""
    job = Job(3)
    job.check(1)
    for totals in job.ranks:
        ingest_records(totals, job.records(2, {0: totals.rank})[: -ev.RECORD_SIZE])
    job.check(3, {1: {1: 1}})
    assert job.found == [((1,), (1,), "rank", 3, 1)]


def test_longer_intervals() -> None:
    """Ranks that check less often are compared at the steps that all of them check."""
    job = Job(3)
    for count in range(1, 9):
        for rank, totals in enumerate(job.ranks):
            if rank != 1 or count == 1 or count % 4 == 0:
                ingest_records(totals, job.records(count, {0: 1} if rank == 2 and count > 2 else None))
    assert job.found == [((2,), (0,), "rank", 4, 1)]


def test_other_moments() -> None:
    """Checks of one step number after different numbers of collectives are not of one moment, and are not compared."""
    job = Job(2)
    job.check(1)
    for totals in job.ranks:
        ingest_records(totals, job.records(2, {0: totals.rank}, number=20 + totals.rank))
    assert job.found == []


def test_ended_rank() -> None:
    """A rank that has ended is not waited for; a job whose ranks have all ended has no episodes."""
    job = Job(4)
    job.check(1)
    job.ranks[3].alive = False
    for rank in range(3):
        ingest_records(job.ranks[rank], job.records(20, {0: 1} if rank == 0 else None))
    assert job.found == [((0,), (0,), "rank", 20, 1)]
    for totals in job.ranks:
        totals.alive = False
    assert job.found == []


def test_late_rank() -> None:
    """The others are not judged without a rank whose ring is found later; with it, all its checks count."""
    job = Job(3)
    for count in (1, 2, 3):
        for rank in (0, 1):
            ingest_records(job.ranks[rank], job.records(count, {1: 1} if rank == 0 and count > 1 else None))
    assert job.found == []
    for count in (1, 2, 3):
        ingest_records(job.ranks[2], job.records(count))
    assert job.found == [((0,), (1,), "rank", 2, 1)]


def test_several_nodes() -> None:
    """Where a group has more ranks than this node, its ranks here are judged among themselves, from the first check on, once all are known."""
    job = Job(2, world=4)
    for count in (1, 2, 3):
        job.check(count, {0: {0: 1}} if count == 3 else None)
    assert job.found == []
    job.check(20, {0: {0: 1}})
    assert job.found == [((0, 1), (0,), "one_of", 3, 2)]


def test_next_run() -> None:
    """A later run of the job under its name begins anew."""
    job = Job(2)
    job.check(1)
    job.check(2, {0: {0: 1}})
    job.ranks = [job.open(rank, 2) for rank in range(2)]
    job.check(1)
    assert job.found == []


def test_hostile() -> None:
    """Records of unknown sets, places out of range, and damaged announcements are skipped."""
    job = Job(2)
    job.check(1)
    damaged: list[dict[str, object]] = [
        {"replicas": 1},
        {"replicas": -1, "in": 0, "key": "x", "tensors": ["a"]},
        {"replicas": 2, "in": 0, "key": "x", "tensors": 7},
        {"replicas": 3, "in": 0, "key": "x", "tensors": []},
    ]
    for totals in job.ranks:
        totals.learn(damaged)
        for where in ((1, 0), (9, 0), (3, 0), (0, 99), (0, -1), (-5, 0)):
            fields = ev.Checksum(0, *where, 2, 20, 1, 1, 5).fields()
            ingest_records(totals, packed(fields))
    job.check(3)
    assert job.found == []


def test_memory() -> None:
    """Checks that a rank never makes do not pile up."""
    job = Job(2, [str(at) for at in range(1000)])
    job.check(1)
    for count in range(2, 300):
        ingest_records(job.ranks[0], job.records(count))
    (join,) = next(iter(job.aggregate.jobs.values())).replicas.values()
    assert len(join._pending) <= 131


@pytest.mark.parametrize("ranks", [3, 4, pytest.param(8, marks=pytest.mark.long)])
def test_flips(ranks: int) -> None:
    """Each of 200 random wrong values at a random rank, parameter and step is found, with rank, parameter and step right."""
    drawn = random.Random(ranks)
    draw: Callable[[int], int] = drawn.randrange
    for _ in range(200):
        job, rank, place, count, bit = Job(ranks), draw(ranks), draw(len(NAMES)), 2 + draw(3), draw(62)
        for step in range(1, 6):
            job.check(step, {rank: {place: 1 << bit}} if step >= count else None)
        assert job.found == [((rank,), (place,), "rank", count, count - 1)]


@pytest.mark.parametrize("begin", [5, NUMBERS - 2])
def test_numbers_go_on(begin: int) -> None:
    """Checks are compared in their order, also where the numbers of steps go on at 0."""
    job = Job(3)
    for after in range(4):
        job.check((begin + after) % NUMBERS)
    job.check((begin + 4) % NUMBERS, {1: {0: 5}})
    assert job.found == [((1,), (0,), "rank", (begin + 4) % NUMBERS, (begin + 3) % NUMBERS)]
