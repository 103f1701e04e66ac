"""Counters and ages never have a part of what they name: absent where some of it is not known."""

from __future__ import annotations

import threading

from commwatch.wire import events as ev
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.prometheus.exporter import Exporter
from tests.helpers import group_entry, identity, mark, operation, packed

S = 10**9


def life(aggregate: JobTable, restart: int) -> RankTotals:
    """A life of rank 0."""
    totals = aggregate.open(f"life {restart}", identity(started_ns=restart * 100 * S, restart=restart))
    totals.learn([group_entry()])
    return totals


def steps(totals: RankTotals, first: int, number: int, *, untimed: bool = False, exposed: bool = True) -> None:
    """Steps of 1 s, with 0.5 s of communication, of which 0.4 s are exposed; marked at their ends."""
    records = []
    for step in range(first, first + number):
        began = int(totals.identity["started_ns"]) + step * S
        flags = ev.UNTIMED if untimed else 0
        records.append(operation(start_ns=began + S // 10, end_ns=began + 6 * S // 10, seq=step, flags=flags))
        records.append(mark(step, began + S, exposed_ns=4 * S // 10 if exposed else None))
    ingest_records(totals, packed(*records, first=totals.read))


def seconds(aggregate: JobTable, now_ns: int = 1000 * S) -> dict[str, float]:
    """Samples of rank 0 by name, without the common beginning and end."""
    families = Exporter(aggregate, threading.RLock(), lambda: now_ns, list).collect()
    return {
        sample.name.removeprefix("commwatch_").removesuffix("_seconds_total"): sample.value
        for family in families
        for sample in family.samples
    }


def test_life_with_unknown_communication() -> None:
    """The lives of a rank have one counter of communication time: none of it is shown once that of one life is not known."""
    aggregate = JobTable()
    first = life(aggregate, 0)
    steps(first, 0, 21)
    assert (seconds(aggregate)["step"], seconds(aggregate)["step_comm"]) == (20, 10)
    first.alive, first.gone_ns = False, 50 * S
    first.finish()
    second = life(aggregate, 1)
    steps(second, 0, 11)
    found = seconds(aggregate)
    assert (found["step"], found["step_comm"], round(found["step_exposed_comm"], 3)) == (30, 15, 12)
    steps(second, 11, 10, untimed=True)
    found = seconds(aggregate)
    assert found["step"] == 40
    assert not {"step_comm", "step_group_comm", "step_exposed_comm"} & found.keys()


def test_unknown_exposed_steps() -> None:
    """Exposed time is absent where that of more than one step in a hundred is unknown; those before the first known one do not count."""
    aggregate = JobTable()
    rank = life(aggregate, 0)
    steps(rank, 0, 5, exposed=False)
    steps(rank, 5, 99)
    assert round(seconds(aggregate)["step_exposed_comm"], 3) == round(99 * 0.4, 3)
    steps(rank, 104, 1, exposed=False)
    assert "step_exposed_comm" in seconds(aggregate)
    steps(rank, 105, 1, exposed=False)
    found = seconds(aggregate)
    assert "step_comm" in found
    assert "step_exposed_comm" not in found


def test_age_of_an_asynchronous_collective() -> None:
    """On the CPU, a collective is as old as its launch, however late a thread waits for it; a receive as the wait."""
    aggregate, now_ns = JobTable(), 1000 * S
    rank = life(aggregate, 0)
    waited = {"start_ns": now_ns - 3 * S, "end_ns": 0, "flags": ev.BLOCKED | ev.ASYNC}
    reduce = operation("reduce_scatter", launch_ns=now_ns - 60 * S, **waited)
    receive = operation("recv", launch_ns=now_ns - 90 * S, **waited)
    rank.in_flight = [ev.Record._make((1, *receive, 1))]
    assert seconds(aggregate, now_ns)["collective_in_flight_seconds"] == 3
    rank.in_flight = [ev.Record._make((1, *each, 1)) for each in (receive, reduce)]
    assert seconds(aggregate, now_ns)["collective_in_flight_seconds"] == 60
