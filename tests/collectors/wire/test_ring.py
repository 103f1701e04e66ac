"""The ring file: whatever writer, reader and kernel do, read + lost = written, and what is read is intact."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch.wire import events as ev
from commwatch.wire import ring, splits
from commwatch.wire.ring import MARGIN, RingWriter
from commwatch.wire.ring_reader import GAP_PATIENCE, RingReader
from tests.helpers import examples, identity, operation, rewind_ring

SLOTS = 128


def fields(n: int) -> tuple[int, ...]:
    """Record ``n``: every field follows from the number, so a mixture of two shows."""
    return operation(
        start_ns=n * 3, end_ns=n * 5 + 1, launch_ns=n * 2, seq=n, size=n * 7, tag=n % 100, waited_us=n % 50
    )


def numbers(records: bytes) -> list[int]:
    """The numbers of whole records, each checked field by field."""
    found = []
    for record in map(ev.Record._make, ev.RECORD.iter_unpack(records)):
        n = record.seq
        assert record == (n + 1, *fields(n), n + 1)
        found.append(n)
    return found


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[RingWriter, RingReader]]:
    writer = RingWriter(tmp_path / "a.ring", identity(), SLOTS)
    reader = RingReader(writer.path)
    yield writer, reader
    reader.close()


def write(writer: RingWriter, first: int, until: int) -> None:
    for n in range(first, until):
        writer.write(*fields(n))


def tear(path: Path, n: int, slots: int = SLOTS, stamp: int = 0) -> None:
    """Leave record ``n`` as a writer would that was killed in the middle of it (or mend it, given its stamp)."""
    with open(path, "r+b") as file:
        file.seek(ring.RECORDS_AT + n % slots * ev.RECORD_SIZE + ev.RECORD_SIZE - 4)
        file.write(stamp.to_bytes(4, "little"))


# -- records --------------------------------------------------------------------------------------

turns = st.lists(
    st.integers(0, 400) | st.tuples(st.just("drain"), st.sampled_from([1, 10, 64, 1 << 30])) | st.just("reopen"),
    max_size=15,
)


@examples(80)
@given(turns)
def test_any_sequence(sequence: list[int | tuple[str, int] | str]) -> None:
    """However writes and drains alternate: read + lost = written, in order, intact, and nothing lost without need."""
    with TemporaryDirectory() as directory:
        writer = RingWriter(Path(directory) / "a.ring", identity(), SLOTS)
        reader, written, at = RingReader(writer.path), 0, 0
        for turn in [*sequence, ("drain", 1 << 30)]:
            if isinstance(turn, int):
                write(writer, written, written + turn)
                written += turn
            elif turn == "reopen":
                reader.close()
                reader = RingReader(writer.path, at)
            else:
                drained = reader.drain(limit=int(turn[1]))
                found = numbers(drained.records)
                lost = sorted(set(range(at, reader.next_n)) - set(found))
                assert found == sorted(set(found))
                assert (len(found), len(lost)) == (drained.read, drained.lost)
                assert drained.read <= int(turn[1])
                # Lost is only what was overwritten, or what a writer may be overwriting at this very moment.
                assert all(n < written - SLOTS + MARGIN for n in lost)
                at = reader.next_n
        last = reader.drain(final=True)
        assert at + last.read + last.lost == reader.next_n == written
        reader.close()


@pytest.mark.parametrize("written", [0, 1, SLOTS - MARGIN, SLOTS, SLOTS + 1, 10 * SLOTS + 3])
def test_dead_ring(pair: tuple[RingWriter, RingReader], written: int) -> None:
    """Of a writer that is gone every record is read that its file still holds; the overwritten ones are counted."""
    writer, reader = pair
    write(writer, 0, written)
    drained = reader.drain(final=True)
    assert numbers(drained.records) == list(range(max(0, written - SLOTS), written))
    assert drained.lost == max(0, written - SLOTS)
    assert reader.drain(final=True) == (b"", 0, 0)


def test_dead_ring_behind_its_cursor(pair: tuple[RingWriter, RingReader]) -> None:
    """A writer killed between its last records and the cursor has written them: one last drain takes them too."""
    writer, reader = pair
    write(writer, 0, 3 * SLOTS)
    writer.counters[ring.CURSOR] = 3 * SLOTS - 2
    drained = reader.drain(final=True)
    assert numbers(drained.records) == list(range(2 * SLOTS, 3 * SLOTS))
    assert drained.lost == 2 * SLOTS


def test_beyond_32_bits(pair: tuple[RingWriter, RingReader]) -> None:
    """Stamps have 32 bits, numbers do not: a ring that passes 2**32 records is read on."""
    start = (1 << 32) - 50
    writer, reader = pair
    reader.next_n = start
    rewind_ring(writer.path, start, start + 20, SLOTS)
    assert reader.drain().read == 20
    rewind_ring(writer.path, start + 20, start + 80, SLOTS)
    assert (reader.drain().read, reader.next_n) == (60, start + 80)
    rewind_ring(writer.path, start + 80, start + 80 + 2 * SLOTS, SLOTS)
    assert reader.drain(final=True)[1:] == (SLOTS, SLOTS)


def test_torn_record_in_a_dead_ring(pair: tuple[RingWriter, RingReader]) -> None:
    """A half-written record among others in a dead ring is lost, counted, and costs none of its neighbours."""
    writer, reader = pair
    write(writer, 0, 20)
    tear(writer.path, 7)
    drained = reader.drain(final=True)
    assert numbers(drained.records) == [n for n in range(20) if n != 7]
    assert drained.lost == 1


def test_torn_last_record(pair: tuple[RingWriter, RingReader]) -> None:
    """A record torn by its writer's death, which never counted it, is not there; the ones before are."""
    writer, reader = pair
    write(writer, 0, 20)
    writer.counters[ring.CURSOR] = 19
    tear(writer.path, 19)
    assert numbers(reader.drain(final=True).records) == list(range(19))


def test_record_completed_while_it_is_copied(
    pair: tuple[RingWriter, RingReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of which a copy took the begin half-written and the end complete is read as it is in the end."""
    writer, reader = pair
    write(writer, 0, 3)
    copy, copies = reader._copy, []

    def slow(first: int, upto: int) -> bytes:
        copies.append(bytearray(copy(first, upto)))
        if len(copies) == 1:
            half = 2 * ev.RECORD_SIZE
            copies[0][half + 4 : half + ev.RECORD_SIZE - 4] = bytes(ev.RECORD_SIZE - 8)
        return bytes(copies[-1])

    monkeypatch.setattr(reader, "_copy", slow)
    assert numbers(reader.drain().records) == [0, 1, 2]


def test_torn_record_in_a_live_ring(pair: tuple[RingWriter, RingReader]) -> None:
    """A half-written record in a live ring is waited for, and read in its place once it is whole."""
    writer, reader = pair
    write(writer, 0, 20)
    tear(writer.path, 7)
    assert numbers(reader.drain().records) == list(range(7))
    assert reader.drain() == (b"", 0, 0)
    tear(writer.path, 7, stamp=8)
    drained = reader.drain()
    assert (numbers(drained.records), drained.lost) == (list(range(7, 20)), 0)


def test_torn_record_is_given_up(pair: tuple[RingWriter, RingReader]) -> None:
    """A half-written record that stays so is given up after a while, counted, and the ring is read on."""
    writer, reader = pair
    write(writer, 0, 20)
    tear(writer.path, 7)
    tear(writer.path, 12)
    found, lost = list[int](), 0
    for drains in range(3 * GAP_PATIENCE):
        drained = reader.drain()
        if drains < GAP_PATIENCE:
            assert drained.lost == 0
        found += numbers(drained.records)
        lost += drained.lost
    assert (found, lost) == ([n for n in range(20) if n not in (7, 12)], 2)


@contextmanager
def impatient_threads() -> Iterator[None]:
    """Threads change places as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def test_several_writers(tmp_path: Path) -> None:
    """Threads that write at once lose nothing: each one's records come whole, in its order, beside the others'."""
    threads, each = 4, 10_000
    writer = RingWriter(tmp_path / "a.ring", identity(), 1024)
    reader, found, lost = RingReader(writer.path), list[tuple[int, int]](), 0

    def work(who: int) -> None:
        for n in range(each):
            writer.write(*operation(start_ns=n, end_ns=n + who, tag=who, seq=n, size=who * each + n))

    workers = [threading.Thread(target=work, args=(who,)) for who in range(threads)]
    with impatient_threads():
        for worker in workers:
            worker.start()
        quiet = False
        while not quiet:
            ended = not any(worker.is_alive() for worker in workers)
            drained = reader.drain(final=ended)
            lost += drained.lost
            for record in map(ev.Record._make, ev.RECORD.iter_unpack(drained.records)):
                assert record.size_bytes == record.tag * each + record.seq
                assert record.end_ns == record.start_ns + record.tag == record.seq + record.tag
                found.append((record.tag, record.seq))
            quiet = ended and not drained.read and not drained.lost
    reader.close()
    assert len(found) + lost == threads * each
    for who in range(threads):
        own = [n for tag, n in found if tag == who]
        assert own == sorted(set(own))


# -- a writer that is killed ----------------------------------------------------------------------

#: The same records as ``fields``.
WRITES_FOR_EVER = """
import os, sys
from pathlib import Path
from commwatch.wire.ring import RingWriter
writer, n = RingWriter(Path(sys.argv[1]), {"job": "job"}, int(sys.argv[2])), 0
while True:
    for n in range(n, n + 50):
        writer.write(1, 0, 0, -1, n % 100, n * 7, n * 2, n, n % 50, n * 3, n * 5 + 1, 0, 1, 0)
    n += 1
    os.write(1, b"%12d" % n)
"""


def killed_writer(path: Path, slots: int, after: int, reader: list[RingReader]) -> int:
    """Run a writer, kill it once it reports ``after`` written records; return its last report."""
    command = [sys.executable, "-c", WRITES_FOR_EVER, str(path), str(slots)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as child:
        assert child.stdout is not None
        said = 0
        while said < after:
            said = int(child.stdout.read(12))
            if not reader:
                reader.append(RingReader(path))
        child.kill()
        rest = child.stdout.read()
        return max(said, int(rest[len(rest) // 12 * 12 - 12 :][:12] or 0))


@pytest.mark.parametrize("slots", [256, 1 << 16])
def test_killed_writer(tmp_path: Path, slots: int) -> None:
    """A trainer killed at any moment leaves all it has written: read + lost = written, at most one record torn."""
    chance = random.Random(slots)
    for life in range(10):
        path, opened = tmp_path / f"{life}.ring", list[RingReader]()
        said = killed_writer(path, slots, chance.randrange(1, 3000), opened)
        (reader,) = opened
        heads, tails = zip(
            *((r[0], r[-1]) for r in ev.RECORD.iter_unpack(path.read_bytes()[ring.RECORDS_AT : -splits.AREA_BYTES])),
            strict=True,
        )
        written = max(head for head, tail in zip(heads, tails, strict=True) if head == tail)
        # Packing begins with zeros: in a ring that is full they are a record that was being overwritten.
        torn = sum(head != tail or (not head and written >= slots) for head, tail in zip(heads, tails, strict=True))
        assert torn <= 1
        assert written >= said
        found = list[int]()
        drained = reader.drain(final=True)
        while drained.read or drained.lost:
            found += numbers(drained.records)
            drained = reader.drain(final=True)
        assert reader.next_n == written
        assert found == list(range(written - len(found), written))
        assert len(found) >= min(written, slots) - torn
        reader.close()
