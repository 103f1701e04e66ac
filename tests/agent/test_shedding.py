"""A probe above its budget counts together what it does not record: nothing is lost in the sums, and nothing is made up."""

from __future__ import annotations

import struct
import time
from pathlib import Path

from commwatch.wire import events as ev
from commwatch.wire import ring, splits
from commwatch.wire.modes import COUNTERS, FULL, SAMPLING
from commwatch.wire.ring_reader import RingReader
from commwatch_agent.analysis import live_ranks
from commwatch_agent.analysis.rank_state import shedding
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.jobs import Job, JobTable
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.model.shares import Room
from tests.helpers import (
    MS,
    RunningAgent,
    Trainer,
    agent,
    group_entry,
    identity,
    judged_now,
    mark,
    operation,
    packed,
    wait_for,
)

S = 1000 * MS


def together(
    number: int, size: int, op: str = "all_reduce", *, seq: int = 0, launch_ns: int = 0, at_ns: int = S
) -> tuple[int, ...]:
    """A record of so many operations with ``size`` bytes in all."""
    return operation(
        op, start_ns=launch_ns, end_ns=at_ns, seq=seq, size=size, waited_us=number, flags=ev.UNTIMED, timing=ev.COUNTED
    )


def book(*records: tuple[int, ...], mode: int = SAMPLING, rank: int = 0) -> RankTotals:
    found = RankTotals(identity(rank=rank), {})
    found.learn([group_entry()])
    found.mode, found.heartbeat_ns = mode, 20 * S
    ingest_records(found, packed(*records))
    return found


def test_counts_are_exact() -> None:
    """Operations that come together count as many, with all their bytes, under their op and size class; none has a duration."""
    cells = dict(book(together(1000, 1000 * 4096), together(3, 3 * 2048 + 2), together(7, 0, "barrier")).cells())
    assert {(key.op, key.size_log2): (cell.count, cell.untimed, cell.bytes) for key, cell in cells.items()} == {
        (ev.OP_CODE["all_reduce"], 12): (1003, 1003, 1000 * 4096 + 3 * 2048 + 2),
        (ev.OP_CODE["barrier"], -1): (7, 7, 0),
    }
    assert not any(cell.duration_ns or cell.bus_bytes or sum(cell.durations) for cell in cells.values())


def test_damaged_count() -> None:
    """A record of no operations, or of more bytes than there are numbers, breaks nothing."""
    cells = dict(book(together(0, 4096), together(1, ev.MAX_PLAUSIBLE - 1)).cells())
    assert sum(cell.count for cell in cells.values()) == 2


def test_steps() -> None:
    """Of a step with operations that were only counted neither share is known, nor how long it waited for messages; of the others both are."""
    records = []
    for n in range(1, 9):
        end = n * 100 * MS
        records.append(operation(start_ns=end - 50 * MS, end_ns=end - 20 * MS, seq=n))
        wait = operation("recv", start_ns=end - 20 * MS, end_ns=end - 10 * MS, peer=1, waited_us=10_000)
        done = mark(n, end, exposed_ns=MS)
        records += [wait, done if n < 6 else (*done[:11], ev.UNTIMED, *done[12:])]
    found = book(*records)
    found.finish()
    known = [(step.comm_ns, step.exposed_ns, step.p2p_wait_ns) for step in found.steps.take()]
    assert known == [(40 * MS, MS, 10 * MS)] * 4 + [(None, None, None)] * 3
    assert found.steps.totals.comm_ns is None
    assert found.steps.totals.p2p_wait_share() == 0.1


def test_messages_to_nobody() -> None:
    """Sends that were only counted have no peer: they are in the sums, and what leaves the node is not known of them."""
    found = book(together(10, 4000, "send"))
    (((group, op, peer), messages),) = found.messages.items()
    assert (group, op, peer, messages.count, messages.bytes) == (0, ev.OP_CODE["send"], -1, 10, 4000)


def job_of(*books: RankTotals) -> Job:
    job = Job("job", Room(1 << 30).account())
    job.rank_totals = {str(n): found for n, found in enumerate(books)}
    return job


def test_hang_of_what_is_only_counted() -> None:
    """Who has not come to a collective that others have launched is named after ten seconds, though none is recorded by itself."""
    there, late = book(together(50, 0, seq=49, launch_ns=S)), book(together(49, 0, seq=48, launch_ns=S), rank=1)
    (verdict,) = judged_now([job_of(there, late)], 20 * S)
    assert (verdict.kind, verdict.cause, verdict.ranks, verdict.waiting) == ("stalled", "not_joined", [1], [0])
    assert judged_now([job_of(there, late)], 9 * S) == []
    assert judged_now([job_of(there, book(together(50, 0, seq=49, launch_ns=S), rank=1))], 20 * S) == []


def test_job_that_is_over() -> None:
    """If no rank that could wait is running, no rank is blamed any more; if one is running, the dead rank is named."""
    there, late = book(together(50, 0, seq=49, launch_ns=S)), book(together(49, 0, seq=48, launch_ns=S), rank=1)
    late.alive = False
    (verdict,) = judged_now([job_of(there, late)], 20 * S)
    assert (verdict.cause, verdict.ranks) == ("dead", [1])
    there.alive = False
    assert judged_now([job_of(there, late)], 20 * S) == []


def test_hang_after_a_sampled_one() -> None:
    """A rank whose latest was recorded by itself is still one that may have launched more; in full mode what has ended says all."""
    last = operation(start_ns=2 * S, end_ns=3 * S, seq=48)
    there = book(together(50, 0, seq=49, launch_ns=2 * S, at_ns=3 * S))
    (verdict,) = judged_now([job_of(there, book(together(9, 0, seq=9), last, rank=1))], 20 * S)
    assert verdict.ranks == [1]
    full = book(together(9, 0, seq=9), last, mode=FULL, rank=1)
    assert live_ranks.rank("job", full, 20 * S).launched_s == {}


def test_sample_and_count_come_in_any_order() -> None:
    """A count that comes after a later operation does not take the numbers of a group back."""
    found = book(
        operation(start_ns=5 * S, end_ns=6 * S, seq=160), together(100, 0, seq=120, launch_ns=4 * S, at_ns=7 * S)
    )
    assert (found.last_seq, found.launched_ns) == ({0: 160}, {0: 5 * S})


def test_words() -> None:
    """Ranks that do not record all operations are named; ranks that record all of them, or are unknown, are not."""
    assert shedding([(0, "full"), (1, None)]) is None
    said = shedding([(0, "full"), (1, "sampling"), (2, "counters"), (3, "counters")])
    assert said is not None
    assert said.startswith(
        "recorded in part: one in sixteen operations of rank 1, no operation of ranks 2-3; the rest is only counted"
    )


COUNTED = 'commwatch_collectives_total{group="default_pg",job_id="job",op="all_reduce",rank="0"}'


def told_alone(running: RunningAgent) -> None:
    """One operation is recorded by itself, and all are in the sums."""
    wait_for(lambda: running.get("/api/v1/ops?job=job")["operations"], "the operation")
    assert [op["seq"] for op in running.get("/api/v1/ops?job=job")["operations"]] == [0]
    (row,) = running.get("/api/v1/summary?job=job&by=op")["rows"]
    assert (row["count"], row["untimed"], row["bytes"]) == (501, 500, 2_048_000 + 4096)


def test_where_operations_are_told_one_by_one(tmp_path: Path) -> None:
    """Operations that are only counted are exact in sums and metrics, also after a restart of the agent; they are not listed as operations."""
    run, state = tmp_path / "run", tmp_path / "state"
    at = time.monotonic_ns()
    about = identity(wall_offset_ns=time.time_ns() - at, budget=0.005)
    with Trainer(run / "rings" / "a.ring", about) as rank:
        rank.call("name", [(group_entry(),)])
        rank.write(
            [
                operation(start_ns=at, end_ns=at + MS, seq=0),
                together(500, 2_048_000, seq=500, launch_ns=at, at_ns=at + MS),
            ]
        )
        with open(rank.path, "r+b") as file:
            file.seek(ring.COUNTERS_AT + 8 * ring.MODE)
            file.write(struct.pack("<QQ", COUNTERS, at))
        with agent(run, "--state", str(state)) as running:
            wait_for(lambda: running.get("/api/v1/jobs") and running.samples().get(COUNTED) == 501, "the counts")
            samples = running.samples()
            assert samples['commwatch_probe_recorded_ratio{job_id="job",rank="0"}'] == 0
            assert not any(name.startswith("commwatch_collective_in_flight_seconds") for name in samples)
            (view,) = running.get("/api/v1/ranks?job=job")
            assert (view["probe_mode"], view["probe_budget"], view["probe_mode_s"] >= 0) == ("counters", 0.005, True)
            told_alone(running)
        with agent(run, "--state", str(state)) as running:
            told_alone(running)


def test_ring_of_before(tmp_path: Path) -> None:
    """A ring of the format without such records is read as ever."""
    path = tmp_path / "a.ring"
    writer = ring.RingWriter(path, identity())
    writer.write(*operation(start_ns=0, end_ns=9))
    with path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", 1))
        file.truncate(path.stat().st_size - splits.AREA_BYTES)
    assert RingReader(path).drain().read == 1
    assert JobTable().open("a", RingReader(path).identity).mode == FULL
