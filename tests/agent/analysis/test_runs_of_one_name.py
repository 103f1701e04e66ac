"""Several runs of one job's name: ranks, groups, verdicts and metrics are those of the latest run."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from commwatch.wire import events as ev
from commwatch.wire.ring import HEARTBEAT, RingWriter
from commwatch_agent.analysis import live_ranks
from commwatch_agent.analysis.verdicts import verdicts
from commwatch_agent.history.job_exit import Exit
from commwatch_agent.ingest.jobs import Job, JobTable
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.prometheus.exporter import Exporter
from commwatch_agent.questions.node_now import node_now
from tests.helpers import EPOCH_NS, Watch, end_rank, group_entry, identity, judged_now, mark, operation, write_ring

S = 10**9
DAY = 86_400 * S


def rank(aggregate: JobTable, uid: str, number: int, started_ns: int, size: int = 2, **more: Any) -> RankTotals:
    """A rank that runs and has used the group of all ranks."""
    totals = aggregate.open(uid, identity(rank=number, world_size=size, started_ns=started_ns, **more))
    totals.learn([group_entry(0, tuple(range(size)))])
    totals.heartbeat_ns = 60 * S
    return totals


def process(began_ns: int) -> dict[str, Any]:
    """When a process began, as an identity has it."""
    return {"started_ticks": str(began_ns * os.sysconf("SC_CLK_TCK") // S)}


def end(totals: RankTotals, at_ns: int) -> None:
    """Its process has ended."""
    totals.alive, totals.gone_ns = False, at_ns


def launched(seq: int, at_ns: int) -> ev.Record:
    """An operation in flight."""
    return ev.Record._make((1, *operation(start_ns=0, end_ns=0, launch_ns=at_ns, seq=seq), 1))


def states(job: Job) -> list[tuple[int, str]]:
    """Number and state of each rank."""
    return [(view.rank, view.state) for view in live_ranks.ranks([job], 60 * S)]


@pytest.mark.parametrize("gone_s", [5, 55])
def test_earlier_boot(gone_s: int) -> None:
    """A ring of an earlier boot, whose clock was ahead, does not replace the rank that runs, nor end a scrape."""
    aggregate = JobTable()
    end(rank(aggregate, "old", 0, 10 * DAY, size=1, boot_id="earlier"), gone_s * S)
    rank(aggregate, "new", 0, 50 * S, size=1)
    job = aggregate.jobs["job"]
    assert states(job) == [(0, "running")]
    assert list(Exporter(aggregate, threading.RLock(), lambda: 60 * S, list).collect())
    assert [line.rank for line in (each.line for each in node_now(job, {}, [], 60 * S).ranks)] == [0]
    end(next(iter(live_ranks.of_this_run(job))), 60 * S)
    assert [totals.identity["boot_id"] for totals in live_ranks.of_this_run(job)] == [identity()["boot_id"]]


@pytest.mark.parametrize("began_s", [9, 30])
def test_dead_before_the_last_rank_came(began_s: int) -> None:
    """A rank that died before another one launched its first operation is of this run if that one's process had begun."""
    aggregate = JobTable()
    rank(aggregate, "0", 0, 10 * S, size=3).in_flight = [launched(0, 11 * S)]
    end(rank(aggregate, "1", 1, 10 * S, size=3), 20 * S)
    rank(aggregate, "2", 2, 31 * S, size=3, **process(began_s * S)).in_flight = [launched(0, 31 * S)]
    found = [(verdict.cause, verdict.ranks) for verdict in judged_now(aggregate.jobs.values(), 700 * S)]
    assert found == ([("dead", [1])] if began_s == 9 else [("unseen", [1])])


def test_group_of_an_earlier_run() -> None:
    """A group that an earlier run used before the probe was there is judged in the latest run."""
    aggregate = JobTable()
    for number in (0, 1):
        totals = aggregate.open(f"old {number}", identity(rank=number))
        totals.learn([group_entry(aligned=False)])
        end(totals, 20 * S)
    waits = rank(aggregate, "0", 0, 30 * S)
    rank(aggregate, "1", 1, 30 * S)
    waits.in_flight = [launched(7, 40 * S)]
    (verdict,) = judged_now(aggregate.jobs.values(), 200 * S)
    assert verdict.ranks == [1]


def test_in_the_history(tmp_path: Path) -> None:
    """Groups in the history are those of the latest run, with its ranks on this node."""
    watch, everyone = Watch(tmp_path), (0, 1, 2, 3)
    before = group_entry(0, everyone, aligned=False)
    rings = [write_ring(watch.rings, [], [before], rank=number, world_size=4) for number in (0, 1)]
    watch.tick(5 * S)
    for ring in rings:
        ring.close(6 * S)
        end_rank(ring)
    watch.tick(7 * S)
    watch.tick(8 * S)
    watch.store.close()
    watch, running = Watch(tmp_path), []
    for number in (2, 3):  # the order of nodes has changed
        about = identity(rank=number, world_size=4, started_ns=DAY, **process(DAY))
        ring = RingWriter(watch.rings / f"job.r0.{number}.later.ring", about, 64)
        ring.name(group_entry(0, everyone))
        ring.write(*operation(start_ns=DAY + S, end_ns=DAY + 2 * S))
        ring.counters[HEARTBEAT] = DAY + 60 * S
        running.append(ring)
        if number == 2:
            ring.begin(*operation(start_ns=0, end_ns=0, launch_ns=DAY + 3 * S, seq=1))
    watch.tick(DAY + 60 * S)
    watch.agent._now_ns = lambda: DAY + 61 * S
    (group,) = watch.agent.groups("job")
    assert (group.ranks, group.aligned) == ([2, 3], True)
    (verdict,) = verdicts(watch.agent.ranks("job"), [group])
    assert verdict.ranks == [3]


def test_steps_of_the_latest_run(tmp_path: Path) -> None:
    """An earlier run without steps leaves no advice to mark them in a run that does."""
    chance, since = random.Random(1), 1000 * S
    marks = [mark(number, (number + 1) * S // 10, optimizer=chance.randrange(4)) for number in range(300)]
    watch = Watch(tmp_path)
    first = write_ring(watch.rings, marks, rank=0, world_size=1)
    watch.tick(31 * S)
    (job,) = watch.agent.jobs()
    assert job.steps_unavailable is not None
    first.close(32 * S)
    end_rank(first)
    watch.tick(33 * S)
    second = RingWriter(
        watch.rings / "job.r0.0.b.ring", identity(world_size=1, started_ns=since, **process(since)), 1024
    )
    for number in range(60):
        second.write(*mark(number, since + (number + 1) * S))
    watch.tick(since + 61 * S)
    watch.tick(since + 62 * S)
    (job,) = watch.agent.jobs()
    steps = watch.agent.steps(since + EPOCH_NS, 1 << 62, "job", None, 99)
    assert (len(steps), job.steps_unavailable) == (59, None)


def test_failure_of_an_earlier_run(tmp_path: Path) -> None:
    """A rank that died in an earlier run, and the exit code of that run, say nothing about the run after it."""
    watch = Watch(tmp_path)
    dies = write_ring(watch.rings, [operation(start_ns=S, end_ns=2 * S)], rank=1)
    watch.tick(3 * S)
    end_rank(dies)
    watch.store.exit(Exit("job", 3, (EPOCH_NS + 4 * S) / S))
    watch.tick(5 * S)
    (job,) = watch.agent.jobs()
    assert (job.failed, job.exit_code) == (True, 3)
    assert "rank 1 died" in job.ending
    about = identity(world_size=1, started_ns=DAY, **process(DAY))
    ends = RingWriter(watch.rings / "job.r0.0.later.ring", about, 64)
    ends.write(*operation(start_ns=DAY + S, end_ns=DAY + 2 * S))
    watch.tick(DAY + 3 * S)
    ends.close(DAY + 4 * S)
    end_rank(ends)
    watch.tick(DAY + 5 * S)
    (job,) = watch.agent.jobs()
    assert (job.state, job.failed, job.exit_code, job.ending) == ("ended", False, None, "")


def test_failure_of_an_earlier_part(tmp_path: Path) -> None:
    """A rank that died in an earlier part of a script, which is one run, says nothing about the part after it, which has fewer ranks."""
    watch, script = Watch(tmp_path), dict[str, Any](run="script")
    dies = write_ring(watch.rings, [operation(start_ns=S, end_ns=2 * S)], rank=1, **script)
    watch.tick(3 * S)
    end_rank(dies)
    watch.tick(5 * S)
    (job,) = watch.agent.jobs()
    assert (job.failed, job.ending.split(" at ")[0]) == (True, "rank 1 died (no clean end)")
    about = identity(world_size=1, started_ns=DAY, **process(DAY), **script)
    ends = RingWriter(watch.rings / "job.r0.0.later.ring", about, 64)
    watch.tick(DAY + 3 * S)
    ends.close(DAY + 4 * S)
    end_rank(ends)
    watch.tick(DAY + 5 * S)
    (job,) = watch.agent.jobs()
    assert (job.ranks, job.state, job.failed, job.ending) == ([0, 1], "ended", False, "")
