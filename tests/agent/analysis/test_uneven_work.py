"""Uneven work, in loops of ranks that compute and meet: which jobs have it, and how their waits become known while they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import pytest

from commwatch.wire import events as ev
from commwatch.wire.modes import COUNTERS, FULL
from commwatch_agent.analysis.waits.step_waits import step_waits
from commwatch_agent.analysis.waits.uneven_work import StepWaits, Uneven, Why, uneven
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.jobs import Job, JobTable
from commwatch_agent.ingest.why_late import Sample
from commwatch_collectors.node.process import Usage
from tests.helpers import MS, group_entry, identity, mark, operation, packed

S = 1000 * MS
RANKS = (0, 1, 2, 3)
#: What a rank computes in a step, in ms.
Work = Callable[[int, int], float]


class Loop(NamedTuple):
    """A job whose ranks compute and meet, step after step."""

    work_ms: Work
    transfer_ms: float = 2.0
    steps: int = 400
    #: Steps are marked.
    marked: bool = True
    #: The last rank sends to no other, and the others to the next one, in each step.
    chain: bool = False

    def run(self, aggregate: JobTable | None = None, began_ns: int = 0) -> tuple[Job, int]:
        """The job in memory at its end, and when that is."""
        aggregate = aggregate or JobTable()
        ranks = [aggregate.open(str(rank), identity(rank=rank, world_size=len(RANKS))) for rank in RANKS]
        for totals in ranks:
            totals.learn([group_entry(0, RANKS)])
        now_ns, read_ns, records = began_ns, began_ns, [list[tuple[int, ...]]() for _ in RANKS]
        for step in range(self.steps):
            came = [now_ns + int(self.work_ms(rank, step) * MS) for rank in RANKS]
            now_ns = max(came) + int(self.transfer_ms * MS)
            for rank, mine in enumerate(records):
                mine.extend(self._messages(rank, came[rank], step))
                mine.append(operation(start_ns=came[rank], end_ns=now_ns, seq=step))
                mine.extend([mark(step, now_ns)] if self.marked else [])
            if now_ns - read_ns > 2 * S or step == self.steps - 1:
                read_ns = now_ns
                for totals, mine in zip(ranks, records, strict=True):
                    ingest_records(totals, packed(*mine))
                    mine.clear()
        for totals in ranks:
            totals.steps.finish()
        (job,) = aggregate.jobs.values()
        return job, now_ns

    def _messages(self, rank: int, at_ns: int, step: int) -> list[tuple[int, ...]]:
        if not self.chain:
            return []
        peers = [("send", rank + 1)] * (rank < RANKS[-1]) + [("recv", rank - 1)] * (rank > 0)
        return [operation(op, start_ns=at_ns - MS, end_ns=at_ns, seq=step, peer=peer) for op, peer in peers]

    def waits(self) -> StepWaits | None:
        return step_waits(*self.run())


def alike(rank: int, step: int) -> float:
    return 40.0


def in_turn(rank: int, step: int) -> float:
    """A different rank takes longer in each step."""
    return 60.0 if step % 4 == rank else 40.0


def late(rank: int, step: int) -> float:
    return 60.0 if rank == 2 else 40.0


def less_to_do(rank: int, step: int) -> float:
    """Rank 0 has much less to do than the others, which are nearly alike."""
    return 10.0 if rank == 0 else 30.0 + (step % 4 == rank)


def saves_a_checkpoint(rank: int, step: int) -> float:
    """Rank 0 does something rare and long, while the others wait."""
    return 2000.0 if rank == 0 and step % 100 == 50 else 40.0


def test_in_turn() -> None:
    """Ranks that are late in turn wait for three quarters of what each is late: of steps of 62 ms, 15 ms."""
    waits = Loop(in_turn).waits()
    assert waits is not None
    assert dict(waits.waits) == pytest.approx(dict.fromkeys(RANKS, 15 / 62), rel=0.05)
    assert waits.transfer == pytest.approx(2 / 62, rel=0.2)
    found = uneven(waits)
    assert found is not None
    assert found.why is Why.TURNS
    assert found.saves == pytest.approx(15 / 62, rel=0.05)


JOBS: Mapping[str, tuple[Loop, Why | None]] = {
    "late in turn": (Loop(in_turn), Why.TURNS),
    "late in turn, in few long steps": (Loop(lambda rank, step: 100 * in_turn(rank, step), steps=20), Why.TURNS),
    "one rank is late": (Loop(late), Why.SOME),
    "one rank has less to do": (Loop(less_to_do), Why.SOME),
    "even work": (Loop(alike), None),
    "checkpoints of one rank": (Loop(saves_a_checkpoint), None),
    "long transfers": (Loop(in_turn, transfer_ms=20.0), Why.TRANSFERS),
    "little waiting": (Loop(lambda rank, step: 44.0 if step % 4 == rank else 40.0), None),
}


@pytest.mark.parametrize("name", JOBS)
def test_jobs(name: str) -> None:
    """Ranks that are late in turn have uneven work; even ranks, a late rank, checkpoints and long transfers are something else."""
    loop, why = JOBS[name]
    waits = loop.waits()
    assert waits is not None
    found = uneven(waits)
    assert (None if found is None else found.why) == why


UNKNOWN: Mapping[str, Loop] = {
    "a pipeline, whose stages wait by design": Loop(in_turn, chain=True),
    "a server, whose ranks wait for its next request": Loop(in_turn, marked=False),
    "too few steps": Loop(in_turn, steps=15),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_not_known(name: str) -> None:
    """Nothing is known of the waits of a pipeline, a job without steps, or one that has just begun."""
    assert UNKNOWN[name].waits() is None


def test_ranks_that_are_not_known() -> None:
    """A rank that only counts its operations, or has ended, is left out. With a single rank, no waiting for others is known."""
    job, now_ns = Loop(in_turn).run()
    first, second, third, _ = job.rank_totals.values()
    first.mode, second.alive = COUNTERS, False
    waits = step_waits(job, now_ns)
    assert waits is not None
    assert set(waits.waits) == {2, 3}
    third.alive = False
    assert step_waits(job, now_ns) is None
    first.mode = FULL
    assert step_waits(job, now_ns) is not None


def test_of_the_last_minute() -> None:
    """Steps that ended more than a minute ago no longer count."""
    job, now_ns = Loop(lambda rank, step: in_turn(rank, step) if step < 300 else alike(rank, step), steps=2000).run()
    assert now_ns > 80 * S
    waits = step_waits(job, now_ns)
    assert waits is not None
    assert max(waits.waits.values()) < 0.01


@pytest.mark.parametrize(("share", "is_uneven"), [(0.0, True), (0.1, True), (0.2, False)])
def test_ranks_that_compete_for_cores(share: float, is_uneven: bool) -> None:
    """Ranks whose main threads wait for a core at least half as long as for each other do not have uneven work: the node has too few cores."""
    job, now_ns = Loop(in_turn).run()
    for totals in job.rank_totals.values():
        for second in range(30):
            usage = Usage(0, int(second * share * S), 0, None)
            totals.add_sample(Sample(now_ns - (30 - second) * S, usage))
    waits = step_waits(job, now_ns)
    assert waits is not None
    assert waits.for_cores == pytest.approx(share)
    assert (uneven(waits) is not None) == is_uneven


def test_hidden_behind_compute() -> None:
    """Waiting costs no more than what compute waits for; if that is little, it costs nothing."""
    waits = dict.fromkeys(RANKS, 0.3)
    assert uneven(StepWaits(waits, 0.05, None)) == Uneven(Why.TURNS, 0.3, 0.3, 0.3)
    assert uneven(StepWaits(waits, 0.05, 0.2)) == Uneven(Why.TURNS, 0.3, 0.3, 0.2)
    assert uneven(StepWaits(waits, 0.05, 0.09)) is None


def test_timing() -> None:
    """The waits of the loop are those of collectives, whose begins and ends are known."""
    job, _ = Loop(in_turn).run()
    assert {op for totals in job.rank_totals.values() for (_, op, *_), _ in totals.sums()} == {ev.OP_CODE["all_reduce"]}
