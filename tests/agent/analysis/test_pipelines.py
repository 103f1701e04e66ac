"""Pipelines out of messages written by hand: directions, stages, bubble."""

from __future__ import annotations

import pytest

from commwatch_agent.analysis.pipelines import Message, are_pipeline, have_pipeline, is_forward, pipelines
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.jobs import JobTable
from tests.helpers import MS, group_entry, identity, mark, operation, packed


@pytest.mark.parametrize(
    ("op", "me", "peer", "size", "forward"),
    [
        ("send", 0, 1, 4, True),
        ("recv", 1, 0, 4, True),
        ("send", 1, 0, 4, False),
        ("recv", 0, 1, 4, False),
        ("send", 0, 1, 2, True),
        ("send", 1, 0, 2, False),
        ("send", 3, 0, 4, True),  # interleaved: from the last stage to the first
        ("recv", 0, 3, 4, True),
        ("send", 0, 2, 4, True),  # two stages of two ranks each
        ("recv", 2, 0, 4, True),
        ("send", 2, 0, 4, False),
    ],
)
def test_direction(op: str, me: int, peer: int, size: int, forward: bool) -> None:
    """Forward is receiving from the stage before and sending to the next, the shorter way round the group."""
    assert is_forward(op, me, peer, size) == forward


def test_pipelines_apart() -> None:
    """Two pipelines in one group are reported as two; stages are in pipeline order, with their waits and bubble."""
    aggregate = JobTable()
    group = group_entry(0, (0, 1, 2, 3), "pp")
    for rank, peer in ((0, 2), (2, 0), (1, 3), (3, 1)):
        book = aggregate.open(str(rank), identity(rank=rank, world_size=4))
        book.learn([group])
        first = rank < 2
        times = [
            record
            for n in range(4)
            for at in [n * 100 * MS]
            for record in (
                operation("send" if first else "recv", start_ns=at, end_ns=at + 10 * MS, peer=peer, waited_us=4000),
                operation("recv" if first else "send", start_ns=at, end_ns=at + 50 * MS, peer=peer, waited_us=16_000),
                mark(n, at + 100 * MS),
            )
        ]
        ingest_records(book, packed(*times))
    found = pipelines(aggregate.jobs.values())
    assert [[stage.rank for stage in pipeline.stages] for pipeline in found] == [[0, 2], [1, 3]]
    for pipeline in found:
        assert (pipeline.complete, pipeline.micro_batches, pipeline.least_bubble_share) == (True, 1, 1 / 2)
        assert pipeline.bubble_share == pytest.approx(0.2)
        for stage in pipeline.stages:
            assert (stage.forward, stage.backward) == (4, 4)
            assert stage.forward_wait_s == pytest.approx(0.016)
            assert stage.backward_wait_s == pytest.approx(0.064)


def test_stages_elsewhere() -> None:
    """Where stages run on other nodes there is no least bubble; a rank without steps has no bubble; unknown peers are passed over."""
    book = (aggregate := JobTable()).open("0", identity(rank=1, world_size=4))
    book.learn([group_entry(0, (0, 1, 2, 3), "pp")])
    ingest_records(
        book, packed(operation("recv", start_ns=0, end_ns=9, peer=0), operation("recv", start_ns=0, end_ns=9, peer=-1))
    )
    (pipeline,) = pipelines(aggregate.jobs.values())
    assert (pipeline.complete, pipeline.least_bubble_share, pipeline.bubble_share) == (False, None, None)
    assert pipeline.micro_batches is None
    assert [(stage.rank, stage.forward, stage.backward) for stage in pipeline.stages] == [(1, 1, 0)]


def counts(pairs: list[tuple[int, int]], each: int = 5) -> dict[Message, int]:
    """The messages from each first rank to the second, as both of them record them."""
    both = [
        Message(*one) for sender, receiver in pairs for one in ((sender, "send", receiver), (receiver, "recv", sender))
    ]
    return dict.fromkeys(both, each)


def found(pairs: list[tuple[int, int]], members: list[int] | None, group: str = "default_pg", size: int = 4) -> bool:
    """Whether these messages are those of a pipeline."""
    return are_pipeline(group, size, counts(pairs), members)


CHAIN, RING = [(0, 1), (1, 2), (2, 3)], [(0, 1), (1, 2), (2, 3), (3, 0)]


def test_what_is_a_pipeline() -> None:
    """A pipeline has a first stage, or the name of its group indicates it; a ring in either direction or in both is none, nor is a rank that serves all."""
    back = [(to, of) for of, to in CHAIN]
    around = [(to, of) for of, to in RING]
    assert found(CHAIN, None)
    assert found(CHAIN + back, [0, 1, 2, 3])
    assert found([(0, 1), (1, 0)], [0, 1], size=2)
    assert found(RING, [0, 1, 2, 3], "pp")
    assert not found(CHAIN, None, "cp")
    for ring in (RING, around, RING + around):
        assert not found(ring, [0, 1, 2, 3])
    assert not found([(0, 1), (0, 2), (0, 3)], [0, 1, 2, 3])


def test_places_in_the_group() -> None:
    """What is a ring follows from the places of ranks in their group, and not from their numbers."""
    ranks = [0, 4, 8, 12]
    ring = [(ranks[of], ranks[to]) for of, to in RING]
    assert not found(ring, ranks)
    assert found(ring[:-1], ranks)


def test_part_of_the_messages() -> None:
    """A ring of which the latest messages are cut has no first stage, and neither have the middle stages of a pipeline on another node."""
    ring = {one: 2 if one.rank == 0 else number for one, number in counts(RING).items() if one != (0, "recv", 3)}
    assert not are_pipeline("default_pg", 4, ring, None)
    middle = {one: number for one, number in counts(CHAIN).items() if one.rank in (1, 2)}
    assert not are_pipeline("default_pg", 4, middle, None)


@pytest.mark.parametrize(("pairs", "is_pipeline"), [(CHAIN, True), (RING, False)])
def test_of_a_job_that_runs(pairs: list[tuple[int, int]], is_pipeline: bool) -> None:
    """The messages of ranks in memory are judged as recorded ones; a job without messages has no pipeline, and unknown peers are passed over."""
    aggregate = JobTable()
    for rank in range(4):
        totals = aggregate.open(str(rank), identity(rank=rank, world_size=4))
        totals.learn([group_entry(0, (0, 1, 2, 3))])
        assert not have_pipeline([totals])
        mine = [(op, peer) for at, op, peer in counts(pairs) if at == rank] * 3
        sent = [
            operation(op, start_ns=n * MS, end_ns=(n + 1) * MS, peer=peer)
            for n, (op, peer) in enumerate([*mine, ("recv", -1)])
        ]
        ingest_records(totals, packed(*sent))
    (job,) = aggregate.jobs.values()
    assert have_pipeline(job.rank_totals.values()) == is_pipeline
