"""The ends by which clocks are compared: the same on all nodes, over the whole window, whatever the length of the history."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from commwatch.wire import events as ev
from commwatch.wire.numbers import NUMBERS
from commwatch_agent.history.chunks import CHUNK_RECORDS, OpenChunk, statements
from commwatch_agent.history.history import Chunk, History
from commwatch_agent.history.opening import Transaction, connect
from commwatch_agent.history.store import Writer
from commwatch_agent.model.cells import GroupInfo
from commwatch_agent.model.clocks import compare
from commwatch_agent.report.timeline_source import Source
from tests.helpers import EPOCH_NS, MS, identity

#: Every third operation of a rank is of all ranks, the others are of a group on its node.
APART, PERIOD_NS = 3, 10 * MS


def node_of(path: Path, rank: int, operations: int, ahead_ns: int = 0, *, first: int = 0, before_zero: int = 0) -> Path:
    """The history of a node with one rank, from its operation ``first`` on, whose clock is ahead; numbers begin so much before 0."""
    store = Writer(path)
    about = identity(rank=rank, world_size=2, wall_offset_ns=EPOCH_NS + ahead_ns)
    ring = store.ring("0.ring", about, EPOCH_NS)
    for small_id, ranks in enumerate(((0, 1), (rank,))):
        name = str(ranks)
        store.group(ring.id, small_id, GroupInfo(name, name, name, "", ranks, len(ranks), True))
    store.close()
    with closing(connect(path, True)) as db, Transaction(db):
        for begin in range(first, operations, CHUNK_RECORDS):
            records = bytearray()
            for n in range(begin, min(begin + CHUNK_RECORDS, operations)):
                group, seq, end = int(n % APART > 0), (n // APART - before_zero) % NUMBERS, (n + 1) * PERIOD_NS
                fields = (
                    ev.OP_CODE["all_reduce"],
                    1,
                    group,
                    -1,
                    0,
                    8,
                    end - 9,
                    seq,
                    0,
                    end - 9,
                    end,
                    1,
                    ev.BY_FUTURE,
                    0,
                )
                records += ev.RECORD.pack(n + 1, *fields, n + 1)
            chunk = OpenChunk(ring.id, EPOCH_NS + ahead_ns)
            chunk.append(bytes(records), begin + len(records) // ev.RECORD_SIZE)
            for statement in statements([chunk], 0)[0]:
                db.execute(*statement)
    return path


def ends_of(path: Path, from_ns: int = 0) -> dict[tuple[str, int], int]:
    """The ends of a node."""
    with History(path) as history:
        return Source(history, "job").shared_ends(from_ns)


@pytest.mark.parametrize(("operations", "first"), [(20, 0), (3_000, 1), (100_000, 700)])
def test_clocks(tmp_path: Path, operations: int, first: int) -> None:
    """Clocks seconds apart are compared, also where chunks begin elsewhere, by many collectives from begin to end."""
    ahead_ns = -7000 * MS
    ends = [
        ends_of(node_of(tmp_path / "0", 0, operations)),
        ends_of(node_of(tmp_path / "1", 1, operations - 2, ahead_ns, first=first)),
    ]
    for found, node_ahead_ns in zip(ends, (0, ahead_ns), strict=True):
        assert {group_id for group_id, _ in found} == {"(0, 1)"}
        assert found == {at: EPOCH_NS + node_ahead_ns + (APART * at[1] + 1) * PERIOD_NS for at in found}
    _, clock = compare(ends)
    assert clock is not None
    assert (clock.offset_ns, clock.uncertainty_ns) == (ahead_ns, 0)
    shared = sorted(seq for _, seq in ends[0].keys() & ends[1].keys())
    collectives = (operations - first) // APART
    assert len(shared) > min(500, 0.9 * collectives - 1)
    assert shared[-1] - shared[0] > 0.8 * collectives - 1


def test_window(tmp_path: Path) -> None:
    """Only ends in the window count."""
    found = ends_of(node_of(tmp_path / "0", 0, 3_000), EPOCH_NS + 2_000 * PERIOD_NS)
    assert min(found.values()) == EPOCH_NS + 2_002 * PERIOD_NS
    assert len(found) == 1_000 // APART


def test_few_chunks_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long history costs no more than a short one: few of its chunks are read, and the ends are not many."""
    node, read = node_of(tmp_path / "0", 0, 200_000), []
    whole = History.chunk

    def counted(history: History, number: int) -> Chunk | None:
        read.append(number)
        return whole(history, number)

    monkeypatch.setattr(History, "chunk", counted)
    assert 500 < len(ends_of(node)) <= 4096 + 128
    assert len(read) == len(set(read)) <= 33


def test_numbers_go_on(tmp_path: Path) -> None:
    """Clocks are compared by as many collectives where their numbers go on at 0, and from few chunks, too."""
    operations, ahead_ns, before_zero = 100_000, -7000 * MS, 17_000
    nodes = [node_of(tmp_path / "0", 0, operations, before_zero=before_zero)]
    nodes.append(node_of(tmp_path / "1", 1, operations - 2, ahead_ns, first=700, before_zero=before_zero))
    ends = [ends_of(node) for node in nodes]
    _, clock = compare(ends)
    assert clock is not None
    assert (clock.offset_ns, clock.uncertainty_ns) == (ahead_ns, 0)
    shared = sorted((seq + before_zero) % NUMBERS for _, seq in ends[0].keys() & ends[1].keys())
    assert len(shared) > 500
    assert shared[-1] - shared[0] > 0.8 * operations // APART - 1
    assert all(len(found) <= 4096 + 128 for found in ends)
