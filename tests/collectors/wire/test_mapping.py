"""A mapped file needs no descriptor: whatever the program closes, it stays mapped, locked and its own."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from commwatch.wire import mapping, ring
from commwatch.wire.identity import describe
from commwatch.wire.mapping import MappedFile, is_locked
from commwatch.wire.ring import RingWriter
from commwatch.wire.ring_reader import RingReader
from tests.helpers import NOBODY, Trainer, descriptors, end_rank, identity, needs, operation, small_tmpfs, wait_for

SIZE = 8192


def run(script: str, *arguments: object) -> Any:
    """What a script of Python prints as JSON; it says nothing to standard error."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_no_descriptor_is_kept(tmp_path: Path) -> None:
    """A mapping, a ring and its names keep no descriptor, however many names there are."""
    before = descriptors()
    made = MappedFile(tmp_path / "file", SIZE, 0o600)
    writer = RingWriter(tmp_path / "a.ring", identity(), 128)
    for number in range(100):
        writer.name({"op": number, "name": "x" * 1000})
    assert descriptors() == before
    made.memory[:5] = b"there"
    assert (tmp_path / "file").read_bytes()[:5] == b"there"


CLOSES_EVERYTHING = """
import json, os, sys
from pathlib import Path
from commwatch.wire.ring import RingWriter
from commwatch.wire.ring_reader import RingReader
folder = Path(sys.argv[1])
writer = RingWriter(folder / "a.ring", {"job": "job"}, 128)
own = {}
def checkpoint(name):
    os.closerange(3, 4096)
    opened = [os.open(folder / f"{name}{n}", os.O_RDWR | os.O_CREAT) for n in range(30)]
    own.update({f"{name}{n}": fd for n, fd in enumerate(opened)})
    for fd in opened:
        os.write(fd, b"CHECKPOINT")
    for n in range(40):
        writer.name({"op": n, "name": "x" * 900})
    writer.write(1, *[0] * 13)
    for fd in opened:
        os.write(fd, b" WHOLE")
checkpoint("first")
checkpoint("second")
writer.close(7)
writer.release()
del writer
still = [os.fstat(fd).st_size for name, fd in own.items() if name.startswith("second")]
reader = RingReader(folder / "a.ring")
print(json.dumps([still, len(reader.names()), reader.drain(final=True).read]))
"""


def test_descriptors_of_the_user_are_the_users(tmp_path: Path) -> None:
    """A program that closes all descriptors, twice, finds in its own files what it wrote, and they stay open to our end and beyond."""
    still, names, records = run(CLOSES_EVERYTHING, tmp_path)
    assert (still, names, records) == ([16] * 30, 80, 2)
    found = {path.read_bytes() for path in tmp_path.iterdir() if path.suffix == ""}
    assert found == {b"CHECKPOINT WHOLE"}


HOLDS_A_LOCK = """
import os, sys, time
from pathlib import Path
from commwatch.wire.mapping import MappedFile
held = MappedFile(Path(sys.argv[1]), 8192, 0o600)
if sys.argv[2] == "closes":
    os.closerange(3, 4096)
    os.close(os.open(sys.argv[1], os.O_RDONLY))
if sys.argv[2] == "forks" and os.fork() == 0:
    held.memory[0:1] = b"x"
    os.write(1, b"child\\n")
    time.sleep(600)
    os._exit(0)
os.write(1, b"ready\\n")
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["sits", "closes", "forks"])
def test_lock_lasts_as_long_as_the_process(how: str, tmp_path: Path) -> None:
    """The lock stays whatever is closed, and ends with the process; a child that outlives it neither keeps the lock nor writes to the file."""
    command = [sys.executable, "-c", HOLDS_A_LOCK, str(tmp_path / "file"), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            said = {process.stdout.readline() for _ in range(2 if how == "forks" else 1)}
            assert said == ({"ready\n", "child\n"} if how == "forks" else {"ready\n"})
            assert is_locked(tmp_path / "file")
            process.kill()
            process.wait()
            wait_for(lambda: not is_locked(tmp_path / "file"), "the lock to fall")
            assert not any((tmp_path / "file").read_bytes())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


def test_let_go(tmp_path: Path) -> None:
    """What has been let go has no lock, and what is written to it goes nowhere."""
    made = MappedFile(tmp_path / "file", SIZE, 0o600)
    made.memory[:5] = b"there"
    assert is_locked(tmp_path / "file")
    made.let_go()
    made.memory[:5] = b"never"
    assert not is_locked(tmp_path / "file")
    assert (tmp_path / "file").read_bytes()[:6] == b"there\0"


def test_is_at(tmp_path: Path) -> None:
    """A mapping recognises its own file, under any name, and no other."""
    made = MappedFile(tmp_path / "file", SIZE, 0o600)
    (tmp_path / "file").rename(tmp_path / "moved")
    (tmp_path / "file").write_bytes(b"other")
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    assert [made.is_at(tmp_path / name) for name in ("moved", "file", "link", "none")] == [True, False, False, False]


@contextmanager
def limited(what: int, most: int) -> Iterator[None]:
    before = resource.getrlimit(what)
    resource.setrlimit(what, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def test_refusals_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file cannot be made, locked or mapped there is an ``OSError``, no descriptor and no file."""
    before = descriptors()
    with pytest.raises(FileNotFoundError):
        MappedFile(tmp_path / "none" / "file", SIZE, 0o600)
    with limited(resource.RLIMIT_FSIZE, SIZE - 1), pytest.raises(OSError, match="too large"):
        MappedFile(tmp_path / "file", SIZE, 0o600)
    with pytest.raises(OSError, match="memory"):
        MappedFile(tmp_path / "file", 1 << 60, 0o600)

    def no_lock(fd: int) -> None:
        raise OSError("no lock today")

    monkeypatch.setattr(mapping, "_lock", no_lock)
    with pytest.raises(OSError, match="no lock today"):
        MappedFile(tmp_path / "file", SIZE, 0o600)
    assert (descriptors(), list(tmp_path.iterdir())) == (before, [])


CUTS_SHORT = """
import json, os, sys
from commwatch.wire.ring import RingWriter
from pathlib import Path
if os.getuid() == 0:
    os.setuid(int(sys.argv[2]))
writer = RingWriter(Path(sys.argv[1], "a.ring"), {"job": "job"}, 128)
refused = []
def tried(do, *arguments):
    try:
        do(*arguments)
    except PermissionError:
        refused.append(do.__name__)
for name in ("a.ring", "a.names"):
    path = Path(sys.argv[1], name)
    tried(os.truncate, path, 0)
    tried(path.write_text, "")
    tried(path.open, "r+")
for number in range(40):
    writer.name({"op": number, "name": "x" * 1000})
for number in range(300):
    writer.write(1, *[0] * 13)
print(json.dumps(refused))
"""


def test_cannot_be_cut_short(tmp_path: Path) -> None:
    """Without root's rights the trainer's own user cannot cut short what is mapped, which would end the training (SIGBUS)."""
    place = tmp_path / "place"
    place.mkdir()
    for folder in (place, *place.parents[:4]):
        if os.getuid() == 0 and folder.stat().st_uid == 0 and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o777 if folder == place else folder.stat().st_mode | 0o711)
    assert run(CUTS_SHORT, place, NOBODY) == ["truncate", "write_text", "open"] * 2


# -- who lives ------------------------------------------------------------------------------------


def test_owner(tmp_path: Path) -> None:
    """The owner is the process that made the ring, until it is gone."""
    with Trainer(tmp_path / "a.ring") as trainer:
        reader = RingReader(trainer.path)
        assert reader.owner() == trainer.process.pid
        trainer.kill()
        assert reader.owner() is None
        reader.close()


MAKES_A_RING = """
import os, sys, time
from pathlib import Path
from commwatch.wire import identity
from commwatch.wire.ring import RingWriter
about = identity.describe({"COMMWATCH_JOB": "job"}, 0, 1)
writer = RingWriter(Path(sys.argv[1]), about, 128)
print("ready", flush=True)
time.sleep(600)
"""


@contextmanager
def overlay(at: Path) -> Iterator[Path]:
    """A file system that gives up a lock with the descriptor."""
    with small_tmpfs(at, 16 << 20) as mounted:
        needs(mounted, "root, to mount")
        for name in ("lower", "upper", "work", "merged"):
            (at / name).mkdir()
        options = ",".join(f"{name}dir={at / name}" for name in ("lower", "upper", "work"))
        subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", str(at / "merged")], check=True)
        try:
            yield at / "merged"
        finally:
            subprocess.run(["umount", "--lazy", str(at / "merged")], check=True)


@pytest.mark.parametrize("locks", [True, False])
def test_owner_is_found_without_locks(locks: bool, tmp_path: Path) -> None:
    """A trainer is seen by its number, and is seen to be gone, also on a file system where a mapping keeps no lock."""
    with overlay(tmp_path / "there") as unlocked:
        path = (tmp_path if locks else unlocked) / "a.ring"
        command = [sys.executable, "-c", MAKES_A_RING, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            reader = RingReader(path)
            assert reader.identity.get("locked", True) is locks
            assert (is_locked(path), reader.owner(), reader.owner()) == (locks, process.pid, process.pid)
            process.kill()
            process.wait()
            assert reader.owner() is None
            reader.close()


@pytest.mark.parametrize(
    "change", [{"pid": 1}, {"pid": -1}, {"pid": 1 << 70}, {"pid": True}, {"pid": "self"}, {"started_ticks": "7"},
               {"pid_namespace": 7}, {"pid_namespace": None}, {"started_ticks": None}, {"pid": None}],
)  # fmt: skip
def test_no_process_is_taken_at_its_word(change: dict[str, Any], tmp_path: Path) -> None:
    """A ring that names a process which did not make it has none that can be seen, locked or not."""
    about = {**describe({"COMMWATCH_JOB": "job"}, 0, 1), **change}
    for more in ({}, {"locked": False}):
        writer = RingWriter(tmp_path / "a.ring", {**about, **more}, 128)
        reader = RingReader(writer.path)
        assert reader.owner() == 0
        end_rank(writer)
        assert reader.owner() is None
        reader.close()


def test_lock_of_an_earlier_version(tmp_path: Path) -> None:
    """A trainer with an earlier commwatch, which locks for its process, is seen with its number."""
    script = f"""
import fcntl, os, sys, time
file = open({str(tmp_path / "a.ring")!r}, "r+b")
fcntl.lockf(file, fcntl.LOCK_EX)
print("ready", flush=True)
time.sleep(600)
"""
    end_rank(writer := RingWriter(tmp_path / "a.ring", identity(), 128))
    writer.path.chmod(0o600)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        reader = RingReader(writer.path)
        assert reader.owner() == process.pid
        process.kill()
        process.wait()
        assert reader.owner() is None
        reader.close()


def test_records_after_a_fork(tmp_path: Path) -> None:
    """A child's writes to an inherited ring are seen by no reader, while its parent's are."""
    writer = RingWriter(tmp_path / "a.ring", identity(), 128)
    child = os.fork()
    if child == 0:
        try:
            writer.write(*operation(start_ns=0, end_ns=1))
            writer.name({"op": 1})
            writer.counters[ring.DROPPED] = 9
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    writer.write(*operation(start_ns=0, end_ns=2))
    reader = RingReader(writer.path)
    assert (reader.drain(final=True).read, reader.names(), reader.counter(ring.DROPPED)) == (1, [], 0)
    reader.close()
