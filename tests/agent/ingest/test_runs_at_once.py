"""Jobs of one name on one node: each run is seen whole, under a name of its own, also after restarts of ranks and agents."""

from __future__ import annotations

import itertools
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from commwatch.wire.ring import HEARTBEAT, RingWriter
from commwatch_agent.history.history import History
from commwatch_agent.history.job_exit import Exit
from commwatch_agent.history.rows import rings
from commwatch_agent.model.views import JobView
from commwatch_agent.report.report import build
from commwatch_agent.report.report_text import text
from tests.helpers import EPOCH_NS, Watch, end_rank, group_entry, identity, judged_now, mark, operation

S = 10**9
_numbers = itertools.count(100)


class Rank:
    """A rank of a job that two launchers have started under one name."""

    def __init__(self, rings: Path, launcher: str, rank: int, began_s: int = 1, **more: Any) -> None:
        pid = next(_numbers)
        about = {"launcher": launcher, "rendezvous": f"127.0.0.1:{launcher.partition(':')[0]}", "pid": pid}
        about |= {"started_ticks": str(began_s * 100), "pid_namespace": 1, "rank": rank, "started_ns": began_s * S}
        rings.mkdir(parents=True, exist_ok=True)
        self.rank = rank
        self.ring = RingWriter(
            rings / f"job.r{more.get('restart', 0)}.{rank}.{pid}.ring", identity(**{**about, **more}), 256
        )
        self.ring.name(group_entry())

    def work(self, from_s: int, number: int, size: int = 4096) -> None:
        """Record collectives and steps of a second each."""
        for n in range(from_s, from_s + number):
            self.ring.write(*operation(start_ns=n * S, end_ns=n * S + S // 2, seq=n, size=size))
            self.ring.write(*mark(n, (n + 1) * S, optimizer=-1))
        self.ring.counters[HEARTBEAT] = (from_s + number) * S

    def end(self, at_s: int) -> None:
        """Its process ends well."""
        self.ring.close(at_s * S)
        end_rank(self.ring)


A, B, C = "50:1", "60:1", "70:1"


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    """An agent."""
    return Watch(tmp_path)


def pair(watch: Watch, launcher: str, began_s: int = 1, **more: Any) -> list[Rank]:
    """Both ranks of a run."""
    return [Rank(watch.rings, launcher, rank, began_s, **more) for rank in (0, 1)]


def states(watch: Watch) -> dict[str, tuple[str, list[int], int]]:
    """State, ranks and records of each job."""
    return {job.job_id: (job.state, job.ranks, job.records) for job in watch.agent.jobs()}


def job_of(watch: Watch, name: str) -> JobView:
    """A job by name."""
    found = watch.agent.job(name)
    assert found is not None
    return found


@pytest.mark.parametrize("together", [True, False])
def test_two_at_once(watch: Watch, together: bool) -> None:
    """Ranks, sums, steps, groups and the report of each run are its own, whether the agent finds them at once or one by one."""
    ranks = [*pair(watch, A), *pair(watch, B, 2)]
    for at, each in enumerate(ranks):
        each.work(3, 5 if at < 2 else 7, 1024 if at < 2 else 4096)
        if not together:
            watch.tick(10 * S)
    watch.tick(10 * S)
    watch.tick(11 * S)
    assert states(watch) == {"job": ("running", [0, 1], 20), "job#2": ("running", [0, 1], 28)}
    for name, operations, size in (("job", 10, 1024), ("job#2", 14, 4096)):
        _, rows = watch.agent.summary(0, 1 << 62, ["op"], {"job_id": name})
        assert [(row.count, row.bytes) for row in rows] == [(operations, operations * size)]
        assert [view.rank for view in watch.agent.ranks(name)] == [0, 1]
        assert len(watch.agent.steps(0, 1 << 62, name, None, 99)) == operations - 2
        assert [group.ranks for group in watch.agent.groups(name)] == [[0, 1]]
        report = build(watch.agent, name, watch.path, "again")
        assert report is not None
        assert [row.count for row in report.operations] == [operations]
        assert name in text(report)
        found = watch.agent.collective("default_pg-0", 4, name)
        assert found is not None
        assert [(each.job_id, each.rank, each.size_bytes) for each in found[0]] == [(name, 0, size), (name, 1, size)]
    assert len({job.run for job in watch.agent.jobs()}) == 2
    latest = watch.agent.collective("default_pg-0", 4)
    assert latest is not None
    assert len({each.job_id for each in latest[0]}) == 1


def test_hang_in_one(watch: Watch) -> None:
    """A hang is named in the run that hangs, which is not the one that began last; the other one is healthy."""
    first, second = pair(watch, A), pair(watch, B, 2)
    for each in (*first, *second):
        each.work(3, 5)
    first[0].ring.begin(*operation(start_ns=0, end_ns=0, launch_ns=8 * S, seq=8))
    for each in (*first, *second):
        each.ring.counters[HEARTBEAT] = 60 * S
    watch.tick(60 * S)
    found = [(verdict.job_id, verdict.ranks) for verdict in judged_now(watch.aggregate.jobs.values(), 60 * S)]
    assert [each for each in found if each[1] == [1]] == [("job", [1])]
    assert {name for name, _ in found} == {"job"}


def test_agent_restarts(watch: Watch, tmp_path: Path) -> None:
    """An agent that starts anew, and one beside it on the same history, go on with the names, and give no name twice."""
    ranks = [*pair(watch, A), *pair(watch, B, 2)]
    for each in ranks:
        each.work(3, 5)
    watch.tick(10 * S)
    before = states(watch)
    runs = {job.job_id: job.run for job in watch.agent.jobs()}
    watch.store.close()
    again = Watch(tmp_path)
    again.tick(11 * S)
    assert (states(again), {job.job_id: job.run for job in again.agent.jobs()}) == (before, runs)
    other = Watch(tmp_path)
    other.intake._directory = other.rings = tmp_path / "other"
    other.intake._finder.__init__(other.rings, 100)  # type: ignore[misc]
    Rank(other.rings, C, 0, 3).work(4, 1)
    other.tick(12 * S)
    assert states(other).keys() == {"job", "job#2", "job#3"}


def test_restarts(watch: Watch) -> None:
    """A restart of the ranks belongs to its run, beside another of that name, also if that restarts, too."""
    first, second = pair(watch, A), pair(watch, B, 2)
    for each in (*first, *second):
        each.work(3, 5)
    watch.tick(10 * S)
    for restart, began_s in ((1, 20), (2, 30)):
        for old in (first, second):
            for each in old:
                each.end(began_s - 2)
        watch.tick((began_s - 1) * S)
        second, first = pair(watch, B, began_s, restart=restart), pair(watch, A, began_s, restart=restart)
        for each in (*first, *second):
            each.work(began_s + 1, 3)
        watch.tick((began_s + 5) * S)
    assert states(watch) == {"job": ("running", [0, 1], 44), "job#2": ("running", [0, 1], 44)}
    assert {job.restarts for job in watch.agent.jobs()} == {2}
    assert {view.restart for view in watch.agent.ranks(None)} == {2}


def test_one_after_the_other(watch: Watch) -> None:
    """A run that begins after another one of that name has its name; nothing of the earlier one is in its answers, which keeps its own."""
    earlier = pair(watch, A, world_size=2)
    for each in earlier:
        each.work(3, 50)
    watch.tick(60 * S)
    watch.store.exit(Exit("job", 3, (EPOCH_NS + 60 * S) / S))
    for each in earlier:
        each.end(60)
    watch.tick(61 * S)
    assert (job_of(watch, "job").exit_code, job_of(watch, "job").records) == (3, 200)
    old = job_of(watch, "job").run
    later = pair(watch, B, 100)
    for each in later:
        each.work(101, 5)
    watch.tick(110 * S)
    watch.tick(111 * S)
    job = job_of(watch, "job")
    assert (job.state, job.records, job.exit_code) == ("running", 20, None)
    assert job.started_at == pytest.approx((EPOCH_NS + 100 * S) / S)
    assert [row.count for row in watch.agent.summary(0, 1 << 62, ["op"], {"job_id": "job"})[1]] == [10]
    assert {step.seq for step in watch.agent.steps(0, 1 << 62, "job", None, 999)} == {102, 103, 104, 105}
    assert watch.agent.address(job.run) == "job"
    assert watch.agent.address(old) == f"job@{old}"
    past = job_of(watch, f"job@{old}")
    assert (past.state, past.records, past.exit_code) == ("ended", 200, 3)
    assert {view.job_id for view in watch.agent.ranks(f"job@{old}")} == {f"job@{old}"}
    report = build(watch.agent, f"job@{old}", watch.path, "again")
    assert report is not None
    assert [row.count for row in report.operations] == [100]


def test_other_name(watch: Watch, tmp_path: Path) -> None:
    """A run gets the name that it has on other nodes, with all that is known of it, and keeps it; one that another run has is not given."""
    first, second = pair(watch, A), pair(watch, B, 2)
    for each in (*first, *second):
        each.work(3, 5)
    watch.tick(10 * S)
    for wanted, names in (({"job#2": "job#5", "no": "job#9"}, {"job", "job#5"}), ({"job": "job#5"}, {"job", "job#5"})):
        watch.intake._renames = partial(dict, wanted)
        watch.tick(11 * S)
        assert states(watch).keys() == watch.aggregate.jobs.keys() == names
    watch.intake._renames = dict
    second[0].work(12, 3)
    watch.tick(20 * S)
    assert states(watch) == {"job": ("running", [0, 1], 20), "job#5": ("running", [0, 1], 26)}
    for each in second:
        each.end(21)
    watch.tick(22 * S)
    for each in pair(watch, B, 30, restart=1):
        each.work(31, 1)
    watch.tick(40 * S)
    assert states(watch)["job#5"] == ("running", [0, 1], 30)
    watch.store.close()
    again = Watch(tmp_path)
    again.tick(41 * S)
    assert states(again) == states(watch)


def test_second_again(watch: Watch) -> None:
    """Once the second of two runs has ended, its name is free for the next one."""
    first, second = pair(watch, A), pair(watch, B, 2)
    for each in (*first, *second):
        each.work(3, 2)
    watch.tick(10 * S)
    for each in second:
        each.end(11)
    for each in first:
        each.ring.counters[HEARTBEAT] = 20 * S
    watch.tick(20 * S)
    for each in pair(watch, C, 25):
        each.work(26, 4)
    watch.tick(40 * S)
    assert states(watch) == {"job": ("running", [0, 1], 8), "job#2": ("running", [0, 1], 16)}


def test_found_late(watch: Watch) -> None:
    """An agent that starts after two runs have ended keeps them apart, whether they ran at the same time or not."""
    for launcher, began_s, number in ((A, 1, 5), (B, 3, 6), (C, 100, 7)):
        for each in pair(watch, launcher, began_s):
            each.work(began_s + 1, number)
            each.end(began_s + number + 2)
    watch.tick(200 * S)
    watch.tick(201 * S)
    assert states(watch) == {"job": ("ended", [0, 1], 28), "job#2": ("ended", [0, 1], 24)}
    with History(watch.path) as history:
        runs = {history.address(row.run) for row in rings(history._db, "1", ())}
    assert sorted(len(watch.agent.steps(0, 1 << 62, str(run), None, 99)) for run in runs) == [8, 10, 12]


def test_exit_codes(watch: Watch) -> None:
    """The exit code of `commwatch run` is that of the run that it has started, whichever ends first."""
    first, second = pair(watch, A, run="token-of-a"), pair(watch, B, 2, run="token-of-b")
    for each in (*first, *second):
        each.work(3, 5)
    watch.tick(10 * S)
    for each in (*first, *second):
        each.end(11)
    watch.store.exit(Exit("job", 7, (EPOCH_NS + 11 * S) / S, "token-of-b"))
    watch.store.exit(Exit("job", 0, (EPOCH_NS + 12 * S) / S, "token-of-a"))
    watch.tick(13 * S)
    assert {job.job_id: job.exit_code for job in watch.agent.jobs()} == {"job": 0, "job#2": 7}
    assert (watch.agent.watched("token-of-a"), watch.agent.watched("token-of-b")) == (["job"], ["job#2"])
    assert watch.agent.watched("token-of-none") == []


def test_users(watch: Watch) -> None:
    """Jobs of two users with one name and one launcher, such as a daemon, are two."""
    first, second = Rank(watch.rings, A, 0), Rank(watch.rings, A, 1)
    for each in (first, second):
        each.work(3, 5)
    os.chown(second.ring.path, 12345, -1)
    os.chown(second.ring.path.with_suffix(".names"), 12345, -1)
    watch.tick(10 * S)
    assert {name: ranks for name, (_, ranks, _) in states(watch).items()} == {"job": [0], "job#2": [1]}
