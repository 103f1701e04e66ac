"""The ranks of one collective side by side: transfer, wait, lateness, and what must never be put together."""

from __future__ import annotations

from itertools import permutations
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch.wire.events import OP_CODE
from commwatch_agent.ingest.collective_join import (
    MOST_PENDING,
    NOT_KNOWN_NS,
    GroupJoin,
    Part,
    Waits,
    own_lateness_at_root,
    split,
    waits_at_root,
)
from commwatch_agent.ingest.lateness import of_waits, own_lateness
from tests.helpers import examples

ALL_REDUCE, BARRIER, BROADCAST = (OP_CODE[op] for op in ("all_reduce", "barrier", "broadcast"))


def part(rank: int, took: int, *, end: int = 1_000, op: int = ALL_REDUCE, totals: object = None) -> Part:
    """A part that was launched when it started and ended at ``end``."""
    return Part(rank, op, end - took, end, took, totals)


def rooted(rank: int, root: int = 0, op: int = BROADCAST, size: int = 4) -> Part:
    """A part in an operation with a root."""
    return part(rank, 10, op=op)._replace(root=root, size=size)


def ranks(joined: Waits) -> list[int]:
    return sorted(each.rank for each, _ in joined.waits)


def test_two_ranks() -> None:
    """Of two ranks the one that took less time was late, and what the other took longer it waited."""
    joined = split([part(0, 900), part(1, 100)])
    assert joined.transfer_ns == 100
    assert {each.rank: wait for each, wait in joined.waits} == {0: 800, 1: 0}
    assert (joined.late.rank, joined.lateness_ns) == (1, 800)


def test_lateness_is_the_median() -> None:
    """Lateness is the median of the others' waiting: one that came far too early does not blow it up."""
    joined = split([part(0, 110), part(1, 100), part(2, 120), part(3, 5_100, end=6_000)])
    assert {each.rank: wait for each, wait in joined.waits} == {0: 10, 1: 0, 2: 20, 3: 5_000}
    assert (joined.late.rank, joined.lateness_ns) == (1, 20)


@examples(60)
@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=16))
def test_split(durations: list[int]) -> None:
    """wait = t - transfer for every rank, transfer is the shortest t, lateness the median of the others' waits."""
    joined = split([part(rank, took, end=10**13) for rank, took in enumerate(durations)])
    assert joined.transfer_ns == min(durations) == joined.late.duration_ns
    assert [wait for _, wait in joined.waits] == [took - min(durations) for took in durations]
    others = [wait for each, wait in joined.waits if each.rank != joined.late.rank]
    assert joined.lateness_ns == (int(median(others)) if others else 0)


def own_late(join: GroupJoin, collectives: list[list[Part]]) -> list[list[int]]:
    """The own lateness of the ranks, collective by collective."""
    made = of_waits([split(parts) for parts in collectives], [0] * len(collectives))
    late = own_lateness([made], [join]).reshape(len(collectives), -1)
    return [[int(each) for each in of_collective] for of_collective in late]


def test_own_lateness() -> None:
    """What a rank took longer than the others before it came is its own; what it came late out of another operation is not."""

    def own(*ranks: tuple[int, int]) -> list[int]:
        parts = [
            part(rank, took, end=10_000)._replace(own_ns=took_before) for rank, (took, took_before) in enumerate(ranks)
        ]
        return own_late(GroupJoin(len(parts)), [parts])[0]

    assert own((900, 50), (900, 60), (100, 855), (880, 70)) == [0, 0, 795, 10]  # computed for longer
    assert own((900, 50), (900, 60), (100, 45), (880, 70)) == [0, 0, 0, 20]  # was held up elsewhere
    assert own((900, 50), (100, 850), (100, 860), (880, 70)) == [0, 780, 790, 0]  # two
    assert own((900, 50), (100, 850)) == [0, 800]
    assert own((900, NOT_KNOWN_NS), (900, 60), (100, 855)) == [0, 0, 795]
    assert own((900, 50), (100, NOT_KNOWN_NS)) == [0, 0]
    assert own((900, NOT_KNOWN_NS), (100, NOT_KNOWN_NS)) == [0, 800]  # nothing is known but this


def test_hidden_behind_compute() -> None:
    """A rank is late by what another one was blocked for it: not by what that one computed beside an operation that it awaits later."""

    def own(*ranks: tuple[int, int]) -> list[int]:
        parts = [
            part(rank, took, end=10_000)._replace(own_ns=1_000 - took, run=5, blocked_ns=blocked)
            for rank, (took, blocked) in enumerate(ranks)
        ]
        return own_late(GroupJoin(len(parts)), [parts])[0]

    assert own((900, 0), (900, 0), (100, 0)) == [0, 0, 0]  # it was over when they began to wait
    assert own((900, 80), (900, 0), (100, 100)) == [0, 0, 0]  # they waited for the transfer
    assert own((900, 400), (900, 0), (100, 100)) == [0, 0, 300]  # one was blocked before rank 2 began
    assert own((900, 400), (900, 0), (200, 0), (100, 0)) == [0, 0, 200, 300]
    assert own((900, NOT_KNOWN_NS), (900, 0), (100, 0)) == [0, 0, 800]
    assert own((900, 5_000), (100, 0)) == [0, 800]  # before the operation began, its rank waited for none of this group


def run_of(delays_ms: list[int], runs: list[int | None]) -> list[int]:
    """What counts as rank 1's own lateness in collectives to which it is so late, of such runs; each takes 1 ms more."""
    collectives = [
        [
            part(0, delay + 1, end=10_000)._replace(own_ns=100, run=run),
            part(1, 1, end=10_000)._replace(own_ns=100 + delay, run=run),
        ]
        for delay, run in zip(delays_ms, runs, strict=True)
    ]
    together = [late[1] for late in own_late(GroupJoin(2), collectives)]
    join = GroupJoin(2)
    assert [own_late(join, [each])[0][1] for each in collectives] == together
    return together


def test_one_delay_counts_once() -> None:
    """A delay before a run of operations makes the rank late to all of them, and counts once; in the next run it counts again."""
    assert run_of([10, 10, 10, 12, 10, 10], [7, 7, 7, 7, 8, 8]) == [10, 0, 0, 2, 10, 0]
    assert run_of([10, 10, 10], [None, None, None]) == [10, 10, 10]


def test_slow_computation_beside_operations() -> None:
    """A rank that falls behind in a run, by 5 more each time, is late by all that the others waited for it."""
    collectives = [
        [
            part(0, waited + 1, end=10_000)._replace(own_ns=10 * number, run=7),
            part(1, 1, end=10_000)._replace(own_ns=10 * number + 5 * (number + 1), run=7),
        ]
        for number, waited in enumerate([5, 5, 5, 5])
    ]
    assert [late[1] for late in own_late(GroupJoin(2), collectives)] == [5, 5, 5, 5]


@pytest.mark.parametrize(
    ("to_root", "launched", "own", "late"),
    [
        (False, [500, 100, 120], [430, 30, 40], [390, 0, 0]),  # a root that is late makes all others wait
        (False, [100, 500, 120], [30, 430, 40], [0, 0, 0]),  # no rank waits for any other
        (False, [500, 100, 120], [30, 30, 40], [0, 0, 0]),  # it was held up elsewhere
        (True, [100, 500, 120], [30, 430, 40], [0, 390, 0]),
        (True, [500, 100, 120], [430, 30, 40], [0, 0, 0]),
        (True, [100, 500, 120], [30, NOT_KNOWN_NS, 40], [0, 0, 0]),
    ],
)
def test_own_lateness_at_root(to_root: bool, launched: list[int], own: list[int], late: list[int]) -> None:
    """Of an operation with a root only the other side of it waits."""
    join = GroupJoin(3)
    parts = [
        rooted(rank)._replace(launch_ns=at, own_ns=mine)
        for rank, (at, mine) in enumerate(zip(launched, own, strict=True))
    ]
    assert [join.add_rooted(5, each) for each in parts[:2]] == [None, None]
    assert join.add_rooted(5, parts[2]) == dict(enumerate(parts))
    assert own_lateness_at_root(dict(enumerate(parts)), 0, to_root) == dict(enumerate(late))


def test_one_delay_counts_once_at_a_root() -> None:
    """Operations with a root that wait for a rank at the same time count its delay once; the next delay counts again."""
    join = GroupJoin(2)

    def late(*launched: int) -> int:
        parts = {rank: rooted(rank)._replace(launch_ns=at, own_ns=at) for rank, at in enumerate(launched)}
        return join.own_lateness.once(parts, own_lateness_at_root(parts, 0, False))[0]

    assert [late(160, 100), late(161, 101), late(175, 115)] == [60, 1, 14]  # three broadcasts that overlap
    assert [late(200, 200), late(168, 166), late(290, 230)] == [0, 0, 60]
    assert late(300, 280) == 10


@pytest.mark.parametrize(
    ("to_root", "took", "waits"),
    [(False, [5, 420, 395], [0, 400, 380]), (True, [20, 5, 5], [0, 0, 0]), (False, [5, 30, 40], [0, 30, 40])],
)
def test_waits_at_root(to_root: bool, took: list[int], waits: list[int]) -> None:
    """Who needs the other side waits until it comes, and no longer than the operation took it."""
    launched = [500, 100, 120]
    parts = {
        rank: part(rank, each)._replace(launch_ns=at)
        for rank, (each, at) in enumerate(zip(took, launched, strict=True))
    }
    assert waits_at_root(parts, 0, to_root) == dict(enumerate(waits))
    late = {rank: each._replace(launch_ns=600 - each.launch_ns) for rank, each in parts.items()}  # the root comes first
    assert waits_at_root(late, 0, to_root) == ({0: min(took[0], 400), 1: 0, 2: 0} if to_root else {0: 0, 1: 0, 2: 0})


def test_rooted_of_another_life() -> None:
    """Parts of one number that are of different operations, or of one rank, are never put together."""
    join = GroupJoin(2)
    assert join.add_rooted(5, rooted(0)) is None
    assert join.add_rooted(5, rooted(0)) is None
    assert join.add_rooted(5, rooted(1, op=OP_CODE["reduce"])) is None
    assert join.add_rooted(5, rooted(1)) is None
    assert join.add_rooted(5, rooted(0)) is not None
    for number in range(3 * MOST_PENDING):
        join.add_rooted(number, rooted(0))
    assert len(join._rooted) == MOST_PENDING
    assert not join.odd


@pytest.mark.parametrize(
    ("other", "joined"), [(rooted(1, root=1), False), (rooted(1, root=7), False), (rooted(1, size=8), True)]
)
def test_rooted_with_other_data(other: Part, joined: bool) -> None:
    """An operation with a root whose ranks passed different roots or data is kept as such; with different roots no rank waited for another."""
    join = GroupJoin(2)
    for parts in ((rooted(0), other), (other, rooted(0))):
        assert join.add_rooted(5, parts[0]) is None
        assert join.part(5, parts[0].rank) == parts[0]
        assert join.part(5, parts[1].rank) is None
        assert (join.add_rooted(5, parts[1]) is not None) == joined
        assert join.odd.pop() == (5, list(parts))
        assert join.part(5, 0) is None


def test_part_of_an_incomplete_collective() -> None:
    """What one rank passed to a collective that others have not ended yet is known, also in a group that spans nodes."""
    join = GroupJoin(2)
    join.add(5, part(1, 10))
    assert join.part(5, 1) == part(1, 10)
    assert join.part(5, 0) is None
    assert join.part(4, 1) is None


@examples(60)
@given(st.permutations(range(4)), st.lists(st.integers(1, 1000), min_size=4, max_size=4))
def test_order_does_not_matter(order: list[int], durations: list[int]) -> None:
    """A collective is joined once, at its last part and with all ranks, whichever rank the agent reads first."""
    join = GroupJoin(4)
    told = [join.add(7, part(rank, durations[rank])) for rank in order]
    assert told[:3] == [None, None, None]
    assert told[3] is not None
    assert ranks(told[3]) == [0, 1, 2, 3]
    assert told[3].transfer_ns == min(durations)
    assert join.unjoined == 0


def test_book_comes_back() -> None:
    """The totals object of each rank is handed back unchanged."""
    rank_totals = [object(), object()]
    join = GroupJoin(2)
    join.add(0, part(0, 10, totals=rank_totals[0]))
    joined = join.add(0, part(1, 20, totals=rank_totals[1]))
    assert joined is not None
    assert [each.totals for each, _ in joined.waits] == rank_totals


def test_incomplete() -> None:
    """A collective with a rank that is not observed is never joined, whatever comes after it."""
    join = GroupJoin(3)
    assert join.add(0, part(0, 10)) is None
    assert join.add(0, part(1, 10)) is None
    for rank in range(3):
        joined = join.add(1, part(rank, 10))
    assert joined is not None
    assert ranks(joined) == [0, 1, 2]


def test_collectives_in_turn() -> None:
    """A rank may be many collectives ahead of another; each is joined with its own number."""
    join = GroupJoin(2)
    for seq in range(100):
        assert join.add(seq, part(0, 10 + seq)) is None
    for seq in range(100):
        joined = join.add(seq, part(1, 5))
        assert joined is not None
        assert joined.lateness_ns == 5 + seq


def test_different_ops() -> None:
    """Ranks in different operations at one number (a desync) are not joined, and counted."""
    join = GroupJoin(2)
    join.add(0, part(0, 10))
    assert join.add(0, part(1, 20, op=BARRIER)) is None
    assert join.unjoined == 1
    join.add(1, part(0, 10))
    assert join.add(1, part(1, 20)) is not None


def runs() -> list[tuple[str, Part]]:
    """The same collective of two runs under one job name: the second begins after the first has ended."""
    return [
        ("first", part(0, 50, end=100)),
        ("first", part(1, 20, end=100)),
        ("second", part(0, 700, end=9_000)),
        ("second", part(1, 30, end=9_000)),
    ]


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_earlier_run_of_the_same_name(order: tuple[int, ...]) -> None:
    """Parts of two runs are never joined with each other, in whatever order the agent finds their rings."""
    join = GroupJoin(2)
    for at in order:
        run, given_part = runs()[at]
        joined = join.add(0, given_part)
        if joined is not None:
            ends = {each.end_ns for each, _ in joined.waits}
            assert ends == ({100} if run == "first" else {9_000}), "two runs in one collective"


def test_one_run_after_the_other() -> None:
    """A run whose collective was complete does not disturb the next run's, and an incomplete one is counted as lost."""
    join = GroupJoin(2)
    complete = [join.add(0, each) is not None for _, each in runs()]
    assert (complete, join.unjoined) == ([False, True, False, True], 0)
    join = GroupJoin(2)
    cut_short = [join.add(0, each) is not None for _, each in runs()[1:]]
    assert (cut_short, join.unjoined) == ([False, False, True], 1)


def test_early_rank_is_not_an_earlier_run() -> None:
    """A rank that waited for minutes belongs to the same collective as the one it waited for."""
    join = GroupJoin(2)
    join.add(0, part(0, 600_000_000_000, end=700_000_000_000))
    joined = join.add(0, part(1, 1_000, end=700_000_000_500))
    assert joined is not None
    assert joined.lateness_ns == 600_000_000_000 - 1_000


def test_many_ranks() -> None:
    """A group of 1,024 ranks, read one after the other as an agent of all of them would: every wait is right."""
    size, collectives = 1024, 3
    join = GroupJoin(size)
    joined = [
        join.add(seq, part(rank, 1000 + rank * 7)) for rank in reversed(range(size)) for seq in range(collectives)
    ]
    whole = [waits for waits in joined if waits is not None]
    assert joined[-collectives:] == whole
    for waits in whole:
        assert (waits.transfer_ns, waits.late.rank) == (1000, 0)
        assert {each.rank: wait for each, wait in waits.waits} == {rank: rank * 7 for rank in range(size)}
        assert waits.lateness_ns == 7 * size // 2  # the median of 1 to 1,023
    assert list(join.waiting()) == []


def test_waiting() -> None:
    """Incomplete collectives are returned, latest first, except those in which ranks are in different operations."""
    join = GroupJoin(3)
    for seq in range(3):
        for rank in (0, 1):
            join.add(seq, part(rank, 10, op=BARRIER if (seq, rank) == (1, 1) else ALL_REDUCE))
    assert [(seq, [each.rank for each in parts]) for seq, parts in join.waiting()] == [(2, [0, 1]), (0, [0, 1])]


def test_pending_is_bounded() -> None:
    """Collectives that wait for a rank in vain are bounded: the oldest are given up first, and each is counted."""
    join, extra = GroupJoin(2), 10
    for seq in range(MOST_PENDING + extra):
        join.add(seq, part(0, 10))
    assert join.unjoined == extra
    for seq in range(extra, MOST_PENDING + extra):
        assert join.add(seq, part(1, 10)) is not None
    assert join.unjoined == extra
