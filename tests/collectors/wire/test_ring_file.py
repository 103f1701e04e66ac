"""The rest of the ring file: operations in flight, names, who may read it, who lives, and no space for it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch.wire import events as ev
from commwatch.wire import ring, splits
from commwatch.wire.ring import IN_FLIGHT_SLOTS, RingWriter
from commwatch.wire.ring_reader import BadRing, RingReader
from tests.helpers import Trainer, descriptors, examples, identity, operation, small_tmpfs


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[RingWriter, RingReader]]:
    writer = RingWriter(tmp_path / "a.ring", identity(), 128)
    reader = RingReader(writer.path)
    yield writer, reader
    reader.close()


def launched(at: int, seq: int = 0) -> tuple[int, ...]:
    return operation(start_ns=0, end_ns=0, launch_ns=at, seq=seq)


# -- operations in flight -------------------------------------------------------------------------


def test_in_flight(pair: tuple[RingWriter, RingReader]) -> None:
    """What has begun and not ended is in the table, oldest first, and gone from it when it has ended."""
    writer, reader = pair
    slots = [writer.begin(*launched(at)) for at in (30, 10, 20)]
    assert [record.launch_ns for record in reader.in_flight()] == [10, 20, 30]
    assert writer.in_flight_now == 3
    writer.end(slots[1])
    assert [record.launch_ns for record in reader.in_flight()] == [20, 30]
    assert (writer.in_flight_now, reader.counter(ring.OPS_STARTED)) == (2, 3)


def test_blocked(pair: tuple[RingWriter, RingReader]) -> None:
    """An operation that a thread waits for shows this and since when, beside its other flags, until the wait ends."""
    writer, reader = pair
    slot = writer.begin(*operation(start_ns=0, end_ns=0, flags=ev.ASYNC))
    writer.begin(*launched(99))
    writer.blocked(slot, 7_000)
    record, other = reader.in_flight()
    assert (record.flags, record.start_ns) == (ev.ASYNC | ev.BLOCKED, 7_000)
    assert not other.flags
    writer.blocked(slot, 0)
    record, other = reader.in_flight()
    assert (record.flags, record.start_ns) == (ev.ASYNC, 0)


def test_outside(pair: tuple[RingWriter, RingReader]) -> None:
    """What a rank waits for outside operations is there while it lasts; the counts stay; what a later version may write is passed over."""
    writer, reader = pair
    assert reader.outside() == ring.Outside(0, 0, 0, "", "")  # as of an older writer
    writer.outside(9, 1, 2, ring.NEW_GROUP, "0-3")
    assert reader.outside() == ring.Outside(9, 1, 2, "new_group", "0-3")
    writer.outside(9, 1, 2, ring.STORE_WAIT, "x" * (ring.MOST_OUTSIDE_TEXT - 1) + "ü")
    assert reader.outside().about == "x" * (ring.MOST_OUTSIDE_TEXT - 1) + "�"
    writer.outside(9, 1, 2, 999, "x" * ring.MOST_OUTSIDE_TEXT)
    assert reader.outside()[:4] == (0, 1, 2, "")
    assert reader.identity == identity()
    writer.outside(0, 1, 3, ring.NOTHING, "")
    assert reader.outside() == ring.Outside(0, 1, 3, "", "")


def test_splits(pair: tuple[RingWriter, RingReader]) -> None:
    """The split sizes of the latest calls are there by group and number, of a number that is used again the latest ones; others are not."""
    writer, reader = pair
    assert splits.find(reader.splits(), 1, 7) is None
    for seq in range(splits.CALLS + 1):
        writer.note_splits(1, seq, splits.Splits((seq, 1 << 40), (2, 3)))
    most = splits.Splits((9,) * splits.MOST_MEMBERS, (4,) * splits.MOST_MEMBERS)
    writer.note_splits(2, 7, most)
    writer.note_splits(1, 7, splits.Splits((5, 6), (7, 8)))
    area = reader.splits()
    assert [splits.find(area, 1, seq) is not None for seq in (0, 1, 2, 3)] == [False, False, False, True]
    assert splits.find(area, 1, splits.CALLS) == ((splits.CALLS, 1 << 40), (2, 3))
    assert splits.find(area, 1, 7) == ((5, 6), (7, 8))
    assert splits.find(area, 2, 7) == most
    assert splits.find(area, 2, 8) is splits.find(b"", 2, 7) is None
    assert reader.counter(ring.SPLITS) == splits.CALLS + 3


@examples(60)
@given(st.binary(max_size=splits.AREA_BYTES), st.integers(0, 3))
def test_damaged_splits(damage: bytes, seq: int) -> None:
    """Whatever the file has in place of split sizes, sizes are found for as many ranks as an entry has room for, or none."""
    found = splits.find(damage.ljust(splits.AREA_BYTES, b"\0"), 0, seq)
    assert found is None or 0 < len(found.sends) == len(found.expects) <= splits.MOST_MEMBERS


def test_splits_of_an_older_writer(pair: tuple[RingWriter, RingReader]) -> None:
    """The file of a writer before version 3, which has no split sizes, is read as before."""
    writer, _ = pair
    writer.write(*operation(start_ns=1, end_ns=2))
    blob = bytearray(writer.path.read_bytes()[: -splits.AREA_BYTES])
    blob[8:12] = (2).to_bytes(4, "little")
    older = writer.path.with_name("older.ring")
    older.write_bytes(blob)
    reader = RingReader(older)
    assert (reader.splits(), reader.drain().read) == (b"", 1)
    reader.close()


def test_torn_operation_in_flight(pair: tuple[RingWriter, RingReader]) -> None:
    """An operation that is only half in the table is left out; the others are there."""
    writer, reader = pair
    slot, _ = (writer.begin(*launched(at)) for at in (10, 20))
    end = ring.IN_FLIGHT_AT + (slot + 1) * ev.RECORD_SIZE
    writer._map[end - 4 : end] = b"\0\0\0\0"
    assert [record.launch_ns for record in reader.in_flight()] == [20]


def test_a_slot_used_again(pair: tuple[RingWriter, RingReader]) -> None:
    """The next operation in a freed slot has nothing of the one before it."""
    writer, reader = pair
    slot = writer.begin(*launched(1))
    writer.blocked(slot, 5)
    writer.end(slot)
    writer.begin(*launched(2, seq=9))
    (record,) = reader.in_flight()
    assert (record.launch_ns, record.seq, record.flags, record.start_ns) == (2, 9, 0, 0)


def test_overflow(pair: tuple[RingWriter, RingReader]) -> None:
    """The table holds 64 operations; the next are counted, leave the others alone, and may be ended like any."""
    writer, reader = pair
    slots = [writer.begin(*launched(at)) for at in range(IN_FLIGHT_SLOTS + 3)]
    assert (IN_FLIGHT_SLOTS, slots[-3:], -1 in slots[:-3]) == (64, [-1, -1, -1], False)
    assert reader.counter(ring.IN_FLIGHT_OVERFLOW) == 3
    for slot in slots[-3:]:
        writer.blocked(slot, 5)
        writer.end(slot)
    assert [record.launch_ns for record in reader.in_flight()] == list(range(IN_FLIGHT_SLOTS))
    assert not any(record.flags for record in reader.in_flight())
    writer.end(slots[0])
    assert writer.begin(*launched(1000)) == slots[0]


@examples(60)
@given(st.lists(st.integers(-1, 100), max_size=200))
def test_table_is_a_set(turns: list[int]) -> None:
    """In whatever order operations begin and end, the table has those that have begun and not ended."""
    with TemporaryDirectory() as directory:
        writer = RingWriter(Path(directory) / "a.ring", identity(), 128)
        reader, open_, overflow = RingReader(writer.path), dict[int, int](), 0
        for at, turn in enumerate(turns):
            if turn < 0 or not open_:
                slot = writer.begin(*launched(at))
                if slot < 0:
                    overflow += 1
                else:
                    open_[at] = slot
            else:
                writer.end(open_.pop(sorted(open_)[turn % len(open_)]))
            assert [record.launch_ns for record in reader.in_flight()] == sorted(open_)
        assert (reader.counter(ring.IN_FLIGHT_OVERFLOW), writer.in_flight_now) == (overflow, len(open_))
        reader.close()


# -- names ----------------------------------------------------------------------------------------


def test_names(pair: tuple[RingWriter, RingReader]) -> None:
    """Names come in order, each once."""
    writer, reader = pair
    assert reader.names() == []
    writer.name({"op": 32, "name": "é"})
    writer.name({"op": 33, "name": "two\nlines"})
    assert reader.names() == [{"op": 32, "name": "é"}, {"op": 33, "name": "two\nlines"}]
    assert reader.names() == []
    writer.name({"op": 34})
    assert reader.names() == [{"op": 34}]
    again = RingReader(writer.path)
    assert len(again.names()) == 3
    again.close()


@pytest.mark.parametrize("reserved", [0, 1 << 17])
def test_half_a_line(pair: tuple[RingWriter, RingReader], reserved: int) -> None:
    """A last line that is not whole yet waits until it is; lines that make no sense are passed over, and so is what is reserved."""
    writer, reader = pair
    names = writer.path.with_suffix(".names")
    names.unlink()
    names.write_bytes(bytes(reserved))
    with names.open("r+b", buffering=0) as file:
        file.write(b'{"op": 1}\nrubbish\n[1]\n\n\xff\n{"op"')
        assert reader.names() == [{"op": 1}]
        assert reader.names() == []
        file.write(b': 2}\n{"op": 3}\n')
        assert reader.names() == [{"op": 2}, {"op": 3}]


def test_many_names(pair: tuple[RingWriter, RingReader]) -> None:
    """All names are found even if there are more than the reserved room, by a reader that reads now and then and by one that comes late."""
    writer, reader = pair
    names = [{"op": n, "name": "x" * (n * 37 % 3000)} for n in range(200)]
    found = []
    for n, entry in enumerate(names):
        writer.name(entry)
        if n % 7 == 0:
            found += reader.names()
    late = RingReader(writer.path)
    assert found + reader.names() == names == late.names()
    late.close()


@pytest.mark.parametrize("by", ["nothing", "another file", "a link", "a folder"])
def test_names_file_is_replaced(by: str, pair: tuple[RingWriter, RingReader], tmp_path: Path) -> None:
    """What lies in the place of the names file is left as it is, and a name that would need room there is refused."""
    writer, _ = pair
    path, other = writer.path.with_suffix(".names"), tmp_path / "other"
    path.unlink()
    other.write_bytes(b"of the user\n")
    if by == "another file":
        other = other.rename(path)
    elif by == "a link":
        path.symlink_to(other)
    elif by == "a folder":
        path.mkdir()
    refused = 0
    for n in range(60):
        try:
            writer.name({"op": n, "name": "x" * 900})
        except OSError:
            refused += 1
    assert refused > 30
    assert other.read_bytes() == b"of the user\n"
    assert {path.name for path in tmp_path.iterdir()} <= {"a.ring", "a.names", "other"}


def test_threads_name(pair: tuple[RingWriter, RingReader]) -> None:
    """Names that many threads give at once are all there, each whole."""
    writer, reader = pair

    def give(first: int) -> None:
        for n in range(first, first + 500):
            writer.name({"op": n})

    threads = [threading.Thread(target=give, args=(first,)) for first in range(0, 4000, 500)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entry["op"] for entry in reader.names()) == list(range(4000))


def test_no_names_file(pair: tuple[RingWriter, RingReader]) -> None:
    """A ring without its names file has no names, which is no error."""
    writer, reader = pair
    writer.path.with_suffix(".names").unlink()
    assert reader.names() == []


NAMES_UNTIL_FULL = """
import json, resource, sys
from pathlib import Path
from commwatch.wire.ring import RingWriter
from commwatch.wire.ring_reader import RingReader
writer = RingWriter(Path(sys.argv[1]), {"job": "job"}, 128)
limit = 20_000  # of the names file; the ring is smaller
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
said, refused = [], []
for n in range(60):
    if n == 40:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    try:
        writer.name({"op": n, "name": "x" * 900})
        said.append(n)
    except OSError:
        refused.append(n)
print(json.dumps([said, refused, [entry["op"] for entry in RingReader(writer.path).names()]]))
"""


def test_no_space_for_a_name(tmp_path: Path) -> None:
    """A name that does not fit is refused completely: names before and after it can be read, and no others."""
    command = [sys.executable, "-c", NAMES_UNTIL_FULL, str(tmp_path / "a.ring")]
    said, refused, found = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert refused
    assert said[-1] == 59
    assert found == said


# -- no space -------------------------------------------------------------------------------------


def test_no_space_in_memory(tmp_path: Path) -> None:
    """Where the file system has no room for the ring there is an ``OSError``, never a SIGBUS, and nothing is left behind."""
    with small_tmpfs(tmp_path / "small", 64 << 10) as mounted:
        if mounted:  # the limit of test_no_space_by_limit says the same to those who may not mount
            with pytest.raises(OSError, match="No space"):
                RingWriter(tmp_path / "small" / "a.ring", identity())
            assert list((tmp_path / "small").iterdir()) == []
            fits = RingWriter(tmp_path / "small" / "b.ring", identity(), 256)
            for n in range(1000):
                fits.write(*launched(n))
            assert RingReader(fits.path).drain(final=True).read == 256


MAKES_A_RING = """
import resource, sys
from pathlib import Path
from commwatch.wire.ring import RingWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
try:
    RingWriter(Path(sys.argv[1]), {"job": "job"})
except OSError:
    print("refused")
"""


UNMADE = """
import sys
from pathlib import Path
from commwatch.wire.ring import RingFile
for path in (Path(sys.argv[1], "none", "a.ring"), Path(sys.argv[1], "a.ring")):
    try:
        RingFile(path, {"note": "x" * 4000})
    except OSError:
        pass
"""


def test_no_ring_says_nothing(tmp_path: Path) -> None:
    """A ring that could not be made is gone without a word to standard error."""
    done = subprocess.run([sys.executable, "-c", UNMADE, str(tmp_path)], capture_output=True, check=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_no_space_by_limit(tmp_path: Path) -> None:
    """Where a limit forbids so large a file there is an ``OSError``, and nothing is left behind."""
    command = [sys.executable, "-c", MAKES_A_RING, str(tmp_path / "a.ring")]
    assert subprocess.run(command, capture_output=True, check=True, text=True).stdout == "refused\n"
    assert list(tmp_path.iterdir()) == []


def test_no_directory(tmp_path: Path) -> None:
    """Without a directory for it there is an ``OSError``, as there is for an identity too large for the header."""
    with pytest.raises(OSError, match="No such file"):
        RingWriter(tmp_path / "none" / "a.ring", identity())
    with pytest.raises(OSError, match="does not fit"):
        RingWriter(tmp_path / "a.ring", identity(note="x" * 4000))
    assert list(tmp_path.iterdir()) == []


# -- who may read it, who lives -------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o600, 0o640])
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_modes(tmp_path: Path, mode: int, umask: int) -> None:
    """Ring and names can be read by the given users, and written by no other, whatever the umask; nothing else is left in the directory."""
    before = os.umask(umask)
    try:
        RingWriter(tmp_path / "a.ring", identity(), 128, mode)
    finally:
        os.umask(before)
    assert {(path.name, stat.S_IMODE(path.stat().st_mode)) for path in tmp_path.iterdir()} == {
        ("a.ring", mode & 0o440),
        ("a.names", mode & 0o440),
    }


def test_alive(tmp_path: Path) -> None:
    """A ring's writer is alive while its process is, and not after, though the file is still there."""
    with Trainer(tmp_path / "a.ring") as trainer:
        reader = RingReader(trainer.path)
        assert (reader.alive(), reader.alive()) == (True, True)
        trainer.call("close", [(123,)])
        assert (reader.alive(), reader.counter(ring.CLOSED)) == (True, 123)
        trainer.kill()
        assert (reader.alive(), trainer.path.exists()) == (False, True)
        reader.close()


def test_identity_and_counters(tmp_path: Path) -> None:
    """The reader finds who writes, and what the writer says of itself."""
    who = identity("jöb", rank=3, note="x" * 3000)
    writer = RingWriter(tmp_path / "a.ring", who, 200)
    writer.counters[ring.HEARTBEAT] = 1 << 60
    reader = RingReader(writer.path)
    assert (reader.identity, reader.slots, reader.counter(ring.HEARTBEAT)) == (who, 200, 1 << 60)
    assert reader.counter(ring.CLOSED) == 0
    writer.counters[ring.DROPPED], writer.counters[ring.MODE] = 1 << 62, (1 << 62) - 1  # the first is implausible
    assert reader.counters() == [reader.counter(index) for index in range(ring.COUNTERS)]
    assert (reader.counters()[ring.DROPPED], reader.counters()[ring.MODE]) == (0, (1 << 62) - 1)
    reader.close()


def test_refusal_keeps_nothing_open(tmp_path: Path) -> None:
    """A file that is refused is not kept open."""
    (tmp_path / "a.ring").write_bytes(b"rubbish")
    before = descriptors()
    with pytest.raises(BadRing, match=r"a\.ring"):
        RingReader(tmp_path / "a.ring")
    assert descriptors() == before
