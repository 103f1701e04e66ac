"""Trainers whose wall clock is wrong by an hour to ten years: order and age are by arrival and the agent's own clock."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from commwatch.wire.ring import HEARTBEAT
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.analysis.time_buckets import lengths
from commwatch_agent.history.history import History
from commwatch_agent.history.rows import COARSE_NS, COARSEN_AFTER_NS
from commwatch_agent.model.cells import SLOT_NS, Cell, CellKey, StepRecord
from commwatch_agent.report.charts import figures, gather
from commwatch_agent.report.report import build
from commwatch_agent.report.report_text import text
from commwatch_agent.report.timeline_source import Source
from tests.helpers import EPOCH_NS, MS, Trainer, Watch, end_rank, group_entry, identity, mark, operation, write_ring

S = 1000 * MS
HOUR = 3600 * S
DAY = 24 * HOUR
YEARS = 3652 * DAY
#: By how much the clock of a trainer is wrong.
WRONG = pytest.mark.parametrize(
    "ahead_ns", [YEARS, -YEARS, 2 * DAY, -2 * DAY, HOUR, -HOUR], ids=lambda ns: f"{ns / HOUR:+g}h"
)
ALWAYS = (0, 1 << 62)


class Node:
    """An agent, and trainers that take a step each ten seconds."""

    def __init__(self, directory: Path, **jobs: dict[str, Any]) -> None:
        self.watch, self.at_ns = Watch(directory), 0
        self.trainers = {
            job: Trainer(self.watch.rings / f"{job}.ring", identity(job, 0, 2, **about)) for job, about in jobs.items()
        }
        for trainer in self.trainers.values():
            trainer.call("name", [(group_entry(),)])
        self.steps = 0

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        for trainer in self.trainers.values():
            trainer.kill()
        self.watch.store.close()

    def take(self, steps: int, wall_ahead_ns: int = 0, operations: int = 3) -> None:
        """Take steps; the wall clock of the agent may be wrong, too."""
        for _ in range(steps):
            begin = self.at_ns + 2 * S
            made = [
                operation(start_ns=begin + n * MS, end_ns=begin + (n + 1) * MS, seq=self.steps * operations + n, size=n)
                for n in range(operations)
            ]
            for trainer in self.trainers.values():
                trainer.write([*made, mark(self.steps, begin + S, began_ns=begin)])
            self.steps += 1
            self.at_ns += 10 * S
            self.watch.intake.tick(self.at_ns, EPOCH_NS + self.at_ns + wall_ahead_ns)

    def tidy(self, raw_bytes: int = 1 << 40, summary_bytes: int = 1 << 40, keep_ns: int = DAY) -> None:
        """Apply the retention as the agent does."""
        store = self.watch.store
        assert sum(1 for _ in store.tidy(store.arrived_ns, raw_bytes, summary_bytes, keep_ns)) < 1000
        assert store.trouble is None

    def rows(self, table: str) -> dict[str, int]:
        """Rows by job."""
        count = f"SELECT job, COUNT(*) FROM {table} t JOIN ring ON ring.id = t.ring GROUP BY job"
        with closing(sqlite3.connect(self.watch.path)) as db:
            return dict(db.execute(count))


def assert_sane(node: Node, job: str, since_ns: int = 0) -> None:
    """All times that are shown of a job lie in the time of the test."""
    agent, until_s = node.watch.agent, (EPOCH_NS + node.at_ns) / 1e9
    since_s = (EPOCH_NS + since_ns) / 1e9
    # Another process, which counts the latest records again.
    assert (
        QueryService(node.watch.path).summary(*ALWAYS, ["op"], {"job_id": job})[0]
        == agent.summary(*ALWAYS, ["op"], {"job_id": job})[0]
    )
    (view,) = (each for each in agent.jobs() if each.job_id == job)
    assert since_s - 10 <= view.started_at <= view.last_seen_at <= until_s + 10
    (begin, end), rows = agent.summary(*ALWAYS, ["op"], {"job_id": job})
    assert begin is not None
    assert end is not None
    assert since_s - 300 <= begin <= end <= until_s + 300
    assert sum(row.count for row in rows) > 0
    steps = agent.steps(*ALWAYS, job, None, 100_000)
    assert steps
    assert all(since_s <= step.start_at <= step.end_at <= until_s for step in steps)
    assert agent.latest_steps(0, job, 1)[0] == steps[:1]
    of = lengths(EPOCH_NS + since_ns, EPOCH_NS + node.at_ns, 0, COARSE_NS)
    slots = agent.slots(*ALWAYS, job, of)
    assert all(since_s - 86_400 <= slot.at_ns / 1e9 <= until_s for slot in slots)
    report = build(agent, job, node.watch.path, "", [])
    assert report is not None
    assert "2023-11-1" in text(report)
    assert not {str(year) for year in (2013, 2033)} & set(text(report).replace("-", " ").split())


@WRONG
def test_ring_of_this_boot(tmp_path: Path, ahead_ns: int) -> None:
    """A trainer whose clock was wrong when it began is recorded by the agent's clock; neither it nor another job loses anything by it."""
    with Node(tmp_path, right={}, wrong={"wall_offset_ns": EPOCH_NS + ahead_ns}) as node:
        node.take(30)
        node.tidy()
        (row,) = (row for row in node.watch.ring_rows() if row.job == "wrong")
        assert (row.wall_offset_ns, row.started_ns) == (EPOCH_NS, EPOCH_NS)
        assert row.identity["wall_offset_ns"] == EPOCH_NS + ahead_ns
        (totals,) = node.watch.aggregate.jobs["wrong"].rank_totals.values()
        assert totals.offset_ns == EPOCH_NS
        for job in ("right", "wrong"):
            assert_sane(node, job)
        assert node.rows("step") == {"right": 29, "wrong": 29}
        everything = node.rows("chunk")
        assert everything["right"] == everything["wrong"] > 0
        # Each keeps a half of what there is room for, its newest.
        with closing(sqlite3.connect(node.watch.path)) as db:
            ((size,),) = db.execute("SELECT SUM(size) FROM chunk")
        node.tidy(raw_bytes=size // 2)
        left = node.rows("chunk")
        assert abs(left["right"] - left["wrong"]) <= 2


@WRONG
def test_ring_of_another_boot(tmp_path: Path, ahead_ns: int) -> None:
    """Of a trainer of an earlier boot, nothing is in the future; its records are kept for as long as those of others."""
    watch, now_ns = Watch(tmp_path), 100 * S
    made = [operation(start_ns=at * S, end_ns=at * S + MS, seq=at) for at in range(1, 60)]
    steps = [mark(at, at * S) for at in range(1, 60)]
    who: dict[str, Any] = {"boot_id": "an earlier one", "wall_offset_ns": EPOCH_NS + ahead_ns, "started_ns": S // 2}
    writer = write_ring(watch.rings, [*made, *steps], job="before", world_size=1, **who)
    writer.counters[HEARTBEAT] = 60 * S
    end_rank(writer)
    end_rank(write_ring(watch.rings, made, job="other", world_size=1))
    for _ in range(2):
        watch.tick(now_ns)
    before, _ = sorted(watch.ring_rows(), key=lambda row: row.job)
    assert before.wall_offset_ns == (EPOCH_NS + now_ns - 60 * S if ahead_ns > 0 else EPOCH_NS + ahead_ns)
    assert before.started_ns <= before.seen_ns <= EPOCH_NS + now_ns
    ((_, end), _) = watch.agent.summary(*ALWAYS, [], {"job_id": "before"})
    assert end is not None
    assert end <= (EPOCH_NS + now_ns) / 1e9 + 10
    for at_ns, left in ((DAY - HOUR, True), (DAY + HOUR, False)):
        watch.store.arrive(now_ns + at_ns, EPOCH_NS + now_ns + at_ns)
        list(watch.store.tidy(watch.store.arrived_ns, 1 << 40, 1 << 40, DAY))
        with History(watch.path) as history:
            assert len(list(history.chunks(*ALWAYS))) == (2 if left else 0)
            assert {ring.job for ring in history.rings()} == ({"before", "other"} if left else set())
    watch.store.close()


@WRONG
def test_stored_ring_keeps_its_place(tmp_path: Path, ahead_ns: int) -> None:
    """The records of a ring that is in the history lie where its first ones do, also after a restart of the agent with another clock."""
    with Node(tmp_path, job={}) as node:
        node.take(10)
        again = Watch(tmp_path)
        again.intake.tick(node.at_ns + S, EPOCH_NS + node.at_ns + S + ahead_ns)
        (totals,) = again.aggregate.jobs["job"].rank_totals.values()
        assert totals.offset_ns == EPOCH_NS
        assert again.ring_rows()[0].wall_offset_ns == EPOCH_NS
        again.store.close()


@WRONG
def test_clock_of_the_agent_jumps(tmp_path: Path, ahead_ns: int) -> None:
    """The wall clock of the agent is set while it runs, and back: what came before is neither deleted nor older than it is."""
    with Node(tmp_path, job={}) as node:
        node.take(20)
        before = node.rows("step")
        arrivals = [node.watch.store.arrived_ns]
        for ahead in (ahead_ns, 0, ahead_ns, -ahead_ns, 0):
            node.take(2, ahead)
            arrivals.append(node.watch.store.arrived_ns)
            node.tidy(keep_ns=HOUR)
        assert arrivals == [EPOCH_NS + (200 + 20 * n) * S for n in range(6)]
        assert node.rows("step")["job"] == before["job"] + 10
        assert node.watch.stored() == 4 * 30
        assert_sane(node, "job")


@WRONG
def test_agent_starts_before_its_clock_is_set(tmp_path: Path, ahead_ns: int) -> None:
    """An agent that starts while its clock is wrong deletes nothing early, and later arrivals are later, also after the next start."""
    with Node(tmp_path, job={}) as node:
        node.take(20)
        node.watch.store.close()
        arrived_ns = node.watch.store.arrived_ns
        for ahead in (ahead_ns, 0):
            node.watch = Watch(tmp_path)
            node.take(2, ahead)
            node.tidy(keep_ns=HOUR)
            assert node.watch.store.arrived_ns >= arrived_ns
            arrived_ns = node.watch.store.arrived_ns
            if ahead:
                node.watch.store.close()
        assert node.rows("step")["job"] == 23
        assert arrived_ns == EPOCH_NS + node.at_ns


@pytest.mark.parametrize("ahead_ns", [YEARS, 2 * DAY, HOUR])
def test_far_slots_are_merged(tmp_path: Path, ahead_ns: int) -> None:
    """Roll-ups of slots far ahead or behind are merged an hour after they came, once; what comes meanwhile is not."""
    watch = Watch(tmp_path)
    watch.tick()
    rings = [watch.store.ring(name, identity(name), EPOCH_NS) for name in ("ahead", "behind", "right")]
    offsets = (ahead_ns, -ahead_ns, 0)
    base = EPOCH_NS - EPOCH_NS % COARSE_NS
    cell = Cell()
    cell.count = 1
    for at in range(30):
        watch.store.arrive(at * SLOT_NS, base + at * SLOT_NS)
        for ring, offset in zip(rings, offsets, strict=True):
            watch.store.rollups(ring.id, [(base + offset + at * SLOT_NS, CellKey(0, 1, 4), cell)], at)
    assert watch.store.commit()
    for now_ns, merged in ((COARSEN_AFTER_NS // 2, 0), (COARSEN_AFTER_NS + 2 * COARSE_NS, 90)):
        assert sum(1 for _ in watch.store.tidy(base + now_ns, 1 << 40, 1 << 40, DAY)) < 100
        with History(watch.path) as history:
            rows = list(history.rollups(*ALWAYS, [ring.id for ring in rings]))
        assert sum(row.cell.count for row in rows) == 90
        assert sum(row.cell.count for row in rows if row.length_ns == COARSE_NS) == merged
    with closing(sqlite3.connect(watch.path)) as db:
        latest = {arrived for (arrived,) in db.execute("SELECT arrived_ns FROM rollup")}
    assert max(latest) == watch.store.arrived_ns
    assert len(rows) == 3
    watch.store.close()


def test_timeline(tmp_path: Path) -> None:
    """The timeline of a job whose clock was ten years ahead begins and ends with the job."""
    with Node(tmp_path, job={"wall_offset_ns": EPOCH_NS + YEARS}) as node:
        node.take(5)
        with History(node.watch.path) as history:
            source = Source(history, "job")
            assert source.origin_ns == EPOCH_NS
            assert EPOCH_NS < source.until_ns < EPOCH_NS + node.at_ns
            ends = [one.end_ns for _, one in source.operations(0, source.until_ns)]
        assert len(ends) == 15
        assert all(EPOCH_NS < end <= EPOCH_NS + node.at_ns for end in ends)


@WRONG
def test_latest_minutes_after_a_jump(tmp_path: Path, ahead_ns: int) -> None:
    """The last minutes of a job are found where its times are, when the clock of the agent was set after the job began."""
    with Node(tmp_path, job={}) as node:
        node.take(3)
        node.take(60, ahead_ns)
        agent, wall_s = node.watch.agent, (EPOCH_NS + node.at_ns + ahead_ns) / 1e9
        now_s = agent.now_s("job", wall_s)
        assert now_s == pytest.approx((EPOCH_NS + node.at_ns) / 1e9, abs=0.001)
        since_ns, until_ns = int((now_s - 120) * 1e9), int(now_s * 1e9)
        assert len(agent.steps(since_ns, until_ns, "job", None, 100)) == 12
        assert agent.now_s(None, wall_s) == agent.now_s("none", wall_s) == wall_s
        (steps, _), (_, rows) = agent.latest_steps(0, "job", 1), agent.summary(*ALWAYS, [], {"job_id": "job"})
        assert steps[0].seq == node.steps - 1
        assert rows[0].count == 3 * node.steps


@pytest.mark.parametrize("boot", [{}, {"boot_id": "an earlier one"}])
def test_begin_in_the_future(tmp_path: Path, boot: dict[str, Any]) -> None:
    """A ring that claims to have begun in years, on a monotonic clock of whatever boot, began now."""
    watch = Watch(tmp_path)
    end_rank(write_ring(watch.rings, [operation(start_ns=0, end_ns=9)], world_size=1, started_ns=YEARS, **boot))
    watch.tick(S)
    (row,) = watch.ring_rows()
    assert row.started_ns <= EPOCH_NS + 11 * S
    assert row.wall_offset_ns + 9 <= EPOCH_NS + 11 * S
    watch.store.close()


def test_times_ten_years_apart(tmp_path: Path) -> None:
    """Records of a ring that are ten years apart, with a long step between them, take no longer to show than others."""
    watch = Watch(tmp_path)
    made = [operation(start_ns=at * S, end_ns=at * S + MS, seq=at) for at in range(1, 60)]
    made += [mark(at, at * S) for at in range(1, 60)]
    made += [mark(60, YEARS), operation(start_ns=YEARS, end_ns=YEARS + MS, seq=60), mark(61, YEARS + 2 * S)]
    end_rank(write_ring(watch.rings, made, world_size=1, boot_id="an earlier one"))
    for _ in range(2):
        watch.tick(100 * S)
    row, cell = watch.ring_rows()[0], Cell()
    cell.count, cell.bus_bytes = 1, 1.0
    watch.store.steps(row, [StepRecord(99, 0, YEARS, 0, None, long=True)], None)
    watch.store.rollups(row.id, [(EPOCH_NS + YEARS // 2 // SLOT_NS * SLOT_NS, CellKey(0, 1, 4), cell)], row.next_n)
    assert watch.store.commit()
    assert len(watch.agent.slots(*ALWAYS, "job")) < 20
    with History(watch.path) as history:
        waits = history.wait_sums(*ALWAYS, history.rings("job"), SLOT_NS)
    assert len(waits) < 20
    assert all(sums.broken for sums in waits.values())
    report = build(watch.agent, "job", watch.path, "", [])
    assert report is not None
    assert text(report)
    assert figures(gather(watch.agent, "job")).count("<text") < 100
    watch.store.close()
