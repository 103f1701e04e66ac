"""Kinds of damage to the history, one by one: what the agent says, what it keeps, and that it goes on."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from commwatch_agent.analysis.time_buckets import slots_of
from commwatch_agent.history.chunks import Damaged
from commwatch_agent.history.examination import Examination
from commwatch_agent.history.history import History
from commwatch_agent.history.rows import IncidentRow
from commwatch_agent.history.soundness import mark
from commwatch_agent.history.store import begin
from commwatch_agent.history.wal import frames
from commwatch_agent.model.node_counters import SENT, CounterSample, NodeCounter
from tests.helpers import MS, Trainer, Watch, agent, clean_env, commwatch, group_entry, identity, operation, wait_for
from tests.helpers import mark as mark_of_step

pytestmark = pytest.mark.long

FINE = operation(start_ns=0, end_ns=9)


def change(path: Path, *statements: str) -> None:
    """Change values as a person without knowledge of checksums might."""
    with closing(sqlite3.connect(path)) as db, db:
        for statement in statements:
            db.execute(statement)


def looked_through(path: Path) -> Damaged:
    """What is found where all of it is looked through."""
    damaged = Damaged()
    examination = Examination(path, damaged)
    while not examination.tick():
        pass
    return damaged


def history(state: Path) -> Path:
    """The one in ``state``."""
    (path,) = state.glob("history-*.sqlite")
    return path


def scramble(path: Path) -> bytes:
    """Make the file one that SQLite cannot read on; returns what it holds then."""
    data = bytearray(path.read_bytes())
    data[100:4096] = bytes(range(256)) * 15 + bytes(156)
    path.write_bytes(data)
    return bytes(data)


def test_set_aside_at_the_start(tmp_path: Path) -> None:
    """An agent on a damaged file moves it out of the way, whole, says where to, and takes in what the ring still holds; the next one finds all well."""
    run, state, log = tmp_path / "run", tmp_path / "state", tmp_path / "log"
    redirect = ("sh", "-c", 'exec "$@" 2>>"$0"', str(log))
    with Trainer(run / "rings" / "a.ring", identity()) as rank:
        rank.call("name", [(group_entry(),)])
        rank.write([FINE] * 50)
        with agent(run, "--state", str(state)) as running:
            wait_for(lambda: [r["records"] for r in running.get("/api/v1/ranks")] == [50], "the records")
        path = history(state)
        held = scramble(path)
        for _ in range(2):
            with agent(run, "--state", str(state), there=redirect, env=clean_env()) as running:
                wait_for(lambda: [r["records"] for r in running.get("/api/v1/ranks")] == [50], "the records again")
    (aside,) = state.glob("history-*.sqlite.damaged-*[0-9]")
    assert aside.read_bytes() == held
    (said,) = [line for line in log.read_text().splitlines() if "renamed to" in line]
    assert str(aside) in said
    assert str(path) in said


def test_found_while_it_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that is damaged under a running agent: the agent reports it and keeps running; the next agent renames the file and reads the ring again."""
    with Trainer(tmp_path / "rings" / "a.ring") as rank:
        rank.call("name", [(group_entry(),)])
        watch = Watch(tmp_path)
        rank.write([FINE] * 50)
        watch.tick()
        with closing(sqlite3.connect(watch.path)) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        data = bytearray(watch.path.read_bytes())
        data[4096:] = b"\xa5" * (len(data) - 4096)
        watch.path.write_bytes(data)
        watch.store._db.execute("PRAGMA shrink_memory")  # what SQLite has in memory is still right
        rank.write([FINE] * 50)
        watch.tick(1)
        assert "malformed; start the agent again" in (watch.store.trouble or "")
        assert watch.aggregate.jobs
        assert mark(watch.path).exists()
        watch.store.close()
        after = Watch(tmp_path)
        after.tick(2)
        assert after.count() == 100
    assert not mark(after.path).exists()
    assert len(list(tmp_path.glob("h.sqlite.damaged-*[0-9]"))) == 1


def test_damaged_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Transactions behind a damaged page of the write-ahead log are counted as lost, and what the ring holds is read again."""
    with Trainer(tmp_path / "rings" / "a.ring") as rank:
        before = Watch(tmp_path)
        for n in range(5):
            rank.write([FINE] * 10)
            before.tick(n)
        log = tmp_path / "h.sqlite-wal"
        data = bytearray(log.read_bytes())
        data[len(data) // 2] ^= 1
        # Its writer is gone, as in a crash: what it would do at its end is undone.
        kept = (tmp_path / "h.sqlite").read_bytes()
        before.store._db.close()
        (tmp_path / "h.sqlite").write_bytes(kept)
        log.write_bytes(data)
        with caplog.at_level(logging.WARNING, "commwatch"):
            after = Watch(tmp_path)
        after.tick(9)
        assert (len(after.damaged), after.count()) == (1, 50)
    assert "the write-ahead log is damaged" in caplog.text


@pytest.mark.parametrize("head", [True, False], ids=["head", "nothing"])
def test_log_that_is_whole(tmp_path: Path, head: bool) -> None:
    """The log of an agent that was killed is none that is damaged, whether or not an earlier life has left pages in it; a damaged head is."""
    with Trainer(tmp_path / "rings" / "a.ring") as rank:
        before = Watch(tmp_path)
        for n in range(5):
            rank.write([FINE] * 10)
            before.tick(n)
        before.store._db.execute("PRAGMA wal_checkpoint(RESTART)")
        rank.write([FINE] * 10)
        before.tick(9)
        files = {file: bytearray(file.read_bytes()) for file in tmp_path.glob("h.sqlite*")}
        before.store._db.close()
        if head:
            files[tmp_path / "h.sqlite-wal"][9] ^= 1
        for file, data in files.items():
            file.write_bytes(data)
        after = Watch(tmp_path)
        after.tick(10)
        assert (len(after.damaged), after.count()) == (int(head), 60)


def written(directory: Path) -> tuple[Path, Path]:
    """A history of five commits before its log's reset and three after it, and a copy of the log."""
    path, copy = directory / "h.sqlite", directory / "copy-wal"
    store = begin(path, Damaged())
    for at in range(8):
        store.node_sample(CounterSample(at, [NodeCounter(SENT, "eth0", at)]))
        assert store.commit()
        if at == 4:
            store._db.execute("PRAGMA wal_checkpoint(RESTART)")
    copy.write_bytes(path.with_name("h.sqlite-wal").read_bytes())
    store.close()
    return path, copy


@pytest.mark.parametrize("rest", ["none", "older frames"])
def test_killed_within_a_commit(tmp_path: Path, rest: str) -> None:
    """A last frame whose page was not written is no damage: its agent was killed, and the transaction never was."""
    _, log = written(tmp_path)
    found = frames(log)
    size = 24 + int.from_bytes(found.head[8:12], "big")
    data, last = bytearray(log.read_bytes()), 32 + (found.last - 1) * size
    assert found.commits[-1] == found.last
    if rest == "none":
        log.write_bytes(data[: last + 24])
        assert frames(log).lost(found.last - 1) == 0
    else:
        data[last + 24 : last + size] = bytes(size - 24)
        log.write_bytes(data)
        assert len(data) > last + size
        assert frames(log).lost(found.last - 1) == 0
        data[32 + found.commits[-2] * size - 1] ^= 1
        log.write_bytes(data)
        assert frames(log).lost(found.commits[-3]) == 2


def test_log_under_another_agent(tmp_path: Path) -> None:
    """What another agent does to the log between the look at it and SQLite's answer is no damage."""
    _, log = written(tmp_path)
    found = frames(log)
    assert found.commits
    assert found.lost(-1) == 0, "it is about to write the log into the database"
    assert found.lost(0) == 0, "it has written on"
    log.write_bytes(b"reset" * 100)
    assert found.lost(0) == 0, "it has begun the log anew"


ROWS: dict[str, Callable[[Path], None]] = {
    "another number": lambda path: change(path, "UPDATE rollup SET count = count + 1"),
    "another rank's": lambda path: change(path, "UPDATE rollup SET ring = 77"),
    "another time": lambda path: change(path, "UPDATE rollup SET slot_ns = -1"),
    "no number": lambda path: change(path, "UPDATE rollup SET count = 'many'"),
    "no text": lambda path: change(path, "UPDATE rollup SET durations = x'ff00'"),
    "no checksum": lambda path: change(path, "UPDATE rollup SET crc = 'x'"),
    "ring": lambda path: change(path, "UPDATE ring SET rank = 3"),
    "ring that has read nothing sound": lambda path: change(path, "UPDATE ring SET next_n = 'x'"),
    "identity": lambda path: change(path, "UPDATE ring SET identity = '{'"),
    "group": lambda path: change(path, "UPDATE grp SET label = 'other'"),
    "ranks": lambda path: change(path, "UPDATE grp SET ranks = '[1'"),
    "measurement": lambda path: change(path, "UPDATE node_sample SET at_ns = at_ns + 1"),
    "step": lambda path: change(path, "UPDATE chunk SET until_ns = 1.5"),
}


@pytest.mark.parametrize("damage", ROWS.values(), ids=ROWS)
def test_damaged_rows(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """A row in which something has changed is found, counted and left out; nothing ends, and no total is larger or another's."""
    with Trainer(tmp_path / "rings" / "a.ring") as rank:
        watch = Watch(tmp_path)
        rank.call("name", [(group_entry(),)])
        rank.write([FINE] * 50)
        watch.store.node_sample(CounterSample(1, [NodeCounter(SENT, "eth0", 1.5)]))
        watch.tick()
        rank.kill()
        watch.tick(1)
        watch.store.close()
    damage(watch.path)
    assert len(looked_through(watch.path)) >= 1
    after = Watch(tmp_path)
    after.tick(2)
    assert after.count() <= 50
    assert len(after.agent.operations(0, 1 << 62, None, lambda _: True, 100)) <= 50
    after.agent.ranks(None), after.agent.groups(None), after.agent.jobs(), after.agent.steps(0, 1 << 62, None, None, 9)
    after.store.close()
    done = commwatch("report", "--dir", tmp_path, "--state", tmp_path)
    assert "Traceback" not in done.stderr


def stored(tmp_path: Path) -> Watch:
    """A history of a rank that has ended, with one operation of 1 ms in a step of 10 ms."""
    watch = Watch(tmp_path)
    with Trainer(tmp_path / "rings" / "a.ring") as rank:
        rank.call("name", [(group_entry(),)])
        rank.write([mark_of_step(0, 0), operation(start_ns=MS, end_ns=2 * MS, seq=7), mark_of_step(1, 10 * MS)])
        watch.tick(10 * MS)
    watch.tick(11 * MS)
    watch.store.close()
    return watch


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (None, (0.1, 1)),
        ("UPDATE rollup SET bus_bytes = 5 * bus_bytes", (0.1, 0)),
    ],
)
def test_damaged_rows_in_plots(tmp_path: Path, damage: str | None, expected: tuple[float | None, int]) -> None:
    """A damaged roll-up is counted, and no part of the bandwidth over time."""
    path = stored(tmp_path).path
    change(path, *filter(None, [damage]))
    after = Watch(tmp_path)
    (slot,) = slots_of(after.agent.slots(0, 1 << 62, "job"))
    assert (slot.comm, len(slot.busbw)) == expected
    assert len(after.damaged) == (damage is not None)


@pytest.mark.parametrize(
    ("damage", "group_id"),
    [
        ("UPDATE chunk SET from_ns = from_ns + 1", "default_pg-0"),
        ("UPDATE grp SET group_id = 'another'", "another"),
    ],
)
def test_damaged_rows_of_a_collective(tmp_path: Path, damage: str, group_id: str) -> None:
    """A collective whose chunk or group is damaged is not found under any name, and the damage is counted."""
    before = stored(tmp_path)
    assert before.agent.collective("default_pg-0", 7) is not None
    change(before.path, damage)
    after = Watch(tmp_path)
    assert after.agent.collective(group_id, 7) is None
    assert len(after.damaged) == 1


def test_incidents_of_another_agent(tmp_path: Path) -> None:
    """The incidents of one agent are read without a report that those of others are damaged; one that is damaged is reported."""
    path, damaged = tmp_path / "history.sqlite", Damaged()
    rows = [IncidentRow("id", agent, "job", "run", "open", 1, 2, "{}") for agent in ("one", "other")]
    with closing(begin(path, damaged)) as store:
        for row in rows:
            store.incident(row)
        store.commit()
    with History(path, damaged) as history:
        assert (history.incidents(agent="one"), len(damaged)) == (rows[:1], 0)
        assert (history.incidents(incident_id="id", agent="other"), len(damaged)) == (rows[1:], 0)
        assert (history.incidents(runs=["run"]), history.incidents(agent="none"), len(damaged)) == (rows, [], 0)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE incident SET state = 'ended' WHERE agent = 'one'")
    with History(path, damaged) as history:
        assert (history.incidents(agent="one"), len(damaged)) == ([], 1)


def test_the_ring_of_a_damaged_row(tmp_path: Path) -> None:
    """A rank whose row is damaged is read again from its ring, and nothing that was stored under that row is counted twice."""
    with Trainer(tmp_path / "rings" / "a.ring") as rank:
        rank.call("name", [(group_entry(),)])
        watch = Watch(tmp_path)
        rank.write([FINE] * 50)
        watch.tick()
        watch.store.close()
        change(watch.path, "UPDATE ring SET world_size = 9")
        rank.write([FINE] * 5)
        after = Watch(tmp_path)
        after.tick(1)
        assert (after.count(), len(after.damaged)) == (55, 1)
        assert len(after.agent.operations(0, 1 << 62, None, lambda _: True, 100)) == 55


def test_rings_after_one_with_malformed_rows(tmp_path: Path) -> None:
    """A ring whose rows in the history are malformed is named, and the rings after it are read in the same tick."""
    watch = Watch(tmp_path)
    watch.store._db.execute(
        "CREATE TRIGGER breaks AFTER INSERT ON ring WHEN NEW.uid LIKE '%/a.ring'"
        " BEGIN UPDATE ring SET world_size = 99 WHERE uid = NEW.uid; END"
    )
    with Trainer(tmp_path / "rings" / "a.ring"), Trainer(tmp_path / "rings" / "b.ring", identity(rank=1)) as good:
        good.write([FINE] * 5)
        for n in range(2):
            watch.tick(n)
            assert {key: row.count for key, row in watch.rows("rank").items()} == {(1,): 5}
            assert "a.ring" in (watch.intake.waiting or "")
            assert "malformed" in (watch.intake.waiting or "")
        assert watch.intake.bad_rings == 0, "it is tried again"


def test_damaged_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An index that has lost a row is rebuilt, and this is logged; no data is lost."""
    with Trainer(tmp_path / "rings" / "a.ring") as rank:
        watch = Watch(tmp_path)
        rank.write([FINE] * 50)
        watch.tick()
        rank.kill()
        watch.tick(1)
        watch.store.close()
    with closing(sqlite3.connect(watch.path, isolation_level=None)) as db:
        db.execute("PRAGMA writable_schema = ON")
        ((root, spare),) = db.execute(
            "SELECT a.rootpage, b.rootpage FROM sqlite_master a, sqlite_master b WHERE a.name = 'rollup_slot' AND b.name = 'step_end'"
        )
        db.execute("UPDATE sqlite_master SET rootpage = ? WHERE name = 'rollup_slot'", (spare,))
        db.execute("UPDATE sqlite_master SET rootpage = ? WHERE name = 'step_end'", (root,))
    damaged = looked_through(watch.path)
    assert len(damaged) == 1
    assert len(looked_through(watch.path)) == 0, "the second time all is well"
    after = Watch(tmp_path)
    assert after.count() == 50


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    """A file that is no database is not set aside: the agent says in one line that it does not start, and leaves the file alone."""
    state = tmp_path / "state"
    with agent(tmp_path / "run", "--state", str(state)):
        pass
    path = history(state)
    path.write_bytes(b"precious\n" * 1000)
    done = commwatch("agent", "--dir", tmp_path / "run", "--state", state, "--port", "0")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert str(path) in line
    assert path.read_bytes() == b"precious\n" * 1000
    assert list(state.glob("*.damaged*")) == []


def test_kept_under_another_agent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A history found damaged keeps its name while another agent writes to it; the next agent without one beside it renames it."""
    path = tmp_path / "h.sqlite"
    first = begin(path, Damaged())
    mark(path).touch()
    with caplog.at_level(logging.WARNING, "commwatch"):
        second = begin(path, Damaged())
    assert "other agents use it" in caplog.text
    first.node_sample(CounterSample(1, []))
    assert first.commit()
    second.close()
    first.close()
    begin(path, Damaged()).close()
    assert not mark(path).exists()
    (aside,) = tmp_path.glob("h.sqlite.damaged-*[0-9]")
    with closing(sqlite3.connect(aside)) as db:
        assert db.execute("SELECT at_ns FROM node_sample").fetchall() == [(1,)]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """Two files that are set aside in the same second have two names."""
    path = tmp_path / "h.sqlite"
    for _ in range(3):
        begin(path, Damaged()).close()
        scramble(path)
        begin(path, Damaged()).close()
    assert len(list(tmp_path.glob("h.sqlite.damaged-*[0-9]"))) == 3
