"""What a process does follows from what the kernel knows of it: right for real processes, and unknown where something cannot be read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commwatch_collectors.node.activity import Io, Parents, Process, Sample, io_of, process_of, read, sample
from commwatch_collectors.node.judged_activity import Activity, judged
from tests.helpers import NOBODY, needs, wait_for

STAT = "7 (a) R 1 (b) S 3 7 7 0 -1 4194304 5 0 0 0 150 50 20 10 20 0 1 0 1234 9 9"
IO = "rchar: 5\nwchar: 6\nsyscr: 1\nsyscw: 1\nread_bytes: 7\nwrite_bytes: 8\ncancelled_write_bytes: 0"


@contextmanager
def running(code: str, *arguments: str) -> Iterator[int]:
    """A process that runs this, and says when it has begun; it and its children end with the block."""
    command = [sys.executable, "-c", f"import os, sys, threading, time\nprint(flush=True)\n{code}", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


class Watched:
    """A process that is looked at again and again."""

    def __init__(self, pid: int) -> None:
        self.pid, self.parents, self.samples = pid, Parents(), list[Sample]()
        self.last: Activity | None = None

    def look(self) -> Activity | None:
        """What it does by now."""
        before = self.samples[-1] if self.samples else None
        taken = sample(self.pid, time.monotonic_ns(), self.parents.read(), before=before)
        assert taken is not None
        self.samples.append(taken)
        self.last = judged(self.samples, self.last)
        return self.last

    def until(self, kind: str, says: str = "") -> Activity:
        """What it does, as soon as that is this and its sentence has these words."""

        def found() -> Activity | None:
            now = self.look()
            return now if now is not None and now.kind == kind and says in now.says else None

        result: Activity = wait_for(found, f"{kind}; it is {self.last}")
        return result


WRITES = """
with open(sys.argv[1], "wb") as file:
    while True:
        file.seek(0)
        file.write(bytes(8_000_000))
        file.flush()
        os.fsync(file.fileno())
"""
READS = """
with open(sys.argv[1], "wb") as file:
    file.write(bytes(8_000_000))
while True:
    with open(sys.argv[1], "rb") as file:
        file.read()
    time.sleep(0.1)
"""
LOCK = "lock = threading.Lock()\nlock.acquire()\nlock.acquire()"
#: A thread that computes 2% of the time.
LITTLE = """
def little():
    while True:
        until = time.thread_time() + 0.002
        while time.thread_time() < until:
            pass
        time.sleep(0.1)
threading.Thread(target=little, daemon=True).start()
"""
CONNECTED = """
import socket
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
"""


@pytest.mark.parametrize(
    ("code", "kind", "says", "works"),
    [
        ("while True: pass", "computing", "computes", True),
        (f"threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()\n{LOCK}", "computing", "computes", True),
        (LOCK, "asleep", "is asleep in a lock", False),
        (LITTLE + LOCK, "asleep", "is asleep in a lock", False),
        ("import queue\nqueue.Queue().get()", "asleep", "is asleep in a lock", False),
        ("time.sleep(1000)", "asleep", "is asleep in a timer", False),
        ("os.read(os.pipe()[0], 1)", "asleep", "is asleep in a pipe", False),
        ("import select\nselect.epoll().poll()", "asleep", "is asleep until a file or socket is ready", False),
        (f"{CONNECTED}server.accept()\nserver.accept()", "network", "waits for a connection", None),
    ],
)  # fmt: skip
def test_alone(code: str, kind: str, says: str, works: bool | None) -> None:
    """A process that computes works, one that is asleep does not, though one of its threads does a little."""
    with running(code) as pid:
        found = Watched(pid).until(kind)
    assert (found.says, found.is_working) == (says, works)


def test_receiving() -> None:
    """A process that waits in a TCP socket waits for the network, where the kernel shows in which call it is."""
    with running(f"{CONNECTED}client.recv(1)") as pid:
        wait_for(lambda: Path(f"/proc/{pid}/wchan").read_text() not in ("0", "futex_do_wait"), "its wait")
        needs(os.access(f"/proc/{pid}/syscall", os.R_OK), "the right to see system calls")
        found = Watched(pid).until("network")
    assert found.is_working is None


@pytest.mark.parametrize(("code", "kind"), [(WRITES, "writing"), (READS, "reading")])
def test_files(tmp_path: Path, code: str, kind: str) -> None:
    """A process that reads or writes is shown so, with its rate, also if it pauses between two pieces."""
    with running(code, str(tmp_path / "checkpoint")) as pid:
        found = Watched(pid).until(kind)
    assert found.is_working
    assert found.says.startswith(f"is {kind} ")
    assert found.says.endswith("B/s")


@pytest.mark.parametrize("code", ["while True: pass", WRITES])
def test_child(tmp_path: Path, code: str) -> None:
    """A process that waits while its child works is working, and the child is named."""
    child = f"import os, sys\n{code}"
    with running(
        f"import subprocess\nsubprocess.run([sys.executable, '-c', {child!r}, sys.argv[1]])", str(tmp_path / "f")
    ) as pid:
        assert Watched(pid).until("child", "waits while its child process ").is_working


def test_many_short_children() -> None:
    """A process that waits for one child after the other, as a build does, is working."""
    again = "import subprocess\nwhile True: subprocess.run([sys.executable, '-c', 'sum(range(5_000_000))'])"
    with running(again) as pid:
        assert Watched(pid).until("child").is_working


def test_stopped() -> None:
    """A process that is stopped does not work, however much it did just before."""
    with running("while True: pass") as pid:
        watched = Watched(pid)
        watched.until("computing")
        os.kill(pid, signal.SIGSTOP)
        found = watched.until("stopped")
    assert (found.says, found.is_working) == ("is stopped", False)


def test_ended() -> None:
    """Of a process that has ended nothing is known, whether its parent has noticed or not."""
    with running("while True: pass") as pid:
        watched = Watched(pid)
        watched.until("computing")
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: watched.look() is None, "its end")
    assert sample(pid, 0, {}) is None


def test_another_users() -> None:
    """Of a process of another user it is known whether it computes; that it is asleep is not known, for it may read or write."""
    needs(os.getuid() == 0, "root, to act as another user")
    with running(LOCK) as pid:
        ours, theirs = os.pipe()
        if not (child := os.fork()):
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            first, second = (sample(pid, at_ns, Parents().read()) for at_ns in (0, 10**9))
            known = first and second and (first.own.io, first.waits_in, judged([first, second]))
            os.write(theirs, repr(known).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(ours, 1000) == b"(None, '', None)"
        os.close(ours)
        os.close(theirs)


def test_texts() -> None:
    """The texts of the kernel are read, whatever a process is called; texts that are something else are nothing."""
    assert io_of(IO) == Io(5, 6, 7, 8)
    assert process_of(STAT, io_of(IO)) == Process("a) R 1 (b", "S", 3, 1234, 2.0, 0.3, Io(5, 6, 7, 8))
    named = process_of(STAT.replace("a)", "\x1b[2J\n"))
    assert named is not None
    assert named.name == "?[2J? R 1 (b"
    for text in ("", "7 (a", "7 (a) S x y", STAT[:60]):
        assert process_of(text) is None
    for text in ("", "rchar: 5", IO.replace("7", "x")):
        assert io_of(text) is None


def tree(proc: Path, parents: dict[int, int]) -> None:
    """Processes as in ``/proc``, by their parents."""
    for pid, parent in parents.items():
        (proc / f"{pid}").mkdir(parents=True, exist_ok=True)
        (proc / f"{pid}" / "stat").write_text(STAT.replace("S 3", f"S {parent}", 1))
        (proc / f"{pid}" / "io").write_text(IO)


def test_children(tmp_path: Path) -> None:
    """Children, theirs and those that have just begun are seen; not other ranks, nor what has another parent by now."""
    tree(tmp_path, {1: 0, 7: 1, 8: 7, 9: 8, 10: 7, 11: 10, 12: 1, 13: 13})
    (tmp_path / "self").mkdir()
    (tmp_path / "14").mkdir()  # it ends while it is looked at
    known = Parents(tmp_path)
    first = sample(7, 0, known.read(), others={10}, proc=tmp_path)
    assert first is not None
    assert first.children is not None
    assert sorted(first.children) == [8, 9]
    tree(tmp_path, {9: 1, 15: 8})
    second = sample(7, 0, known.read(), proc=tmp_path)
    assert second is not None
    assert second.children is not None
    assert sorted(second.children) == [8, 10, 11, 15]


def test_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a node, or of a process, with too many processes children are not known: a part of them is none of them."""
    tree(tmp_path, {7: 1} | dict.fromkeys(range(100, 250), 7))
    found = sample(7, 0, Parents(tmp_path).read(), proc=tmp_path)
    assert found is not None
    assert found.children is None
    monkeypatch.setattr("commwatch_collectors.node.activity._MOST_PROCESSES", 100)
    assert Parents(tmp_path).read() is None


def test_partly_readable(tmp_path: Path) -> None:
    """What cannot be read of a process is not known; without its state there is no process."""
    tree(tmp_path, {7: 1})
    (tmp_path / "7" / "io").unlink()
    found = read(7, tmp_path)
    assert found is not None
    assert found.io is None
    (tmp_path / "7" / "stat").unlink()
    assert read(7, tmp_path) is None
