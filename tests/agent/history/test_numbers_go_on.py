"""Collectives and steps whose numbers go on at 0 are found in the history, and no chunks besides theirs are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from commwatch.wire.numbers import NUMBERS
from commwatch_agent.history.chunks import CHUNK_RECORDS
from commwatch_agent.history.history import Chunk, History
from commwatch_agent.history.operations import Reader
from commwatch_agent.history.store import Writer
from commwatch_agent.model.cells import GroupInfo, StepRecord
from tests.helpers import MS, identity, mark, operation, packed

NOW = 1_700_000_000_000_000_000
CHUNKS, RANKS = 10, 2
#: The numbers go on at 0 in the middle of a chunk.
FIRST = NUMBERS - CHUNKS * CHUNK_RECORDS // 2 - 100


def number(at: int) -> int:
    """The number of a collective."""
    return (FIRST + at) % NUMBERS


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The history of two ranks that alternate between two groups, whose numbers are far apart, and messages."""
    path = tmp_path_factory.mktemp("history") / "h.sqlite"
    store = Writer(path)
    for rank in range(RANKS):
        ring = store.ring(f"r{rank}", identity(rank=rank, world_size=RANKS, wall_offset_ns=NOW), NOW)
        for small_id, name in enumerate(("world", "other")):
            store.group(ring.id, small_id, GroupInfo(name, name, name, "", (0, 1), 2, True))
        for chunk in range(CHUNKS):
            records = []
            for at in range(chunk * CHUNK_RECORDS // 2, (chunk + 1) * CHUNK_RECORDS // 2):
                begin, end = 2 * at * MS, (2 * at + 1) * MS
                records.append(operation(start_ns=begin, end_ns=end, seq=number(2 * at)))
                records.append(operation(start_ns=begin, end_ns=end, seq=at + 7, group=1))
            store.append(ring, packed(*records, first=chunk * CHUNK_RECORDS), (chunk + 1) * CHUNK_RECORDS)
            assert store.commit()
    store.close()
    return path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The chunks that are read."""
    read: list[int] = []
    whole = History.chunk

    def counted(history: History, number: int) -> Chunk | None:
        read.append(number)
        return whole(history, number)

    monkeypatch.setattr(History, "chunk", counted)
    return read


@pytest.mark.parametrize(
    "at", [0, CHUNK_RECORDS // 2 * CHUNKS + 98, CHUNK_RECORDS // 2 * CHUNKS + 100, CHUNKS * CHUNK_RECORDS - 2]
)
def test_collective(path: Path, read: list[int], at: int) -> None:
    """A collective before the greatest number, at 0 and after it is found by its number, each in one chunk of a rank."""
    with History(path) as history:
        found = Reader(history, {ring.id: ring for ring in history.rings()}).collective("world", number(at))
    assert [(one.rank, one.seq, round((one.start_at - NOW / 1e9) * 1000)) for one in found] == [
        (rank, number(at), at) for rank in range(RANKS)
    ]
    assert len(read) == len(set(read)) == RANKS


@pytest.mark.parametrize(
    "at", [0, CHUNK_RECORDS // 2 * CHUNKS + 98, CHUNK_RECORDS // 2 * CHUNKS + 100, CHUNKS * CHUNK_RECORDS - 2]
)
def test_filter(path: Path, at: int) -> None:
    """A search for a number finds it on both sides of 0."""
    with History(path) as history:
        reader = Reader(history, {ring.id: ring for ring in history.rings()})
        where = reader.filter({"seq": number(at), "group_id": "world"}, None)
        assert [record.seq for _, record in reader.records(0, 1 << 62, where=where)] == [number(at)] * RANKS


def test_span_of_the_chunk(path: Path) -> None:
    """The range of a chunk in which numbers go on at 0 ends with the smaller number, and those of all chunks together are whole."""
    with History(path) as history:
        spans = [span for span in history.spans(0, [1]) if span.small_id == 0]
    assert sorted((span.seq_from - FIRST) % NUMBERS for span in spans) == [n * CHUNK_RECORDS for n in range(CHUNKS)]
    assert {(span.seq_until - span.seq_from) % NUMBERS for span in spans} == {CHUNK_RECORDS - 2}
    assert sum(span.seq_until < span.seq_from for span in spans) == 1


@pytest.mark.parametrize("first", [7, NUMBERS - 3])
def test_steps(tmp_path: Path, first: int) -> None:
    """The first step of a ring, those between two marks, and the records since its latest step are the same wherever numbers begin."""
    store, step_ns, steps = Writer(tmp_path / "h.sqlite"), 10 * MS, 8
    about = identity(rank=0, wall_offset_ns=NOW)
    ring = store.ring("ring", about, NOW)
    ends = [(at + 1) * step_ns for at in range(steps)]
    records = []
    for at, end in enumerate(ends):
        records += [operation(start_ns=end - 2, end_ns=end - 1, seq=at), mark((first + at) % NUMBERS, end)]
    store.append(ring, packed(*records), len(records))
    made = [
        StepRecord((first + at) % NUMBERS, at * step_ns, (at + 1) * step_ns, None, None) for at in range(1, steps - 2)
    ]
    store.steps(ring, made, None)
    store.rollups(ring.id, [], len(records))
    assert store.commit()
    assert store.first_step_ns(ring.id) == NOW + step_ns
    ring = ring._replace(rolled_n=len(records))
    latest = records.index(mark((first + steps - 3) % NUMBERS, (steps - 2) * step_ns))
    assert store.since_last_step(ring) == packed(*records[latest:], first=latest)
    store.close()
    with History(tmp_path / "h.sqlite") as history:
        between = history.extent_of_steps(ring.id, (first + 1) % NUMBERS, (first + 4) % NUMBERS)
        assert between == (NOW + 2 * step_ns, NOW + 5 * step_ns)
        assert history.first_steps([ring.id]) == {ring.id: NOW + step_ns}
