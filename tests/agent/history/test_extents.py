"""Searches in the history: chunks that cannot match are not decompressed, and nothing that matches is missed."""

from __future__ import annotations

import sqlite3
import zlib
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch.wire import events as ev
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.history.chunks import CHUNK_RECORDS, LEAST_RECORDS, MOST_PIECES, Damaged
from commwatch_agent.history.extents import ANY
from commwatch_agent.history.history import History
from commwatch_agent.history.operations import Operation, Reader
from commwatch_agent.history.packing import pack, unpack
from commwatch_agent.history.store import Writer
from commwatch_agent.model.cells import GroupInfo
from tests.helpers import examples, identity, numbered, operation, packed, stored_records

NOW = 1_700_000_000_000_000_000
ALWAYS = (0, 1 << 62)


def stored(path: Path, pieces: list[list[tuple[int, ...]]], rings: int = 2) -> None:
    """A history of some rings, each of whose commits holds one of ``pieces``."""
    store = Writer(path)
    for rank in range(rings):
        row, n = store.ring(f"r{rank}", identity(job=f"job{rank}", rank=rank), NOW), 0
        for number in range(3):
            label = f"g{number % 2}"
            store.group(row.id, number + rank, GroupInfo(f"id{number}", label, label, "", None, 2, True))
        store.name(row.id, "op", 32 + rank, "mine")
        for piece in pieces[rank::rings]:
            n += len(piece)
            store.append(row, packed(*piece, first=n - len(piece)), n)
            assert store.commit()
    store.close()


def found(path: Path, same: dict[str, Any], least_s: float | None, *, narrow: bool) -> list[Operation]:
    """Operations that match; with ``narrow``, from those chunks only that can have some."""

    def wanted(one: Operation) -> bool:
        slow = least_s is None or (one.duration_s is not None and one.duration_s >= least_s)
        return slow and all(getattr(one, name) == value for name, value in same.items())

    with History(path) as history:
        reader = Reader(history, {ring.id: ring for ring in history.rings()})
        where = reader.filter(same, least_s) if narrow else ANY
        return list(reader.newest_first(*ALWAYS, None, wanted, where=where))


numbers = st.integers(0, 40) | st.sampled_from([1 << 20, (1 << 32) - 1])
records = st.builds(
    lambda code, seq, group, begin, lasts, flags, timing: (
        (code, 0, group, -1, 0, 8, begin, seq, 0, begin, min(max(0, begin + lasts), (1 << 64) - 1), flags, timing, 0)
    ),
    st.sampled_from([0, 1, 2, 9, 32, 33, 62, 63, 254]),
    numbers,
    st.sampled_from([0, 1, 2, 3, 62, 0xFFFF]),
    st.integers(100, 10_000) | st.just((1 << 64) - 1),
    st.integers(-50, 0) | st.just(-(1 << 64)) | st.integers(0, 3_000) | st.just(1 << 61),
    st.sampled_from([0, ev.FAILED, ev.UNTIMED, ev.ASYNC]),
    st.sampled_from([ev.BY_FUTURE, ev.COUNTED, 99]),
)
filters = st.fixed_dictionaries(
    {},
    optional={
        "op": st.sampled_from(["all_reduce", "all_gather", "send", "mine", "unknown", "none"]),
        "group": st.sampled_from(["g0", "g1", "unknown", "none"]),
        "group_id": st.sampled_from(["id0", "id2", "unknown"]),
        "seq": numbers | st.sampled_from([-1, 1 << 70]),
    },
)


@given(
    st.lists(st.lists(records, min_size=1, max_size=12), max_size=8),
    filters,
    st.none() | st.sampled_from([0.0, 1e-7, 2e-6, 1.0, 1e9, 1e12, 4e307]),
)
@examples(120)
def test_nothing_is_missed(pieces: list[list[tuple[int, ...]]], same: dict[str, Any], least_s: float | None) -> None:
    """Any filter gives the same operations whether chunks are left out or all of them are read."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "h.sqlite"
        stored(path, pieces)
        assert found(path, same, least_s, narrow=True) == found(path, same, least_s, narrow=False)


@pytest.mark.parametrize(
    ("same", "least_s", "reads"),
    [
        ({"op": "barrier"}, None, 1),
        ({"group": "g1"}, None, 1),
        ({"seq": 5 * CHUNK_RECORDS}, None, 1),
        ({}, 1e-3, 1),
        ({"op": "broadcast"}, None, 0),
        ({}, None, 10),
    ],
)
def test_rare_filters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: dict[str, Any], least_s: float | None, reads: int
) -> None:
    """Only chunks that can have an operation of that op, group, number or duration are decompressed."""
    plain = [
        [operation(start_ns=n, end_ns=n + 9, seq=n) for n in range(at * CHUNK_RECORDS, (at + 1) * CHUNK_RECORDS)]
        for at in range(10)
    ]
    plain[3][7] = operation("barrier", start_ns=0, end_ns=9, seq=3 * CHUNK_RECORDS)
    plain[4][7] = operation(start_ns=0, end_ns=9, group=1, seq=4 * CHUNK_RECORDS)
    plain[5][7] = operation(start_ns=0, end_ns=2_000_000, seq=5 * CHUNK_RECORDS)
    stored(tmp_path / "h.sqlite", plain, rings=1)
    unpacked, chunks = Damaged.unpacked, set()

    def counted(damaged: Damaged, path: Path, chunk: int, data: bytes) -> bytes | None:
        chunks.add(chunk)
        return unpacked(damaged, path, chunk, data)

    monkeypatch.setattr(Damaged, "unpacked", counted)
    assert bool(found(tmp_path / "h.sqlite", same, least_s, narrow=True)) == bool(reads)
    assert len(chunks) == reads


@pytest.mark.parametrize(("added", "kept"), [(5, 0.9), (50, 0.9), (300, 1.0), (1500, 1.0)])
def test_commits_append(tmp_path: Path, added: int, kept: float) -> None:
    """A commit leaves the rows of earlier ones as they are, but for small ones that have become many."""
    store, n, rows = Writer(tmp_path / "h.sqlite"), 0, []
    row = store.ring("a", identity(), NOW)
    while n < 3000:
        store.append(row, numbered(range(n, n + added)), n + added)
        n += added
        assert store.commit()
        with closing(sqlite3.connect(tmp_path / "h.sqlite")) as db:
            rows.append(set(db.execute("SELECT first_n, until_n, data FROM chunk")))
            for table in ("extent", "span"):
                (orphans,) = db.execute(f"SELECT COUNT(*) FROM {table} WHERE chunk NOT IN (SELECT id FROM chunk)")
                assert orphans == (0,)
    assert all(later - now for now, later in pairwise(rows))
    assert sum(now <= later for now, later in pairwise(rows)) >= kept * (len(rows) - 1)
    assert len(rows[-1]) <= n // LEAST_RECORDS + MOST_PIECES + 2
    assert stored_records(tmp_path / "h.sqlite", row.id) == [numbered([at]) for at in range(n)]


@given(st.lists(st.integers(1, 400), max_size=60))
@examples(40)
def test_any_sizes(sizes: list[int]) -> None:
    """Whatever each commit adds, every record is stored once, and rows do not become many."""
    with TemporaryDirectory() as folder:
        path, n = Path(folder) / "h.sqlite", 0
        store = Writer(path)
        row = store.ring("a", identity(), NOW)
        for size in sizes:
            store.append(row, numbered(range(n, n + size)), n + size)
            n += size
            assert store.commit()
        store.close()
        assert stored_records(path, row.id) == [numbered([at]) for at in range(n)]
        with History(path) as history:
            assert len(list(history.chunks(*ALWAYS))) <= n // LEAST_RECORDS + MOST_PIECES + 2


def test_failed_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces whose commit failed are written by a later one, each record once."""
    store, n = Writer(tmp_path / "h.sqlite"), 0
    row = store.ring("a", identity(), NOW)
    for turn in range(60):
        store.append(row, numbered(range(n, n + 70)), n + 70)
        n += 70
        with monkeypatch.context() as patched:
            patched.setattr(store, "_is_there", lambda ok=turn % 3 != 1: ok)
            assert store.commit() == (turn % 3 != 1)
    store.close()
    assert stored_records(tmp_path / "h.sqlite", row.id) == [numbered([at]) for at in range(n)]


@given(st.lists(st.binary(min_size=ev.RECORD_SIZE, max_size=ev.RECORD_SIZE), max_size=20).map(b"".join))
@examples(60)
def test_packing(data: bytes) -> None:
    """Records come back as they were, from this version's data and from an earlier one's."""
    assert unpack(pack(data), 1 << 20) == data
    assert unpack(pack(bytearray(data)), 1 << 20) == data
    assert unpack(zlib.compress(data, 1), 1 << 20) == data


def test_other_jobs_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search in a job decompresses no chunk of another."""
    piece = [operation(start_ns=n, end_ns=n + 9, seq=n) for n in range(LEAST_RECORDS)]
    stored(tmp_path / "h.sqlite", [piece] * 6)
    unpacked, chunks = Damaged.unpacked, list[int]()

    def counted(damaged: Damaged, path: Path, chunk: int, data: bytes) -> bytes | None:
        chunks.append(chunk)
        return unpacked(damaged, path, chunk, data)

    monkeypatch.setattr(Damaged, "unpacked", counted)
    agent = QueryService(tmp_path / "h.sqlite")
    found = agent.operations(*ALWAYS, None, lambda one: True, 10_000, job="job1")
    assert {one.job_id for one in found} == {"job1"}
    assert len(found) == 3 * LEAST_RECORDS
    assert len(chunks) == 3
