"""The hooks under load and in trouble: many threads, kills, forks, failures, and works of every kind, unchanged for the user."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from commwatch.wire import events as ev
from commwatch.wire import ring
from commwatch.wire.ring_reader import RingReader
from tests import prefork
from tests.e2e.torchjob import (
    JOBS,
    RankRecords,
    alone,
    alone_anew,
    built_for_torch,
    read_rings,
    results,
    run_job,
    said,
    torchrun,
)
from tests.helpers import BOTH_HOOKS, PATIENCE_S, clean_env, wait_for

pytestmark = pytest.mark.long


def seqs(records: list[ev.Record]) -> list[int]:
    """Their numbers, in order."""
    return sorted(record.seq for record in records)


def check_flood(records: list[ev.Record]) -> Counter[int]:
    """No number is missing within a group of ``flood.py``, nor is anything else in it; returns how many by size."""
    groups: dict[int, list[ev.Record]] = {}
    for record in records:
        if record.op != ev.OP_CODE["barrier"]:
            groups.setdefault(record.group, []).append(record)
    for mine in groups.values():
        assert [record.seq for record in mine] == list(range(mine[0].seq, mine[0].seq + len(mine)))
        assert {(r.op, r.size_bytes, r.flags) for r in mine} == {(ev.OP_CODE["all_reduce"], mine[0].size_bytes, 0)}
    return Counter({mine[0].size_bytes: len(mine) for mine in groups.values()})


# -- many at once


@BOTH_HOOKS
def test_eight_threads_on_eight_groups(hook: str, tmp_path: Path) -> None:
    """Eight threads on eight groups at once: each operation is recorded once, in its own group, with its own size."""
    rounds, world = 25, 2
    run_job(tmp_path, "crowd.py", str(rounds))
    for rank in read_rings(tmp_path):
        assert rank.lost == 0
        groups = {small: int(group["name"]) - 1 for small, group in rank.groups.items() if group["name"] != "0"}
        assert sorted(groups.values()) == list(range(8))
        for small, n in groups.items():
            mine = [record for record in rank.operations if record.group == small]
            p2p = [record for record in mine if rank.op(record) in ev.P2P]
            collectives = [record for record in mine if rank.op(record) not in ev.P2P]
            assert seqs(p2p) == list(range(rounds))
            assert seqs(collectives) == list(range(5 * rounds))
            assert {(rank.op(r), r.size_bytes) for r in mine} == {
                ("all_reduce", 4 * (n + 1)),
                ("reduce_scatter", 4 * (n + 1) * world),
                ("send" if rank.rank == 0 else "recv", 4 * (n + 1)),
            }
            assert {r.peer for r in p2p} == {1 - rank.rank}
            # Where the probe's thread has the GIL before a thread whose operation has ended, it sees the end first.
            ends = {(rank.op(r), ev.TIMING[r.timing]) for r in collectives if r.timing != ev.BY_POLL}
            assert ends == {("all_reduce", "future"), ("reduce_scatter", "wait")}
            assert all(r.launch_ns <= r.start_ns <= r.end_ns for r in mine)
            assert not any(r.flags & (ev.FAILED | ev.UNTIMED | ev.UNALIGNED) for r in mine)


@BOTH_HOOKS
def test_100_000_operations(hook: str, tmp_path: Path) -> None:
    """Of 100,000 operations by eight threads, read while they are written, none is lost or torn."""
    each, go = 12_500, tmp_path / "go"
    job = subprocess.Popen(
        prefork.command(JOBS / "flood.py", str(each), str(go)),
        env=clean_env(COMMWATCH="1", COMMWATCH_DIR=str(tmp_path), COMMWATCH_SLOTS="131072", RANK="0"),
    )
    (path,) = wait_for(lambda: list(tmp_path.glob("rings/*.ring")), "the ring")
    reader = RingReader(path)
    found, drains, lost, over = [], 0, 0, False
    go.touch()
    while not over:
        over = job.poll() is not None
        drained = reader.drain(final=over)
        found += [ev.Record._make(fields) for fields in ev.RECORD.iter_unpack(drained.records)]
        drains, lost = drains + (drained.read > 0), lost + drained.lost
        time.sleep(0.02)  # a reader gives a record up after so many drains
    assert (job.returncode, lost, len(found)) == (0, 0, 8 * each + 1)
    assert drains > 3
    assert [record.stamp for record in found] == list(range(1, 8 * each + 2))
    sizes = check_flood(found)
    assert sizes == {4 * n: each for n in range(1, 9)}
    assert (reader.counter(ring.OPS_STARTED), reader.in_flight(), reader.alive()) == (8 * each + 1, [], False)
    reader.close()


def test_in_and_out_under_load(native: Path, tmp_path: Path) -> None:
    """Installed and removed 500 times while threads communicate: nothing crashes, nothing is kept, each ring is whole."""
    times = 500
    env = {"COMMWATCH": "0", "COMMWATCH_HOOK": "native", "COMMWATCH_SLOTS": "256"}
    ((before, after),) = said(alone(tmp_path, "reinstall.py", times, **env))
    # Of the last ones something may still be in flight.
    assert after["fd"] <= before["fd"] + 8
    assert after["task"] <= before["task"] + 2
    assert after["rings"] <= 8
    assert after["kib"] <= before["kib"] + 16 * 1024
    ranks = read_rings(tmp_path)
    assert len(ranks) == times
    whole = [rank for rank in ranks if not rank.lost]  # not overwritten
    assert len(whole) > times / 4
    for rank in whole:
        assert [record.size_bytes for record in rank.records].count(32) == 1
        for group in rank.groups:
            mine = [record for record in rank.records if record.group == group]
            assert seqs(mine) == list(range(len(mine)))
    for path in tmp_path.glob("rings/*.ring"):
        reader = RingReader(path)
        assert reader.counter(ring.CLOSED) > 0
        assert reader.in_flight() == []
        reader.close()


# -- ends


@BOTH_HOOKS
def test_killed_at_any_time(hook: str, tmp_path: Path) -> None:
    """After a SIGKILL at any time the ring is readable: whole records, no number missing in a group, its trainer gone."""
    lives = 5
    said(alone(tmp_path, "killed.py", lives, COMMWATCH="0"))
    paths = list(tmp_path.glob("rings/*.ring"))
    assert len(paths) == lives
    for path in paths:
        reader = RingReader(path)
        assert not reader.alive()
        assert reader.counter(ring.CLOSED) == 0
        # One for each thread.
        assert len(reader.in_flight()) <= 8
        reader.close()
    for rank in read_rings(tmp_path):
        assert len(rank.records) >= 900
        check_flood(rank.records)


@BOTH_HOOKS
def test_fork_with_works_in_flight(hook: str, tmp_path: Path) -> None:
    """A forked child that lets go of the parent's works and communicates itself leaves no trace in the parent's ring."""
    output = run_job(tmp_path, "forked.py", COMMWATCH_JOB="parent")
    assert results(output) == [[True, [0, 0, 0]], [None, []]]
    parents = [rank for rank in read_rings(tmp_path) if rank.identity["job"] == "parent"]
    assert [rank.rank for rank in parents] == [0, 1]
    for rank in parents:
        counts = Counter(rank.op(r) for r in rank.operations if r.group == 0 or rank.groups[r.group]["name"] == "0")
        p2p = {"send": 1} if rank.rank == 0 else {"recv": 1}
        assert counts == {"all_reduce": 4, "reduce_scatter": 2, "barrier": 1, **p2p}
        assert len(rank.operations) == sum(counts.values()) + 1
        assert (len(rank.marks), rank.lost) == (1, 0)
        assert not any(record.flags & ev.UNTIMED for record in rank.operations)
        assert [r.stamp for r in rank.records] == list(range(1, len(rank.records) + 1))
    # The child that installs the probe anew has a ring of its own.
    (child,) = [rank for rank in read_rings(tmp_path) if rank.identity["job"] == "child"]
    assert [record.size_bytes for record in child.records] == [4 << 11]


@BOTH_HOOKS
def test_leaving_with_works_in_flight(hook: str, lazy_backend: Path, tmp_path: Path) -> None:
    """A sys.exit with works in flight ends as without us: same exit code, same stderr; the ring says what never ended."""
    done, plain = (alone_anew(tmp_path, "lazy.py", lazy_backend, "leave", COMMWATCH=on) for on in "10")
    assert (
        (done.returncode, done.stdout, done.stderr)
        == (plain.returncode, plain.stdout, plain.stderr)
        == (3, "job done\n", "")
    )
    (rank,) = read_rings(tmp_path)
    assert seqs(rank.operations) == [0, 1, 2, 3]
    assert all(record.flags & ev.UNTIMED for record in rank.operations)
    assert all(reader.counter(ring.CLOSED) for reader in map(RingReader, tmp_path.glob("rings/*.ring")))


def test_leaving_gloo_with_works_in_flight(native: Path, tmp_path: Path) -> None:
    """The same with Gloo's threads at work, which may abort at exit with and without us: never by a crash of ours."""
    env = clean_env(COMMWATCH="1", COMMWATCH_DIR=str(tmp_path), COMMWATCH_HOOK="native")
    done = subprocess.run(
        torchrun("leave.py", 2, "0"), env=env, capture_output=True, text=True, timeout=3 * PATIENCE_S, check=False
    )
    assert done.stdout.count("job done") == 2
    assert done.returncode == 0 or "terminate called" in done.stderr, done.stderr[-4000:]
    assert not any(text in done.stderr for text in ("commwatch", "exitcode: -11", "exitcode: -7", "Fatal Python error"))
    for rank in read_rings(tmp_path):
        # All operations from the first on; of an aborted rank the last ones may be missing.
        found = seqs([record for record in rank.operations if rank.op(record) not in ev.P2P])
        assert set(found) <= set(range(23))
        assert len(found) == len(set(found)) >= 2


# -- what the user sees


@pytest.fixture(scope="module")
def plain_behaviour(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What the job says without the probe."""
    return results(run_job(tmp_path_factory.mktemp("off"), "behave.py", COMMWATCH="0"))


def without_details(behaviour: dict[str, Any]) -> dict[str, Any]:
    """How a peer's death is found out differs from run to run; that it is an error of this class does not."""
    return {name: what.partition(":")[0] if name.startswith("peer gone") else what for name, what in behaviour.items()}


@BOTH_HOOKS
def test_works_behave_as_without_us(hook: str, plain_behaviour: list[Any], tmp_path: Path) -> None:
    """Works, also of destroyed groups and failed operations, show the user exactly what they show without the probe."""
    watched = results(run_job(tmp_path, "behave.py"))
    assert len(watched) == len(plain_behaviour) == 3
    for found, expected in zip(watched, plain_behaviour, strict=True):
        for name, section in expected.items():
            if isinstance(section, dict):
                for what, behaviour in section.items():
                    assert (what, found[name].get(what)) == (what, behaviour)
        assert without_details(found) == without_details(expected)
    failing = watched[1]
    assert all(what.startswith("RuntimeError") for name, what in failing.items() if name.startswith("peer gone"))
    ranks = read_rings(tmp_path)
    _check_failures(ranks[0])
    for rank in ranks:
        _check_destroyed(rank)


def _check_failures(rank: RankRecords) -> None:
    failed = [record for record in rank.operations if record.flags & ev.FAILED]
    assert Counter(map(rank.op, failed)) == {"recv": 2, "all_reduce": 3, "reduce_scatter": 1, "send": 1}
    assert all(record.end_ns for record in failed)


def _check_destroyed(rank: RankRecords) -> None:
    lives = {small: group for small, group in rank.groups.items() if group["name"] in ("1", "2", "3")}
    assert len({group["group_id"] for group in lives.values()}) == 3
    for small in lives:
        assert seqs([record for record in rank.operations if record.group == small]) == [0, 1, 2, 3]


@pytest.fixture(scope="session")
def lazy_backend() -> Path:
    """The backend of ``jobs/lazy_backend.cpp``, built."""
    return built_for_torch("lazy_backend.cpp")


@BOTH_HOOKS
def test_works_that_have_to_be_looked_at(hook: str, lazy_backend: Path, tmp_path: Path) -> None:
    """The end of a work without future is found by looking; nothing is held any longer."""
    assert said(alone(tmp_path, "lazy.py", lazy_backend, "run")) == [[[False] * 4, ["lazy failure"]]]
    (rank,) = read_rings(tmp_path)
    found = {record.seq: (ev.TIMING[record.timing], record.flags & ~ev.ASYNC) for record in rank.operations}
    # From Python a failure could only be asked for by what torch warns of. The last one never ended.
    failed = ev.FAILED if hook == "native" else 0
    assert found == {0: ("poll", 0), 1: ("poll", failed), 2: ("poll", 0), 3: ("none", ev.UNTIMED)}


@BOTH_HOOKS
def test_works_of_python(hook: str, tmp_path: Path) -> None:
    """A Work written in Python arrives unchanged at the user; the native hook does not touch it. Sparse has no size."""
    works, looks = said(alone(tmp_path, "python_works.py"))
    assert works == [["MyWork", 0, True, True, 2], ["MyWork", 0, True, True, 2], True]
    (rank,) = read_rings(tmp_path)
    # What a group written in Python does passes no dispatcher.
    (record,) = rank.operations
    assert record.flags & ev.NO_SIZE
    if hook == "native":
        assert looks == 0
        assert record.flags & ev.UNTIMED
