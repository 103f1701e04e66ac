"""The retention of the history in slices: an agent that ends between two of them loses and doubles nothing."""

from __future__ import annotations

import sqlite3
from itertools import zip_longest
from pathlib import Path

import pytest

from commwatch_agent.core.cells import SLOT_NS, Cell, CellKey
from commwatch_agent.core.node_counters import GPU_BUSY, SENT, CounterSample, NodeCounter
from commwatch_agent.history.chunks import CHUNK_RECORDS
from commwatch_agent.history.history import History
from commwatch_agent.history.retention import fair_share
from commwatch_agent.history.rows import COARSE_NS
from commwatch_agent.history.soundness import numbers
from commwatch_agent.history.store import Writer
from tests.helpers import identity, numbered, stored_records

NOW = 1_700_000_100_000_000_000
HOUR = 3600 * 10**9


def filled(path: Path) -> Writer:
    """A history of two rings with an hour of rollups, and 200 chunks."""
    store, n = Writer(path), 0
    for name in ("a", "b"):
        row = store.ring(name, identity(), NOW)
        for slot in range(60):
            cell = Cell()
            cell.count = 1
            store.rollups(row.id, [(NOW + slot * SLOT_NS, CellKey(0, op, 4), cell) for op in (1, 2)], slot)
    for _ in range(200):
        store.append(row, numbered(range(n, n + CHUNK_RECORDS)), n + CHUNK_RECORDS)
        n += CHUNK_RECORDS
    assert store.commit()
    return store


def counts(path: Path) -> int:
    """Operations in all rollups."""
    with History(path) as history:
        return sum(row.cell.count for row in history.rollups(0, 1 << 62, [1, 2]))


def test_measurements(tmp_path: Path) -> None:
    """Measurements of the node are read as they were stored, until the retention deletes them."""
    store, path = Writer(tmp_path / "h.sqlite"), tmp_path / "h.sqlite"
    samples = [
        CounterSample(NOW + at * HOUR, [NodeCounter(GPU_BUSY, "0", 0.25 * at), NodeCounter(SENT, "eth0", 1e9)])
        for at in range(4)
    ]
    for sample in samples:
        store.node_sample(sample)
    assert store.commit()
    with History(path) as history:
        assert list(history.node_samples(0, 1 << 62)) == samples
        assert list(history.node_samples(NOW + HOUR, NOW + 2 * HOUR)) == [samples[1]]
    assert sum(1 for _ in store.tidy(NOW + 4 * HOUR, 1 << 30, 1 << 30, 2 * HOUR + 1)) > 0
    store.close()
    with History(path) as history:
        assert list(history.node_samples(0, 1 << 62)) == samples[2:]


@pytest.mark.parametrize("slices", [0, 1, 2, 3, 4, 6, 9, 100])
def test_interrupted(tmp_path: Path, slices: int) -> None:
    """After any number of slices, each operation is in one rollup, and what is left of the records is the newest."""
    store = filled(tmp_path / "h.sqlite")
    one = store._db.execute("SELECT MAX(size) FROM chunk").fetchone()[0]
    tidying = store.tidy(NOW + 3 * HOUR, 20 * one, 1 << 30, 24 * HOUR)
    for _ in range(slices):
        next(tidying, None)
    store.close()
    assert counts(tmp_path / "h.sqlite") == 240
    left = stored_records(tmp_path / "h.sqlite", 2)
    assert left == [numbered([at]) for at in range(200 * CHUNK_RECORDS - len(left), 200 * CHUNK_RECORDS)]
    if slices == 100:
        with History(tmp_path / "h.sqlite") as history:
            rows = list(history.rollups(0, 1 << 62, [1, 2]))
        assert {row.length_ns for row in rows} == {COARSE_NS}
        assert 15 * CHUNK_RECORDS < len(left) < 30 * CHUNK_RECORDS


def test_work_between_slices(tmp_path: Path) -> None:
    """Records that come while the retention runs are stored at once; a slice holds no lock after it."""
    store, n = filled(tmp_path / "h.sqlite"), 200 * CHUNK_RECORDS
    ring = store.ring("b", identity(), NOW)
    steps = 0
    for _ in store.tidy(NOW + 3 * HOUR, 0, 1 << 30, 24 * HOUR):
        store.append(ring, numbered(range(n, n + 5)), n + 5)
        n, steps = n + 5, steps + 1
        assert store.commit()
        assert stored_records(tmp_path / "h.sqlite", ring.id)[-1] == numbered([n - 1])
    assert steps > 5


def test_two_agents(tmp_path: Path) -> None:
    """Of two agents that merge the rollups of one history at once, neither finds damage, and each operation is counted once."""
    filled(tmp_path / "h.sqlite").close()
    both = [Writer(tmp_path / "h.sqlite") for _ in range(2)]
    here, there = (each.tidy(NOW + 3 * HOUR, 1 << 40, 1 << 40, 24 * HOUR) for each in both)
    # A slice of the second comes just before each transaction of the first.
    both[0]._db.set_trace_callback(lambda statement: next(there, None) if statement == "BEGIN IMMEDIATE" else None)
    list(here)
    assert [store.trouble for store in both] == [None, None]
    for store in both:
        store.close()
    assert counts(tmp_path / "h.sqlite") == 240


def test_two_agents_trim(tmp_path: Path) -> None:
    """Two agents that delete raw records beyond the bound at once leave as many as the bound allows."""
    store = filled(tmp_path / "h.sqlite")
    sizes = [size for (size,) in store._db.execute("SELECT size FROM chunk ORDER BY until_ns DESC")]
    store.close()
    both = [Writer(tmp_path / "h.sqlite") for _ in range(2)]
    for _ in zip_longest(*(each.tidy(NOW + 3 * HOUR, sum(sizes[:80]), 1 << 40, 24 * HOUR) for each in both)):
        pass
    for each in both:
        each.close()
    assert len(stored_records(tmp_path / "h.sqlite", 2)) == 80 * CHUNK_RECORDS


def sizes_of(path: Path, rings: dict[str, int]) -> dict[str, int]:
    """Number of stored records by name of the ring."""
    return {name: len(stored_records(path, ring)) for name, ring in rings.items()}


def test_users_share_the_raw_records(tmp_path: Path) -> None:
    """A user who writes much loses own raw records, not those of others, whatever times are in the records; the oldest go first."""
    path, hour = tmp_path / "h.sqlite", 3600 * 10**9
    store = Writer(path)
    # What claims to be of the far future, and of before all others, has no advantage.
    rows = {
        "much": store.ring("much", identity(wall_offset_ns=NOW + 1000 * hour), NOW, 1),
        "more": store.ring("more", identity(rank=1), NOW, 1),
        "little": store.ring("little", identity("other", wall_offset_ns=NOW - hour), NOW, 2),
    }
    for name, chunks in (("little", 10), ("much", 60), ("more", 40)):
        for at in range(chunks):
            store.append(
                rows[name], numbered(range(at * CHUNK_RECORDS, (at + 1) * CHUNK_RECORDS)), (at + 1) * CHUNK_RECORDS
            )
    assert store.commit()
    one = store._db.execute("SELECT MAX(size) FROM chunk").fetchone()[0]
    for _ in store.tidy(NOW, 50 * one, 1 << 40, 1 << 60):
        pass
    left = sizes_of(path, {name: row.id for name, row in rows.items()})
    assert left["little"] == 10 * CHUNK_RECORDS
    assert left["more"] == 40 * CHUNK_RECORDS
    assert 0 <= left["much"] <= 3 * CHUNK_RECORDS
    for _ in store.tidy(NOW, 10 * one, 1 << 40, 1 << 60):
        pass
    left = sizes_of(path, {name: row.id for name, row in rows.items()})
    assert 4 * CHUNK_RECORDS <= left["little"] <= 6 * CHUNK_RECORDS
    assert stored_records(path, rows["more"].id)[-1] == numbered([40 * CHUNK_RECORDS - 1])


def test_fair_share() -> None:
    """What an owner does not need the others may have, in equal parts."""
    assert fair_share([10, 50, 100], 90) == 40
    assert fair_share([100], 30) == 30
    assert fair_share([5, 5], 100) == 5
    assert fair_share([], 100) == 0


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE chunk SET until_ns = 'x'",
        "UPDATE chunk SET size = x'00'",
        "UPDATE rollup SET slot_ns = -9223372036854775808",
    ],
)
def test_damaged_numbers(tmp_path: Path, damage: str) -> None:
    """A value that is no count or time ends the retention with the remedy, not with an exception."""
    store = filled(tmp_path / "h.sqlite")
    store._db.execute(damage)
    for _ in store.tidy(NOW + 3 * HOUR, 0, 1 << 30, 24 * HOUR):
        pass
    assert "malformed: a number is expected; start the agent again" in (store.trouble or "")


@pytest.mark.parametrize("row", [(None, 1), (1, "2"), (1.5, 1), (1 << 63, 1), (b"", 1)])
def test_no_numbers(row: tuple[object, ...]) -> None:
    """What SQLite reads from a damaged page instead of a count or a time is an error of the database."""
    with pytest.raises(sqlite3.DatabaseError, match="malformed"):
        numbers(row)
    assert numbers((0, -5)) == (0, -5)
