"""Who is late in servers, in jobs whose ranks have different roles, and where one rank is a root: small loops of ranks, record by record."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest

from commwatch.wire import events as ev
from commwatch_agent.analysis.ended_operations import stragglers
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.steps import EXPLICIT
from tests.helpers import MS, group_entry, identity, mark, operation, packed, seeds

S = 1000 * MS
#: What an operation takes, in ms.
TOOK_MS = 1.0


class Loop:
    """Ranks that work, communicate and mark steps, each by its own clock.

    Args:
        groups: their ranks; the first is the world.
    """

    def __init__(self, size: int, *groups: tuple[int, ...], seed: int = 0) -> None:
        self.groups = (tuple(range(size)), *groups)
        self.chance = random.Random(seed)
        self.now_ms = [100.0] * size
        self._records: list[list[tuple[int, ...]]] = [[] for _ in range(size)]
        self._seq = [0] * (2 * len(self.groups))
        self._aggregate = JobTable()
        self._books = [
            self._aggregate.open(f"ring-{rank}", identity(rank=rank, world_size=size)) for rank in range(size)
        ]
        for book in self._books:
            book.learn([group_entry(at, ranks, f"g{at}", group_id=f"g{at}") for at, ranks in enumerate(self.groups)])
        self._steps = [0] * size

    def work(self, rank: int, ms: float) -> None:
        """Take so long, and a little by chance."""
        self.now_ms[rank] += ms + abs(self.chance.gauss(0, 0.5))

    def meet(self, op: str = "all_reduce", group: int = 0, root: int = -1, size: int = 4096) -> None:
        """All ranks of a group call a collective."""
        ranks = self.groups[group]
        launched = {rank: self.now_ms[rank] for rank in ranks}
        for rank in ranks:
            needs = [rank]
            if root < 0 or (op in ev.TO_ROOT and rank == root):
                needs = list(ranks)
            elif op in ev.FROM_ROOT:
                needs = [rank, root]
            self._ended(rank, op, max(launched[each] for each in needs), group, self._seq[group], peer=root, size=size)
        self._seq[group] += 1

    def send(self, rank: int, to: int) -> None:
        """One rank sends to another, which waits for it."""
        at, peers = len(self.groups), {rank: to, to: rank}
        sent, received = self.now_ms[rank], self.now_ms[to]
        self._ended(rank, "send", sent, 0, self._seq[at], peer=peers[rank])
        waited_us = int(max(0.0, sent - received) * 1000)
        self._ended(to, "recv", max(sent, received), 0, self._seq[at], peer=peers[to], waited_us=waited_us)
        self._seq[at] += 1

    def _ended(self, rank: int, op: str, came_ms: float, group: int, seq: int, **more: int) -> None:
        launch, self.now_ms[rank] = int(self.now_ms[rank] * MS), came_ms + TOOK_MS
        end = int(self.now_ms[rank] * MS)
        self._records[rank].append(operation(op, start_ns=launch, end_ns=end, seq=seq, group=group, **more))

    def mark(self, ranks: Iterable[int], optimizer: int = EXPLICIT) -> None:
        """Ranks end a step."""
        for rank in ranks:
            self._records[rank].append(mark(self._steps[rank], int(self.now_ms[rank] * MS), optimizer=optimizer))
            self._steps[rank] += 1

    def named(self) -> set[int]:
        """Who is late now."""
        for book, records in zip(self._books, self._records, strict=True):
            ingest_records(book, packed(*records))
            records.clear()
        return {late.rank for _, _, late in stragglers(self._aggregate.jobs.values(), int(max(self.now_ms) * MS))}

    def run(self, turn: Callable[[], None], seconds: float) -> list[set[int]]:
        """Repeat a turn for so long; who was named after each."""
        until, named = max(self.now_ms) + 1000 * seconds, list[set[int]]()
        looked = max(self.now_ms)
        while max(self.now_ms) < until:
            turn()
            if max(self.now_ms) >= looked + 500:
                named.append(self.named())
                looked = max(self.now_ms)
        return named


def requests(loop: Loop, op: str, idle_ms: tuple[float, float], late_ms: float = 0.0) -> Callable[[], None]:
    """A server: rank 0 waits for a request and hands it on, then the ranks, of which rank 2 may be late, answer it layer by layer."""

    def turn() -> None:
        loop.work(0, loop.chance.uniform(*idle_ms))
        if op == "queue":
            for rank in (1, 2, 3):
                loop.send(0, rank)
            for rank in (1, 2, 3):
                loop.work(rank, 30)
                loop.send(rank, 0)
            return
        loop.meet(op, root=-1 if op in ev.SYMMETRIC else 0)
        for _ in range(40):
            for rank in range(4):
                loop.work(rank, 5 + late_ms * (rank == 2))
            loop.meet()

    return turn


@pytest.mark.parametrize("seed", [1, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("op", "idle_ms"),
    [
        *((op, (5_000.0, 40_000.0)) for op in ("broadcast", "scatter", "all_gather", "queue")),
        *((op, (200.0, 2_000.0)) for op in ("broadcast", "scatter", "queue")),
        ("broadcast", (20.0, 20.0)),
    ],
)
def test_server(op: str, idle_ms: tuple[float, float], seed: int) -> None:
    """In a job that marks no steps, the rank that waits for requests and hands them on is not late."""
    loop = Loop(4, seed=seed)
    assert not any(loop.run(requests(loop, op, idle_ms), 200 if idle_ms[0] > 1000 else 50))


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("idle_ms", [(20.0, 20.0), (200.0, 2_000.0)])
def test_late_in_a_server(idle_ms: tuple[float, float], seed: int) -> None:
    """A rank of a server that is late in each operation of the layers is named."""
    loop = Loop(4, seed=seed)
    named = loop.run(requests(loop, "broadcast", idle_ms, late_ms=20), 40)
    assert named[-1] == {2}
    assert not any(each - {2} for each in named)


@pytest.mark.parametrize("marking", [(0, 1, 2, 3), (0,)], ids=["all", "one"])
def test_late_root(marking: tuple[int, ...]) -> None:
    """In a job that steps, a root that comes later than it used to is late, and stays so; also where one rank marks the steps of all."""
    loop, late_ms = Loop(4), 0.0

    def turn() -> None:
        for rank in range(4):
            loop.work(rank, 30 + late_ms * (rank == 0))
        loop.meet("broadcast", root=0)
        for rank in range(4):
            loop.work(rank, 5)
        loop.meet()
        loop.mark(marking)

    assert not any(loop.run(turn, 8))
    late_ms = 60.0
    loop.run(turn, 15)
    assert all(each == {0} for each in loop.run(turn, 60))


@pytest.mark.parametrize("work_ms", [40.0, 400.0])
def test_root_that_always_works_longer(work_ms: float) -> None:
    """A root that reads the data of all, for as long in each step, is not late."""
    loop = Loop(4)

    def turn() -> None:
        loop.work(0, loop.chance.uniform(work_ms, 1.5 * work_ms))
        loop.meet("broadcast", root=0, size=64)
        loop.meet("broadcast", root=0, size=1 << 20)
        for rank in range(4):
            loop.work(rank, 50)
        loop.meet()
        loop.mark(range(4))

    assert not any(loop.run(turn, 100))


def rollouts(loop: Loop, op: str, root: int, optimizer: int, late_ms: float = 0.0) -> Callable[[], None]:
    """Ranks 0 and 1 train, of which rank 1 may be late; the others make rollouts."""
    trainers = loop.groups[1]

    def turn() -> None:
        for rank in set(loop.groups[0]) - set(trainers):
            loop.work(rank, loop.chance.uniform(15_000, 25_000))
        loop.meet(op, root=root)
        for _ in range(20):
            for rank in trainers:
                loop.work(rank, 150 + late_ms * (rank == 1))
            loop.meet(group=1)
            loop.mark(trainers, optimizer)
        loop.meet("broadcast", root=0)

    return turn


@pytest.mark.parametrize("optimizer", [EXPLICIT, 7], ids=["explicit", "optimizer"])
@pytest.mark.parametrize(
    ("op", "root"), [("broadcast", 2), ("gather", 0), ("all_gather", -1), ("barrier", -1), ("scatter", 3)]
)
def test_rollouts(op: str, root: int, optimizer: int) -> None:
    """Ranks that never step while others do have another role: the trainers wait for their rollouts, and they are not late."""
    loop = Loop(4, (0, 1))
    assert not any(loop.run(rollouts(loop, op, root, optimizer), 400))


def test_one_trainer() -> None:
    """One rank with an optimizer that waits for the others, which have none, is of another role, too."""
    for op, root in (("all_gather", -1), ("gather", 0)):
        loop = Loop(2, (0,))
        assert not any(loop.run(rollouts(loop, op, root, optimizer=7), 400))


def test_late_trainer() -> None:
    """A trainer that is late for the other one is named although both wait for rollouts."""
    loop = Loop(4, (0, 1))
    turn = rollouts(loop, "all_gather", -1, 7, late_ms=150)
    named = loop.run(turn, 200)
    assert {1} in named
    assert not any(each - {1} for each in named)


def test_steps_that_one_rank_marks() -> None:
    """Where one rank calls ``commwatch.step()`` for all, any rank that is late is named, itself, too."""
    for late in range(2):
        loop = Loop(2)

        def turn(loop: Loop = loop, late: int = late) -> None:
            for rank in range(2):
                loop.work(rank, 30 + 60 * (rank == late))
            loop.meet()
            loop.mark([0])

        assert loop.run(turn, 15)[-1] == {late}


@pytest.mark.parametrize("seed", seeds(5))
def test_long_uneven_steps(seed: int) -> None:
    """Steps that take each rank 8 to 24 s, now this one longer and now that, have no straggler; nor has a first one of 28 to 42 s."""
    loop = Loop(4, seed=seed)

    def turn() -> None:
        for rank in range(4):
            loop.work(rank, loop.chance.uniform(8_000, 24_000))
        loop.meet()
        loop.mark(range(4))

    def quick() -> None:
        for rank in range(4):
            loop.work(rank, 80)
        loop.meet()
        loop.mark(range(4))

    for rank in range(4):
        loop.work(rank, loop.chance.uniform(28_000, 42_000))
    loop.meet()
    assert not any(loop.run(quick, 60))
    assert not any(loop.run(turn, 600))
