"""A run directory in which anything may lie: the agent reads what is a ring, and goes on."""

from __future__ import annotations

import errno
import json
import logging
import os
import struct
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch.wire import events as ev
from commwatch.wire import ring, ring_reader
from commwatch.wire.ring_reader import BadRing, RingReader
from commwatch_agent.model.cells import SLOT_NS
from tests.helpers import (
    EPOCH_NS,
    MS,
    NOBODY,
    Trainer,
    Watch,
    examples,
    group_entry,
    identity,
    mark,
    operation,
    write_ring,
)

pytestmark = pytest.mark.long

FINE = operation(start_ns=0, end_ns=9)


def goes_on(watch: Watch, good: Trainer) -> None:
    """The agent still takes in what an honest trainer writes."""
    before = good.written
    good.write([FINE] * 7)
    for at in range(3):
        watch.tick(at * MS)
    assert [row.count for key, row in watch.rows("job_id").items() if key == ("good",)] == [before + 7]
    assert watch.store.trouble is None


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[Watch, Trainer]]:
    """An agent and an honest trainer."""
    with Trainer(tmp_path / "rings" / "good.ring", identity("good")) as good:
        good.call("name", [(group_entry(),)])
        yield Watch(tmp_path), good


# -- things in a ring's place ---------------------------------------------------------------------


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_link_to_a_ring(path: Path) -> None:
    write_ring(path.parent.parent / "elsewhere", [FINE], job="elsewhere").path.rename(path.with_name("kept"))
    path.symlink_to(path.with_name("kept"))


def a_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def a_directory(path: Path) -> None:
    path.mkdir()


def a_sparse_terabyte(path: Path) -> None:
    with open(path, "wb") as file:
        file.write(ring.MAGIC)
        file.truncate(1 << 40)


def an_endless_identity(path: Path) -> None:
    """So large as its header says: what is read of it must not be."""
    slots = 1 << 30
    with open(path, "wb") as file:
        sizes = (ring.VERSION, ring.RECORDS_AT, ev.RECORD_SIZE, slots, ring.IN_FLIGHT_SLOTS, 0xFFFFFFFF)
        file.write(ring.HEADER.pack(ring.MAGIC, *sizes))
        file.truncate(ring.file_bytes(slots))


def a_deep_identity(path: Path) -> None:
    made = write_ring(path.parent, [FINE], job="deep").path
    data = bytearray(made.read_bytes())
    data[ring.IDENTITY_AT : ring.IDENTITY_AT + 3000] = b"[" * 3000
    struct.pack_into("<I", data, ring.HEADER.size - 4, 3000)
    made.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize(
    "put",
    [a_pipe, a_link_to_a_ring, a_link_to_a_device, a_link_to_itself, a_directory, a_sparse_terabyte, an_endless_identity, a_deep_identity],
)  # fmt: skip
def test_no_ring(watched: tuple[Watch, Trainer], put: Callable[[Path], None], caplog: pytest.LogCaptureFixture) -> None:
    """What only bears a ring's name is refused once, by name, without waiting for it, following it or filling memory with it."""
    watch, good = watched
    path = watch.rings / "bad.ring"
    put(path)
    with caplog.at_level(logging.WARNING, "commwatch"):
        goes_on(watch, good)
    assert watch.intake.bad_rings == 1
    assert [path.name in record.getMessage() for record in caplog.records] == [True]
    assert set(watch.aggregate.jobs) == {"good"}


def test_ring_of_a_stranger(public: Path) -> None:
    """A ring that another user has put there is refused, unless both share the directory's group."""
    rings = public / "rings"
    path = write_ring(rings, [FINE]).path
    path.chmod(0o644)

    def refused() -> str:
        """The same, run as another user in a separate process."""
        pid = os.fork()
        if pid == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                RingReader(path).close()
            except BadRing as error:
                os._exit(3 if "belongs to uid" in str(error) else 4)
            except OSError:
                os._exit(5)
            os._exit(0)
        return {0: "read", 3: "refused"}.get(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "broken")

    os.chown(path, NOBODY + 1, NOBODY + 1)
    rings.chmod(0o777)
    assert refused() == "refused"
    os.chown(rings, 0, NOBODY)
    os.chown(path, NOBODY + 1, NOBODY)
    rings.chmod(0o2770)
    assert refused() == "read"
    os.chown(path, NOBODY, NOBODY)
    rings.chmod(0o777)
    assert refused() == "read"


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("put", [a_pipe, a_link_to_a_device, a_link_to_itself, a_directory])
def test_names_in_odd_places(watched: tuple[Watch, Trainer], put: Callable[[Path], None]) -> None:
    """Names that are no file are none; the ring is read without."""
    watch, good = watched
    odd = write_ring(watch.rings, [FINE] * 3, [], job="odd")
    odd.path.with_suffix(".names").unlink()
    put(odd.path.with_suffix(".names"))
    goes_on(watch, good)
    assert watch.rows("job_id")["odd",].count == 3


def test_names_that_cannot_be_read(watched: tuple[Watch, Trainer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Names on a disk that cannot read them are none; the ring is read without, and so are the other rings."""
    watch, good = watched
    write_ring(watch.rings, [FINE] * 3, job="broken")
    names_from = RingReader._names_from

    def failing(self: RingReader, file: FileIO, most: int) -> tuple[bytes, bool]:
        if self.path.name.startswith("broken"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return names_from(self, file, most)

    monkeypatch.setattr(RingReader, "_names_from", failing)
    goes_on(watch, good)
    assert watch.rows("job_id")["broken",].count == 3


def test_endless_names(watched: tuple[Watch, Trainer], monkeypatch: pytest.MonkeyPatch) -> None:
    """A names file that grows without end takes neither memory nor time without end; what came before its end counts."""
    watch, good = watched
    odd = write_ring(watch.rings, [FINE] * 3, [group_entry(label="before")], job="odd")
    monkeypatch.setattr(ring_reader, "MOST_NAMES_BYTES", 10_000)
    with open(odd.path.with_suffix(".names"), "ab") as file:
        file.write(b"\n" * 10_000 + json.dumps(group_entry(label="after")).encode() + b"\n")
        file.truncate(1 << 30)
    goes_on(watch, good)
    assert {group for job, group in watch.rows("job_id", "group") if job == "odd"} == {"before"}


# -- cut while it is read -------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0, 100, ring.RECORDS_AT, ring.RECORDS_AT + 1000])
def test_cut_while_it_is_read(watched: tuple[Watch, Trainer], left: int) -> None:
    """A ring that is cut short under the agent's eyes is data that is gone, and nothing worse: a mapping would end the agent."""
    watch, good = watched
    with Trainer(watch.rings / "odd.ring", identity("odd")) as odd:
        odd.write([FINE] * 5)
        watch.tick()
        os.truncate(odd.path, left)
        goes_on(watch, good)
        assert watch.rows("job_id")["odd",].count == 5
    goes_on(watch, good)


# -- anything at all ------------------------------------------------------------------------------

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from([10**400, 1 << 63, -1, "\ud800", True]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def some_of(entry: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """An honest entry with some of its values, or some of its keys, replaced."""
    changed = st.dictionaries(st.sampled_from([*entry, "op", "dtype", "group"]), JSON, max_size=3)
    return st.tuples(changed, st.sets(st.sampled_from([*entry]), max_size=2)).map(
        lambda both: {key: value for key, value in {**entry, **both[0]}.items() if key not in both[1]}
    )


RECORDS = st.lists(st.binary(min_size=ev.RECORD_SIZE - 8, max_size=ev.RECORD_SIZE - 8), max_size=8)


@examples(300)
@given(
    some_of(identity("odd")),
    st.lists(
        some_of(group_entry()) | some_of({"op": 40, "name": "c10d::x"}) | some_of({"dtype": 1, "name": "f"}), max_size=4
    ),
    st.dictionaries(st.integers(0, ring.RECORDS_AT - 1), st.integers(0, 255), max_size=6),
    RECORDS,
)
def test_any_ring(
    who: dict[str, Any], names: list[dict[str, Any]], changes: dict[int, int], records: list[bytes]
) -> None:
    """Whatever is in the header, identity, names and records, the agent reads it as data and continues with the other rings."""
    with TemporaryDirectory() as directory:
        watch = Watch(Path(directory))
        path = write_ring(watch.rings, [FINE] * len(records), [], job="x").path
        data = bytearray(path.read_bytes())
        blob = json.dumps(who).encode()[: ring.IN_FLIGHT_AT - ring.IDENTITY_AT]
        data[ring.IDENTITY_AT : ring.IDENTITY_AT + len(blob)] = blob
        struct.pack_into("<I", data, ring.HEADER.size - 4, len(blob))
        for n, record in enumerate(records):
            at = ring.RECORDS_AT + n * ev.RECORD_SIZE
            data[at + 4 : at + ev.RECORD_SIZE - 4] = record
        for at, value in changes.items():
            data[at] = value
        path.write_bytes(data)
        path.with_suffix(".names").write_text("".join(f"{json.dumps(entry)}\n" for entry in names))
        write_ring(watch.rings, [FINE] * 7, job="good")
        for at in range(3):
            watch.tick(at * MS)
        assert watch.rows("job_id")["good",].count == 7
        assert [job.job_id for job in watch.agent.jobs()].count("good") == 1
        assert watch.agent.ranks("good")
        assert watch.agent.groups("good")
        assert watch.agent.ranks(None)
        assert watch.agent.groups(None)


# -- numbers that nobody could have counted to ----------------------------------------------------


@pytest.mark.parametrize("counter", range(ring.OPS_STARTED + 1))
@pytest.mark.parametrize("value", [(1 << 64) - 1, 1 << 63, (1 << 62) - 1])
def test_any_counter(watched: tuple[Watch, Trainer], counter: int, value: int) -> None:
    """A counter of any value is taken as it is, or as unknown; the history stores it, and the next agent reads it."""
    watch, good = watched
    odd = write_ring(watch.rings, [FINE] * 3, job="odd")
    odd.counters[counter] = value
    goes_on(watch, good)
    again = Watch(watch.path.parent)
    goes_on(again, good)
    assert {view.job_id for view in again.agent.jobs()} == {"odd", "good"}


HUGE = (1 << 62) - 2
#: Each alone is within reason, and no two are.
LARGE = {
    "sizes": operation(start_ns=0, end_ns=9, size=HUGE),
    "durations": operation(start_ns=0, end_ns=HUGE - EPOCH_NS),
    "durations of messages": operation("recv", start_ns=0, end_ns=HUGE - EPOCH_NS, waited_us=(1 << 32) - 1),
}


@pytest.mark.parametrize("what", LARGE)
def test_sums_without_end(watched: tuple[Watch, Trainer], what: str) -> None:
    """Sums larger than 64 bits do not end the agent; later queries of the history are answered."""
    watch, good = watched
    write_ring(watch.rings, [LARGE[what]] * 20, job="odd")
    goes_on(watch, good)
    for at in (1, 2, 400):  # closed, stored, merged
        watch.tick(at * SLOT_NS)
        list(watch.store.tidy(EPOCH_NS + at * SLOT_NS, 1 << 40, 1 << 40, 1 << 61))
    assert watch.store.trouble is None
    again = Watch(watch.path.parent)
    assert again.rows("job_id")["odd",].count == 20
    for job in ("odd", "good"):
        again.agent.slots(0, 1 << 62, job)
        assert again.agent.ranks(job)


def test_sums_of_steps_without_end(watched: tuple[Watch, Trainer]) -> None:
    """Steps that claim to last centuries do not break the plots of their job."""
    watch, good = watched
    write_ring(watch.rings, [mark(n, n * (HUGE - EPOCH_NS) // 3) for n in range(4)] * 2, job="odd")
    goes_on(watch, good)
    watch.agent.slots(0, 1 << 62, "odd")
