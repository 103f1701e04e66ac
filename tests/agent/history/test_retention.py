"""The retention of the history in slices: an agent that ends between two of them loses and doubles nothing."""

from __future__ import annotations

import sqlite3
from itertools import zip_longest
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_agent.history.chunks import CHUNK_RECORDS
from commwatch_agent.history.fair_shares import Owner, excesses, fair_share
from commwatch_agent.history.history import History
from commwatch_agent.history.job_exit import Exit
from commwatch_agent.history.rows import COARSE_NS
from commwatch_agent.history.soundness import numbers
from commwatch_agent.history.store import Writer
from commwatch_agent.model.cells import SLOT_NS, Cell, CellKey, StepRecord
from commwatch_agent.model.node_counters import GPU_BUSY, SENT, CounterSample, NodeCounter
from tests.helpers import examples, identity, numbered, stored_records

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
    for at, sample in enumerate(samples):
        store.arrive(at * HOUR, NOW + at * HOUR)
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
    sizes = [size for (size,) in store._db.execute("SELECT size FROM chunk ORDER BY id DESC")]
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


def test_jobs_of_a_user_share_the_raw_records(tmp_path: Path) -> None:
    """A job that writes much loses own raw records, not those of another job of its user."""
    path = tmp_path / "h.sqlite"
    store = Writer(path)
    rows = {job: store.ring(job, identity(job), NOW, 1) for job in ("little", "much")}
    for job, chunks in (("little", 10), ("much", 60)):
        for at in range(chunks):
            store.append(
                rows[job], numbered(range(at * CHUNK_RECORDS, (at + 1) * CHUNK_RECORDS)), (at + 1) * CHUNK_RECORDS
            )
    assert store.commit()
    one = store._db.execute("SELECT MAX(size) FROM chunk").fetchone()[0]
    list(store.tidy(NOW, 30 * one, 1 << 40, HOUR))
    left = sizes_of(path, {job: row.id for job, row in rows.items()})
    assert left["little"] == 10 * CHUNK_RECORDS
    assert 19 * CHUNK_RECORDS <= left["much"] <= 22 * CHUNK_RECORDS
    assert stored_records(path, rows["much"].id)[-1] == numbered([60 * CHUNK_RECORDS - 1])


def steps_by_ring(store: Writer) -> dict[int, list[int]]:
    """Numbers of the stored steps."""
    found: dict[int, list[int]] = {}
    for ring, seq in store._db.execute("SELECT ring, seq FROM step ORDER BY seq"):
        found.setdefault(ring, []).append(seq)
    return found


def test_summaries_are_shared(tmp_path: Path) -> None:
    """Of too many summaries, the jobs with more than their share lose their oldest, whatever times are in them; others lose none."""
    store = Writer(tmp_path / "h.sqlite")
    second = 10**9
    store.arrive(0, NOW)
    many = store.ring("many", identity("many"), NOW, 1)
    few = store.ring("few", identity("few", rank=1), NOW, 1)
    # Of the far past, and of another user.
    other = store.ring("other", identity("other", wall_offset_ns=NOW - 100_000 * HOUR), NOW, 2)
    for seq in range(20_000):
        store.arrive(seq * second, NOW + seq * second)
        for ring in (many, *((few, other) if seq % 20 == 0 else ())):
            store.steps(ring, [StepRecord(seq, seq * second, (seq + 1) * second, 0, None)], None)
        if seq % 1000 == 999:
            assert store.commit()
    pages, size = (store._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    for _ in range(100):
        list(store.tidy(store.arrived_ns, 1 << 40, pages * size // 2, 1000 * HOUR))
    left = steps_by_ring(store)
    assert len(left[few.id]) == len(left[other.id]) == 1000
    assert 5_000 < len(left[many.id]) < 11_000
    assert left[many.id] == list(range(20_000 - len(left[many.id]), 20_000))
    assert store.trouble is None
    store.close()


def test_exits_go_by_arrival(tmp_path: Path) -> None:
    """Exit codes go when they have been here for so long, whatever their launcher's clock said."""
    store = Writer(tmp_path / "h.sqlite")
    store.arrive(0, NOW)
    store.exit(Exit("early", 1, 0.0))
    store.arrive(HOUR, NOW + HOUR)
    store.exit(Exit("late", 2, 1.0))
    assert store.commit()
    for now_ns, left in ((NOW + HOUR, ["early", "late"]), (NOW + 2 * HOUR, ["late"]), (NOW + 4 * HOUR, [])):
        list(store.tidy(now_ns, 1 << 40, 1 << 40, HOUR + 1 if now_ns < NOW + 2 * HOUR else HOUR + HOUR // 2))
        with History(tmp_path / "h.sqlite") as history:
            assert sorted(job for job, _ in history.exits()) == left
    store.close()


def test_fair_share() -> None:
    """What an owner does not need the others may have, in equal parts."""
    assert fair_share([10, 50, 100], 90) == 40
    assert fair_share([100], 30) == 30
    assert fair_share([5, 5], 100) == 5
    assert fair_share([], 100) == 0


owners = st.builds(Owner, st.one_of(st.none(), st.integers(0, 3)), st.sampled_from("abcd"))


@examples(200)
@given(st.dictionaries(owners, st.integers(0, 1000), max_size=12), st.integers(1, 2000))
def test_excesses(sizes: dict[Owner, float], most: int) -> None:
    """What is left fits; who has the least of a user, or no more than an equal part, loses nothing; only who has the most loses any."""
    lost = excesses(sizes, most)
    left = {owner: size - lost.get(owner, 0) for owner, size in sizes.items()}
    assert all(0 < part <= sizes[owner] for owner, part in lost.items())
    assert sum(left.values()) <= most + 1e-6
    if sum(sizes.values()) > most:
        assert sum(left.values()) == pytest.approx(most)
    else:
        assert not lost
    users: dict[int | None, float] = {}
    for owner, size in left.items():
        users[owner.uid] = users.get(owner.uid, 0) + size
    for owner in lost:
        assert users[owner.uid] == pytest.approx(max(users.values()))
        assert left[owner] == pytest.approx(max(left[each] for each in left if each.uid == owner.uid))


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE chunk SET arrived_ns = 'x'",
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
