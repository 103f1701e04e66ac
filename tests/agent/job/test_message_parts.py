"""Late ranks among those of several nodes that send each other messages: what each agent reports, and what all reports show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest

from commwatch.wire.modes import COUNTERS
from commwatch_agent.analysis.ended_operations import stragglers
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.job import rank_parts
from commwatch_agent.job.message_parts import MessageParts, late_senders, message_parts
from commwatch_agent.job.rank_parts import RankParts
from tests.agent.analysis.test_ended_operations import EVERY, S, add, operations, pipeline
from tests.helpers import MS, group_entry, operation, packed

NOW = 120 * EVERY
#: All ranks of the pipelines.
ALL = (0, 1, 2, 3)


def nodes(slow: int) -> list[JobTable]:
    """The agents of a pipeline of four stages, two on each node."""
    return [pipeline(slow, 4, ranks) for ranks in ((0, 1), (2, 3))]


def reports(*agents: JobTable, limit: int = 1024) -> Iterator[tuple[list[MessageParts], list[RankParts]]]:
    """What agents report, each 300 ms later than the previous one, over the wire."""
    for number, agent in enumerate(agents):
        jobs, now_ns = list(agent.jobs.values()), NOW + number * 300 * MS
        most, columns = rank_parts.parts(jobs, now_ns, limit)
        messages = message_parts(jobs, columns, most, now_ns)
        yield [MessageParts(**each) for each in json.loads(json.dumps([asdict(each) for each in messages]))], columns


def named(*agents: JobTable, limit: int = 1024) -> list[tuple[str, int]]:
    """Group and rank of the late ones."""
    found = list(reports(*agents, limit=limit))
    messages, columns = [each for some, _ in found for each in some], [each for _, some in found for each in some]
    return [(group, late.rank) for _, group, late in late_senders(messages, columns)]


@pytest.mark.parametrize("slow", range(4))
def test_slow_stage(slow: int) -> None:
    """A slow stage is named from the reports of two agents, as it would be on one node; one agent alone names none."""
    agents = nodes(slow)
    assert named(*agents) == [("w", slow)]
    assert named(*agents, agents[0]) == [("w", slow)], "an agent that was queried under two names counts once"
    assert [late.rank for _, _, late in stragglers(pipeline(slow, 4).jobs.values(), NOW)] == [slow]
    for agent in agents:
        assert named(agent) == []
        assert stragglers(agent.jobs.values(), NOW) == []


def test_stages_alike() -> None:
    """No stage is named where all wait equally long."""
    assert named(*nodes(slow=-1)) == []


def test_waits_that_are_not_known() -> None:
    """No rank is named where not all waits of one are known, which would then seem to wait least."""
    for agent in range(2):
        shed, gpu, gone = nodes(1), nodes(1), nodes(1)
        next(shed[agent].rank_totals()).mode = COUNTERS
        next(gpu[agent].rank_totals()).on_device = True
        next(gone[agent].rank_totals()).alive = False
        for agents in (shed, gpu, gone):
            assert named(*agents) == []


@pytest.mark.parametrize("op", ["all_reduce", "broadcast"])
def test_collectives_across_nodes(op: str) -> None:
    """Waits in collectives with ranks of other nodes count, too: a stage that waits in them is not late.

    In operations with a root they are not known, and then none is named.
    """

    def added(agents: list[JobTable], ranks: tuple[int, ...] = ALL) -> list[JobTable]:
        for agent in agents:
            for totals in agent.rank_totals():
                if totals.rank in ranks:
                    totals.learn([group_entry(1, ALL, "world", group_id="all")])
                    root = {"peer": 0} if op == "broadcast" else {}
                    took_ms = 46 if totals.rank == 1 else 1
                    ingest_records(totals, operations(range(120), took_ms, op, group=1, **root))
        return agents

    assert named(*nodes(slow=1)) == [("w", 1)]
    assert named(*added(nodes(slow=1))) == []
    assert named(*added(nodes(slow=2))) == ([("w", 2)] if op == "all_reduce" else [])
    assert named(*added(nodes(slow=1), ranks=(0, 1))) == [], "the others' parts are missing"


def test_as_long_as_all_is_known() -> None:
    """Where an answer has only the latest collectives, the waits of earlier times do not count; without enough of them none is named."""
    agents = nodes(slow=1)
    for agent in agents:
        for totals in agent.rank_totals():
            totals.learn([group_entry(1, ALL, "world", group_id="all")])
            ingest_records(totals, operations(range(120), 1, "all_reduce", group=1))
    assert named(*agents, limit=100) == [("w", 1)]
    assert named(*agents, limit=30) == [], "3 s"
    (first, *_), _ = next(reports(*agents, limit=100))
    assert first.known_s == pytest.approx(100 * EVERY / S, abs=0.11)


def test_one_way() -> None:
    """Ranks that only send or only receive are not reported."""
    agent = JobTable()
    made = [
        operation("recv", start_ns=at, end_ns=at + 90 * MS, seq=at // EVERY, peer=1, waited_us=80_000)
        for at in range(0, NOW, EVERY)
    ]
    ingest_records(add(agent, 0, 2), packed(*made))
    ((messages, _),) = reports(agent)
    assert messages == []


def test_numbers_out_of_range() -> None:
    """What no agent can have measured is refused."""
    (messages, _), *_ = reports(*nodes(slow=1))
    for wrong in (
        {"rank": 7},
        {"waits_s": [-1.0]},
        {"waits_s": [float("nan")]},
        {"waits_s": [0.0] * 601},
        {"steps_s": [float("inf")]},
        {"known_s": -1.0},
    ):
        with pytest.raises(ValueError, match="out of range"):
            replace(messages[0], **wrong)
