"""What the kernel says of processes, whatever bytes their names are made of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from commwatch.collectors import identity, process
from tests.helpers import wait_for

#: Takes a name that the kernel cuts after 15 bytes, in the middle of a character, and one that looks like the end of it.
NAMED = """
import ctypes, sys
assert ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0) == 0
print("named", flush=True)
sys.stdin.read()
"""


@contextmanager
def called(name: str) -> Iterator[int]:
    """A process of this name; its pid."""
    command = [sys.executable, "-c", NAMED, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"named\n"
        yield child.pid
        child.kill()


def test_name_cut_inside_a_character() -> None:
    """A process whose name is no UTF-8, for the kernel has cut it, is known as any other: its state, and when it began."""
    with called("訓練" * 4) as pid:
        with open(f"/proc/{pid}/comm", "rb") as file:
            assert b"\xe8\xa8" in file.read()[-4:]
        wait_for(lambda: process.state(pid) == "sleeping", "its sleep")
        assert identity._start_ticks(pid).isdecimal()


def test_name_like_the_end_of_a_name() -> None:
    """Brackets and blanks in a name end nothing."""
    with called("a) R 1 (b") as pid:
        wait_for(lambda: process.state(pid) == "sleeping", "its sleep")
        assert identity._start_ticks(pid).isdecimal()


def test_not_there() -> None:
    """Of a process that is not there nothing is known."""
    assert process.state(2**22 + 1) is None
    assert identity._start_ticks(2**22 + 1) == ""


def test_killed() -> None:
    """A process that was killed is exiting, though it is still there for its parent; one that lives is not, nor is one that is not there."""
    with called("a) R 1 (b") as pid:
        assert not process.is_exiting(pid)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: process.state(pid) == "zombie", "its end")
        assert process.is_exiting(pid)
    assert not process.is_exiting(pid)
