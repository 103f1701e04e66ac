"""The kernel's view of processes, whatever bytes their names contain."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commwatch.wire import identity
from commwatch_collectors.node import process
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


@pytest.mark.parametrize(("number", "killed"), [(signal.SIGKILL, True), (signal.SIGTERM, True), (signal.SIGURG, False)])
def test_ended_by_a_signal(number: int, killed: bool) -> None:
    """A process that a signal ends was killed, and one that goes on or ends by itself was not."""
    with subprocess.Popen(["sh", "-c", "read line; exit 3"], stdin=subprocess.PIPE) as shell:
        assert shell.stdin is not None
        assert not process.is_killed(shell.pid)
        os.kill(shell.pid, number)
        if not killed:
            shell.stdin.close()
        wait_for(lambda: process.state(shell.pid) == "zombie", "its end")
        assert process.is_killed(shell.pid) == killed


@pytest.mark.parametrize(("pending", "killed"), [(1 << signal.SIGKILL - 1, True), (1 << signal.SIGTERM - 1, False)])
def test_killed_and_not_run_since(tmp_path: Path, pending: int, killed: bool) -> None:
    """A process that does not know yet that it was killed has SIGKILL pending; another signal may be one that it waits for."""
    (tmp_path / "7").mkdir()
    fields = ["S", *["0"] * 5, "4194560", *["0"] * 21, str(pending), "0"]
    (tmp_path / "7" / "stat").write_text(f"7 (a) {' '.join(fields)}\n")
    assert process.is_killed(7, tmp_path) == killed


def test_usage_of_a_process_that_computes() -> None:
    """The main thread's time on a core grows by what the process takes."""
    before = process.usage(os.getpid())
    assert before is not None
    begin = time.thread_time_ns()
    while time.thread_time_ns() - begin < 50_000_000:
        pass
    after = process.usage(os.getpid())
    assert after is not None
    assert after.ran_ns - before.ran_ns >= 49_000_000
    assert after.wanted_ns >= before.wanted_ns


@pytest.mark.parametrize(
    ("lines", "folder", "stat", "throttled_ns"),
    [
        ("0::/job\n", "job", "usage_usec 5\nthrottled_usec 1500\n", 1_500_000),
        ("4:cpu,cpuacct:/job\n0::/other\n", "cpu/job", "nr_throttled 3\nthrottled_time 1500\n", 1500),
        ("0::/\n", ".", "usage_usec 5\n", None),
        ("0::/gone\n", ".", "throttled_usec 1500\n", None),
        ("", ".", "", None),
    ],
)
def test_usage_of_files(tmp_path: Path, lines: str, folder: str, stat: str, throttled_ns: int | None) -> None:
    """Times, page faults and the throttling of its cgroup, of version 1 or 2, as far as it is in sight."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "7").mkdir(parents=True)
    (cgroups / folder).mkdir(parents=True)
    (proc / "7/stat").write_text("7 (a b) R 1 1 1 0 -1 4194304 5 0 12 0 1 2 0 0 20 0 1 0 9 9 9")
    (proc / "7/schedstat").write_text("100 20 3\n")
    (proc / "7/cgroup").write_text(lines)
    (cgroups / folder / "cpu.stat").write_text(stat)
    assert process.usage(7, proc, cgroups) == process.Usage(100, 20, 12, throttled_ns)
    assert process.usage(8, proc, cgroups) is None


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("python\0train.py\0--lr\01", "train.py"),
        ("/usr/bin/python3\0-u\0-W\0ignore\0/home/me/train.py", "train.py"),
        ("python\0-X\0dev\0-m\0llm.train\0--x", "llm.train"),
        ("python\0-c\0import x", ""),
        ("python", ""),
        ("", ""),
    ],
)
def test_script(tmp_path: Path, command: str, script: str) -> None:
    """The script or module is that of the command line, without options of Python and its own arguments."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_text(command + "\0")
    assert process.script(7, tmp_path) == script


def test_user(tmp_path: Path) -> None:
    """The user is the one who runs the process, by name if there is one; a process that is not there has none."""
    assert process.user(os.getpid()) == pwd.getpwuid(os.getuid()).pw_name
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_text("Name:\tx\nUid:\t4294967294\t0\t0\t0\n")
    assert process.user(7, tmp_path) == "4294967294"
    assert process.user(8, tmp_path) == ""
