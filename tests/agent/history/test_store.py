"""The history on disk: what was written can be read again, whatever happens in between."""

from __future__ import annotations

import random
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch.wire import events as ev
from commwatch_agent.history.chunks import CHUNK_RECORDS, LEAST_RECORDS, MOST_PIECES
from commwatch_agent.history.history import History
from commwatch_agent.history.rows import RingRow
from commwatch_agent.history.store import Writer
from commwatch_agent.model.cells import Cell, CellKey, GroupInfo, StepRecord
from tests.helpers import examples, identity, mark, numbered, operation, packed, split_records, stored_records

NOW = 1_700_000_000_000_000_000
ALWAYS = (0, 1 << 62)
SECOND, HOUR = 10**9, 3600 * 10**9


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "history.sqlite"


def records_since(store: Writer, ring: RingRow) -> bytes:
    """What no roll-up holds yet; each run says truly which number follows it."""
    runs = list(store.raw_since(ring))
    for records, until_n in runs:
        last = records[-ev.RECORD_SIZE :]
        assert not last or (until_n - int.from_bytes(last[:4], "little")) & 0xFFFFFFFF < CHUNK_RECORDS
    return b"".join(records for records, _ in runs)


def a_cell(**sums: Any) -> Cell:
    cell = Cell()
    for name, value in sums.items():
        setattr(cell, name, value)
    return cell


def fields(cell: Cell) -> dict[str, Any]:
    return {name: getattr(cell, name) for name in Cell.__slots__}


sums_only = [name for name in Cell.__slots__ if name not in ("bins", "durations")]
cells = st.builds(
    lambda sums, bins, durations: a_cell(bins=bins, durations=durations, **sums),
    st.fixed_dictionaries({name: st.integers(0, 1 << 50) for name in sums_only}),
    st.dictionaries(st.integers(0, 2048), st.integers(1, 1 << 20), max_size=5),
    st.lists(st.integers(0, 1 << 30), min_size=12, max_size=12),
)
keys = st.builds(CellKey, st.integers(0, 0xFFFF), st.integers(1, 254), st.integers(-1, 63))

# -- round trips ----------------------------------------------------------------------------------


def test_ring_row(path: Path) -> None:
    """A ring's row holds its identity; a second request returns the same row, with its progress since."""
    store, who = Writer(path), identity(rank=1, restart=2, started_ns=7 * SECOND)
    row = store.ring("/run/a.ring", who, NOW)
    assert row[1:8] == ("/run/a.ring", "job", 2, 1, 2, 7 * SECOND + NOW, NOW)
    assert (row.identity, row.next_n, row.rolled_n, row.lost, row.state) == (who, 0, 0, 0, "running")
    store.progress(row.id, 40, 3, 1, NOW + 5)
    store.end(row.id, "ended")
    assert store.commit()
    again = store.ring("/run/a.ring", who, NOW + 9)
    assert again == row._replace(next_n=40, lost=3, dropped=1, seen_ns=NOW + 5, state="ended")
    with History(path) as history:
        assert (history.rings(), history.rings("job"), history.rings("other")) == ([again], [again], [])


@examples(25)
@given(st.lists(st.tuples(st.integers(0, 1 << 60), keys, cells), max_size=5, unique_by=lambda closed: closed[:2]))
def test_rollups_come_back(closed: list[tuple[int, CellKey, Cell]]) -> None:
    """Roll-ups come back as they went in, sums, sketch and histogram."""
    with TemporaryDirectory() as directory:
        store = Writer(Path(directory) / "h.sqlite")
        row = store.ring("a", identity(), NOW)
        store.rollups(row.id, closed, 17)
        store.close()
        with History(store.path) as history:
            back = [(r.slot_ns, r.key, fields(r.cell)) for r in history.rollups(*ALWAYS, [row.id])]
            expected = [(slot, key, fields(cell)) for slot, key, cell in closed]
            assert sorted(back, key=itemgetter(0, 1)) == sorted(expected, key=itemgetter(0, 1))
            assert history.rings()[0].rolled_n == 17


def test_rollups_of_a_window(path: Path) -> None:
    """A query gets the roll-ups whose slot begins in its window, of its rings only."""
    store = Writer(path)
    a, b = (store.ring(name, identity(), NOW).id for name in "ab")
    for ring in (a, b):
        store.rollups(ring, [(slot, CellKey(0, 1, 5), a_cell(count=slot)) for slot in (10, 20, 30)], 0)
    store.close()
    with History(path) as history:
        assert [(r.ring, r.slot_ns) for r in history.rollups(20, 30, [b])] == [(b, 20)]
        assert len(list(history.rollups(*ALWAYS, [a, b]))) == 6
        assert list(history.rollups(*ALWAYS, [])) == []


def test_steps_come_back(path: Path) -> None:
    """Steps are returned in wall time, newest first, each once however often it is reported; unknown is not 0."""
    store = Writer(path)
    row = store.ring("a", identity(), NOW)
    parts = (("data", 7), ("tensor", 4))
    steps = [StepRecord(0, 10, 20, 5, None), StepRecord(1, 20, 40, 0, 0, (), 0), StepRecord(2, 40, 50, 9, 3, parts, 2)]
    store.steps(row, steps, None)
    assert store.commit()
    steps[1] = steps[1]._replace(long=True)  # as it turned out
    store.steps(row, steps[1:], "no idea")
    store.close()
    expected = [
        (
            row.id,
            s.seq,
            NOW + s.start_ns,
            NOW + s.end_ns,
            s.comm_ns,
            s.exposed_ns,
            dict(s.groups),
            s.p2p_wait_ns,
            s.long,
        )
        for s in reversed(steps)
    ]
    with History(path) as history:
        assert history.steps(*ALWAYS, [row.id]) == expected
        assert history.steps(*ALWAYS, [row.id], limit=2) == expected[:2]
        assert history.steps(NOW + 20, NOW + 50, [row.id]) == expected[1:]
        assert history.steps(*ALWAYS, []) == []
        assert history.rings()[0].steps_unavailable == "no idea"


def test_groups_and_names_come_back(path: Path) -> None:
    """Groups come back with their members, known or not; names by kind; a later word replaces an earlier one."""
    store = Writer(path)
    ring = store.ring("a", identity(), NOW).id
    known = GroupInfo("g-1", "tp", "1", "mesh_tp", (0, 3), 2, True, "nccl")
    unknown = GroupInfo("g-2", "2", "2", "undefined", None, 5, False)
    for small_id, group in ((0, unknown), (0, known), (1, unknown)):
        store.group(ring, small_id, group)
    for kind, code, name in (("op", 32, "x"), ("op", 32, "c10d::x"), ("dtype", 32, "float8")):
        store.name(ring, kind, code, name)
    store.close()
    with History(path) as history:
        assert history.groups() == {(ring, 0): known, (ring, 1): unknown}
        assert (history.names("op"), history.names("dtype")) == ({(ring, 32): "c10d::x"}, {(ring, 32): "float8"})


@pytest.mark.parametrize("name", ["a b.sqlite", "50%?x=1#y.sqlite", "ä.sqlite"])
def test_odd_paths(tmp_path: Path, name: str) -> None:
    """Any file name will do, also one that means something in a URI."""
    Writer(tmp_path / name).close()
    with History(tmp_path / name) as history:
        assert history.rings() == []


# -- raw records ----------------------------------------------------------------------------------

#: How many records, how many were lost before them, and whether a commit follows.
sizes = st.integers(0, 1500) | st.sampled_from([CHUNK_RECORDS, 4 * CHUNK_RECORDS, 4 * CHUNK_RECORDS + 100])
batches = st.lists(st.tuples(sizes, st.integers(0, 3), st.booleans()), min_size=1, max_size=6)


@examples(40)
@given(batches, st.integers(0, 4000))
def test_raw_records_come_back(stream: list[tuple[int, int, bool]], rolled_n: int) -> None:
    """Whatever the batches, gaps and commits, records come back exactly, in order, once; so do those after a roll-up."""
    with TemporaryDirectory() as directory:
        store = Writer(Path(directory) / "h.sqlite")
        row, n, numbers = store.ring("a", identity(), NOW), 0, list[int]()
        for size, lost, commit in stream:
            n += lost
            fresh = list(range(n, n + size))
            # One more may have been lost among them, not only before them.
            fresh = fresh[: size // 2] + [m + lost // 3 for m in fresh[size // 2 :]]
            n += size + lost // 3
            store.append(row, numbered(fresh), n)
            numbers += fresh
            if commit:
                assert store.commit()
        assert store.commit()
        assert stored_records(store.path, row.id) == split_records(numbered(numbers))
        since = records_since(store, row._replace(rolled_n=rolled_n))
        assert since == numbered([m for m in numbers if m >= rolled_n])
        store.close()


def test_full_chunks(path: Path) -> None:
    """Records are packed into chunks of some size: a ring read in many small pieces does not become many rows."""
    store, n = Writer(path), 0
    row = store.ring("a", identity(), NOW)
    for _ in range(300):
        store.append(row, numbered(range(n, n + 10)), n + 10)
        n += 10
        assert store.commit()
    with History(path) as history:
        assert len(list(history.chunks(*ALWAYS))) <= 3000 // LEAST_RECORDS + MOST_PIECES


def test_chunks_of_a_window(path: Path) -> None:
    """A query by time finds every record that ended in its window, latest chunk first."""
    store, at = Writer(path), list(range(0, 6000, 3))
    row = store.ring("a", identity(), NOW)
    shuffled = random.Random(1).sample(at, len(at))  # threads end operations in no order
    store.append(row, packed(*(operation(start_ns=0, end_ns=end) for end in shuffled), mark(0, 9)), len(at) + 1)
    store.close()
    with History(path) as history:
        for low, high in ((0, 5), (100, 103), (5990, 9000)):
            chunks = list(history.chunks(NOW + low, NOW + high))
            ends = {ev.Record._make(r).end_ns for c in chunks for r in ev.RECORD.iter_unpack(c.records)}
            assert {end for end in at if low <= end <= high} <= ends
            assert [c.until_ns for c in chunks] == sorted((c.until_ns for c in chunks), reverse=True)
        assert list(history.chunks(NOW + 7000, NOW + 8000)) == []


def test_chunks_with_a_collective(path: Path) -> None:
    """Each collective is found by group and number, in every ring that has it, though chunks are written many times."""
    store = Writer(path)
    for rank in (0, 1):
        row, n = store.ring(str(rank), identity(rank=rank), NOW), 0
        for small in range(3):
            store.group(row.id, small + rank, GroupInfo(f"g-{small}", "tp", "", "", None, 2, True))
        for size in (1, 700, 700, 1):
            fresh = [operation(start_ns=m, end_ns=m + 1, seq=m // 3, group=m % 3 + rank) for m in range(n, n + size)]
            store.append(row, packed(*fresh, first=n), n + size)
            n += size
            assert store.commit()
    with History(path) as history:
        for seq in (0, 1, 300, 466):
            for small in range(3):
                found = [
                    (chunk.ring, record.seq)
                    for chunk, number in history.chunks_with(f"g-{small}", seq)
                    for record in map(ev.Record._make, ev.RECORD.iter_unpack(chunk.records))
                    if record.group == number and record.seq == seq
                ]
                assert len(found) == len(set(found)) == (2 if 3 * seq + small < 1402 else 0)
        assert list(history.chunks_with("g-0", 5000)) == []


# -- crashes --------------------------------------------------------------------------------------

actions = st.lists(st.tuples(st.sampled_from(["read", "roll", "commit"]), st.integers(1, 700)), max_size=12)


@examples(40)
@given(actions)
def test_crash_between_commits(life: list[tuple[str, int]]) -> None:
    """After a crash the history is as of the last commit: how far was read, what was rolled up, and the records between."""
    with TemporaryDirectory() as directory:
        store = Writer(Path(directory) / "h.sqlite")
        row, n, rolled, committed = store.ring("a", identity(), NOW), 0, 0, (0, 0)
        for action, count in life:
            if action == "read":
                store.append(row, numbered(range(n, n + count)), n + count)
                n += count
                store.progress(row.id, n, 0, 0, NOW)
            elif action == "roll":
                rolled = min(n, rolled + count)
                store.rollups(row.id, [(0, CellKey(0, 1, 1), a_cell(count=1))], rolled)
            else:
                assert store.commit()
                committed = (n, rolled)
        after = Writer(store.path)  # the first one is never closed: its process is gone
        row = after.ring("a", identity(), NOW)
        assert (row.next_n, row.rolled_n) == committed
        assert records_since(after, row) == numbered(range(committed[1], committed[0]))
        # And on it goes: what the dead agent had read and not written is read again.
        after.append(row, numbered(range(row.next_n, n + 10)), n + 10)
        assert after.commit()
        assert stored_records(store.path, row.id) == split_records(numbered(range(n + 10)))
        after.close()


def test_raw_since_beyond_32_bits(path: Path) -> None:
    """Stamps have 32 bits, numbers do not: a ring of more than 2**32 records is counted from the right record on."""
    store, start = Writer(path), (1 << 32) - 600
    row = store.ring("a", identity(), NOW)
    fields = operation(start_ns=1, end_ns=2)
    records = [ev.RECORD.pack(n + 1 & 0xFFFFFFFF, *fields, n + 1 & 0xFFFFFFFF) for n in range(start, start + 1200)]
    store.append(row, b"".join(records), start + 1200)
    assert store.commit()
    for rolled in (start, start + 1, start + 599, start + 600, start + 601, start + 1199):
        assert records_since(store, row._replace(rolled_n=rolled)) == b"".join(records[rolled - start :])
    assert records_since(store, row._replace(rolled_n=start + 1200)) == b""


# -- merging ------------------------------------------------------------------------------------


@examples(25)
@given(st.lists(st.tuples(st.integers(0, 3 * HOUR // (10 * SECOND)), cells), max_size=12))
def test_coarsening(rollups: list[tuple[int, Cell]]) -> None:
    """Old roll-ups are merged to five minutes without a change to any sum or sketch; doing it twice changes nothing."""
    now, key = NOW + 3 * HOUR, CellKey(0, 1, 5)
    with TemporaryDirectory() as directory:
        store = Writer(Path(directory) / "h.sqlite")
        ring = store.ring("a", identity(), NOW).id
        for n, cell in sorted(rollups, key=lambda each: each[0]):
            store.arrive(n * 10 * SECOND, NOW + n * 10 * SECOND)
            store.rollups(ring, [(NOW + n * 10 * SECOND, key, cell)], 0)
        assert store.commit()
        expected: dict[int, Cell] = {}
        for n, cell in rollups:
            slot = NOW + n * 10 * SECOND
            old = slot < (now - HOUR) // (300 * SECOND) * (300 * SECOND)
            expected.setdefault(slot - slot % (300 * SECOND) if old else slot, Cell()).add(cell)
        for _ in range(2):
            list(store.tidy(now, raw_bytes=1 << 40, summary_bytes=1 << 40, keep_ns=24 * HOUR))
            with History(store.path) as history:
                found: dict[int, Cell] = {}
                rows = list(history.rollups(*ALWAYS, [ring]))
                for row in rows:
                    found.setdefault(row.slot_ns, Cell()).add(row.cell)
            assert {slot: fields(cell) for slot, cell in found.items()} == {s: fields(c) for s, c in expected.items()}
            assert len({row.slot_ns for row in rows if row.slot_ns < now - 2 * HOUR}) == len(
                [row for row in rows if row.slot_ns < now - 2 * HOUR]
            )
        store.close()
