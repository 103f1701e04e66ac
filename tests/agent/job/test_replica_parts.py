"""Replicas with ranks on several nodes: the agents' checks are compared together."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from commwatch.wire import events as ev
from commwatch.wire.numbers import NUMBERS
from commwatch_agent.analysis import live_ranks
from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.incidents.judging import judged
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.job.merging import Seen, own_records
from commwatch_agent.job.replica_parts import RankChecks, corruptions_across, rank_checks
from tests.helpers import group_entry, identity, judged_now, packed

S = 1_000_000_000
NAMES = ["a", "b"]


class Node:
    """An agent with some ranks of a job of ``size`` ranks."""

    def __init__(self, ranks: tuple[int, ...], size: int, names: list[str] | None = None) -> None:
        self.aggregate, self.now_ns, self.names = JobTable(), 0, names or NAMES
        self.ranks = {rank: self.aggregate.open(str(rank), identity(rank=rank, world_size=size)) for rank in ranks}
        for totals in self.ranks.values():
            entry = {"replicas": 0, "in": 0, "key": "k", "tensors": self.names}
            totals.learn([group_entry(0, tuple(range(size))), entry])

    def check(self, step: int, wrong: tuple[int, ...] = ()) -> None:
        """All ranks make a check; the first parameter of some is wrong."""
        self.now_ns = step * S
        for rank, totals in self.ranks.items():
            sums = ((place, 5 + (place == 0 and rank in wrong)) for place in range(len(self.names)))
            ingest_records(
                totals,
                packed(*(ev.Checksum(0, 0, place, step, step, plain, 1, step * S).fields() for place, plain in sums)),
            )

    def answer(self) -> list[RankChecks]:
        """Its part of a question about the whole job, over the wire."""
        parts = rank_checks(self.aggregate.jobs.values(), self.now_ns + S)
        read: list[dict[str, Any]] = json.loads(json.dumps([asdict(part) for part in parts]))
        return [RankChecks(**{**part, "at": [tuple(at) for at in part["at"]]}) for part in read]


def found(*nodes: Node) -> list[Verdict]:
    """The verdicts on the whole job."""
    jobs = [list(node.aggregate.jobs.values()) for node in nodes]
    reported = [verdict for node, of in zip(nodes, jobs, strict=True) for verdict in judged_now(of, node.now_ns + S)]
    groups = [group for of in jobs for group in live_ranks.groups(of)]
    replicas = [part for node in nodes for part in node.answer()]
    return judged(Seen([], groups, own_records(reported), replicas=replicas))


def test_one_rank_each() -> None:
    """Of replicas on three nodes, one on each, the rank that differs is named, with the first wrong step and the right one before."""
    nodes = [Node((rank,), 3) for rank in range(3)]
    for step in (1, 100, 200, 300):
        for node in nodes:
            node.check(step, (1,) if step >= 200 else ())
    (verdict,) = found(*nodes)
    assert (verdict.kind, verdict.cause, verdict.ranks, verdict.waiting) == ("corruption", "weights", [1], [0, 2])
    assert (verdict.parameter, verdict.step, verdict.since_s) == ("a", 200, 101.0)
    assert found(*nodes[::2]) == []


def test_equal() -> None:
    """Equal replicas have no verdict, nor those that were never equal, nor a difference that is over."""
    nodes = [Node((rank,), 2) for rank in range(2)]
    for step in (1, 2, 3):
        for node in nodes:
            node.check(step, (1,) if step == 2 else ())
    assert found(*nodes) == []
    nodes = [Node((rank,), 2) for rank in range(2)]
    for step in (1, 2, 3):
        for node in nodes:
            node.check(step, (1,))
    assert found(*nodes) == []


def test_two_ranks_each() -> None:
    """A node that sees only two ranks cannot tell which is wrong; with the other node's ranks it is known, and said once."""
    nodes = [Node((0, 1), 4), Node((2, 3), 4)]
    for step in (1, 20, 30):
        for node in nodes:
            node.check(step, (3,) if step == 30 else ())
    assert [verdict.cause for verdict in judged_now(nodes[1].aggregate.jobs.values(), 30 * S)] == ["one_of"]
    (verdict,) = found(*nodes)
    assert (verdict.cause, verdict.ranks, verdict.step) == ("weights", [3], 30)


def test_bounded() -> None:
    """With many parameters an answer has the first check and fewer of the latest; a group within one node has none."""
    node = Node((0, 1), 4, [str(at) for at in range(1000)])
    for step in range(1, 30):
        node.check(step)
    assert [[at for at, _ in part.at] for part in node.answer()] == [[1, *range(22, 30)]] * 2
    node = Node((0, 1), 2)
    node.check(1)
    assert node.answer() == []


def test_damaged() -> None:
    """An answer whose columns do not fit is refused."""
    for at, ages, sums in (([(1, 1)], [], ["0" * 32]), ([(1, 1)], [1.0], ["0" * 31])):
        with pytest.raises(ValueError, match=r"columns|sums"):
            RankChecks("job", "g", "k", 0, ["a"], at, ages, sums)


@pytest.mark.parametrize("before_zero", [0, 2, 250, 300])
def test_numbers_go_on(before_zero: int) -> None:
    """Checks of several nodes are compared in their order, wherever the numbers of steps go on at 0."""
    nodes = [Node((rank,), 3) for rank in range(3)]
    for step in (1, 100, 200, 300):
        for node in nodes:
            node.check(step, (1,) if step >= 200 else ())
    (group, *_) = [group for node in nodes for group in live_ranks.groups(node.aggregate.jobs.values())]
    parts = [
        replace(part, at=[((step - before_zero) % NUMBERS, number) for step, number in part.at])
        for node in nodes
        for part in node.answer()
    ]
    (verdict,) = corruptions_across(parts, {(group.job_id, group.group_id): group})
    assert (verdict.cause, verdict.ranks, verdict.step) == ("weights", [1], (200 - before_zero) % NUMBERS)
    assert verdict.says.endswith(f"not at step {(100 - before_zero) % NUMBERS})")
