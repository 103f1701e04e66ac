"""Lines of the probe go to the standard error that the process had when the probe came, and into no file that has its number later."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commwatch.wire import descriptor
from tests.helpers import PATIENCE_S, clean_env

#: Before each script. ``checkpoint`` opens one as C does, which does not close it at ``exec``, or as Python does.
COMMON = """
import ctypes, io, os, resource, signal, sys, threading
libc = ctypes.CDLL(None)
def checkpoint(how="python"):
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    fd = libc.open(b"checkpoint", flags, 0o600) if how == "c" else os.open("checkpoint", flags, 0o600)
    os.write(fd, b"CHECKPOINT")
    return fd
def come():
    from commwatch.wire import standard_error
    return standard_error.say
"""
#: Programs in which a file has the number of standard error, or of the stream in its place, before a line of ours.
REUSED = {
    "python": "say = come(); os.close(2); checkpoint(); say('LINE')",
    "c": "say = come(); os.close(2); checkpoint('c'); say('LINE')",
    "before the probe": "os.close(2); checkpoint(); say = come(); say('LINE')",
    "before the probe, by C": "os.close(2); checkpoint('c'); say = come(); say('LINE')",
    "in a child": "say = come()\nif os.fork() == 0: os.close(2); checkpoint('c'); say('LINE'); os._exit(0)\nos.wait()",
    "by dup2": "say = come(); os.dup2(checkpoint(), 2); say('LINE')",
    "closed by its stream": "say = come(); sys.stderr.close(); os.close(2); checkpoint('c'); say('LINE')",
    "another stream on it": "say = come(); sys.stderr = open(2, 'w', closefd=False); os.close(2); checkpoint('c'); say('LINE')",
    "its stream in another": (
        "class Tee:\n def write(self, text): return sys.__stderr__.write(text)\n def flush(self): sys.__stderr__.flush()\n"
        "say = come(); sys.stderr = Tee(); os.close(2); checkpoint('c'); say('LINE')"
    ),
    "its stream in another, closed for a while": (
        "class Tee:\n def write(self, text): return sys.__stderr__.write(text)\n def flush(self): sys.__stderr__.flush()\n"
        "say = come(); sys.stderr = Tee(); os.close(2); say('LINE'); checkpoint('c'); sys.__stderr__.flush()"
    ),
    "its stream in another, before the probe": (
        "class Tee:\n def write(self, text): return sys.__stderr__.write(text)\n def flush(self): sys.__stderr__.flush()\n"
        "sys.stderr = Tee(); os.close(2); checkpoint(); say = come(); say('LINE')"
    ),
    "the number of a log": (
        "sys.stderr = open('log', 'w'); say = come(); n = sys.stderr.fileno(); os.closerange(3, 64); "
        "assert checkpoint() == n; say('LINE')"
    ),
    "all numbers": "say = come(); os.closerange(0, 64); fds = [checkpoint('c') for _ in range(3)]; say('LINE')",
}
#: Ways to write to standard error, or to have it written to, by Python, C and C++.
WAYS = (
    r"(?<!/dev/)\bstderr\b", r"__stderr__", r"STDERR_FILENO", r"\bprint\(", r"\bd?printf\(", r"\bperror\(", r"std::(cerr|clog|cout)\b",
    r"TORCH_WARN", r"warnings\.warn", r"\blogging\b", r"\bexcepthook\b",
)  # fmt: skip
#: Where they may be: what checks, and what runs in a process of its own.
CHECKED = {"wire/descriptor.py", "wire/standard_error.py", "probe/native/standard_error.h"}
OWN_PROCESS = {"probe/native/beside.py", "probe/native/build.py", "probe/torch_sweep.py"}


def run(script: str, where: Path, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[bytes]:
    """Run a program in a new Python."""
    return subprocess.run(
        [sys.executable, "-c", COMMON + script],
        cwd=where,
        env=clean_env(PYTHONUNBUFFERED=""),
        stdout=subprocess.PIPE,
        stderr=stderr,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.parametrize("case", REUSED)
def test_file_with_its_number(case: str, tmp_path: Path) -> None:
    """A file of the program that gets the number of its closed standard error has only what the program has written."""
    done = run(REUSED[case], tmp_path)
    assert (done.returncode, (tmp_path / "checkpoint").read_bytes()) == (0, b"CHECKPOINT"), done.stderr
    assert b"LINE" not in done.stdout


@pytest.mark.parametrize("case", ["python", "c", "in a child", "another stream on it"])
def test_from_file_to_file(case: str, tmp_path: Path) -> None:
    """The same where standard error was a file, of which only the identity differs."""
    with (tmp_path / "log").open("wb") as log:
        done = run(REUSED[case], tmp_path, stderr=log.fileno())
    assert (done.returncode, (tmp_path / "checkpoint").read_bytes()) == (0, b"CHECKPOINT")
    assert (tmp_path / "log").read_bytes() == b""


def test_never_open(tmp_path: Path) -> None:
    """A process that began without standard error has none, whatever it opens: the first file gets the number."""
    for how in ("python", "c"):
        for also in ("", "sys.stderr = sys.__stderr__ = open(2, 'w', closefd=False);"):
            script = f"{COMMON}say = come(); assert checkpoint({how!r}) == 2; {also} say('LINE')"
            command = ["sh", "-c", 'exec 2>&-; exec "$0" -c "$1"', sys.executable, script]
            done = subprocess.run(command, cwd=tmp_path, env=clean_env(), timeout=PATIENCE_S, check=False)
            assert (done.returncode, (tmp_path / "checkpoint").read_bytes()) == (0, b"CHECKPOINT")


def test_two_threads(tmp_path: Path) -> None:
    """No line lands in a file that another thread opens in place of standard error while lines are printed."""
    script = """
say, kept, over = come(), os.dup(2), threading.Event()
def swap():
    for n in range(2000):
        os.close(2)
        fd = libc.open(b"checkpoint", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(fd, b"x")
        os.dup2(kept, 2)
        if fd != 2: os.close(fd)
    over.set()
threading.Thread(target=swap).start()
while not over.is_set(): say("LINE")
"""
    done = run(f"sys.setswitchinterval(1e-5)\n{script}", tmp_path, stderr=subprocess.DEVNULL)
    assert (done.returncode, set((tmp_path / "checkpoint").read_bytes())) == (0, set(b"x"))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("say = come(); say('LINE')", b"LINE\n"),
        ("say = come(); os.closerange(3, 64); say('LINE')", b"LINE\n"),
        ("say = come(); sys.stderr = None; say('LINE')", b""),
        ("say = come(); sys.stderr = sys.stdout; say('LINE')", b"LINE\n"),
        ("say = come(); sys.stderr = io.StringIO(); say('LINE'); print(sys.stderr.getvalue(), end='')", b"LINE\n"),
        ("sys.stderr = open('log', 'w+'); say = come(); say('LINE'); print(open('log').read(), end='')", b"LINE\n"),
        ("say = come(); os.dup2(os.open('log', os.O_RDWR | os.O_CREAT), 2); say('LINE'); print(open('log').read())", b"\n"),
        ("class Tee:\n write = sys.__stderr__.write\n flush = sys.__stderr__.flush\nsay = come(); sys.stderr = Tee(); say('LINE')", b"LINE\n"),
        ("class Bad:\n def fileno(self): raise RuntimeError\n def flush(self): pass\nsay = come(); sys.stderr = Bad(); say('LINE')", b""),
        ("say = come(); say('LINE ' + '\\udcff' + 'x' * 10_000)", b"LINE \\udcff" + b"x" * 4084 + b"\n"),
        (
            "say = come(); limit = resource.RLIMIT_NOFILE; resource.setrlimit(limit, (8, 8))\n"
            "try:\n while True: os.dup(0)\nexcept OSError: pass\nsay('LINE')",
            b"LINE\n",
        ),
    ],
    ids=["plain", "others closed", "none", "stdout", "text", "log", "redirected", "tee", "bad", "long", "no number left"],
)  # fmt: skip
def test_where_a_line_goes(script: str, said: bytes, tmp_path: Path) -> None:
    """A line goes to standard error, or to the stream that the program has put in its place; after a redirection by ``dup2`` it is dropped."""
    done = run(script, tmp_path)
    assert (done.returncode, done.stdout + done.stderr) == (0, said)


@pytest.mark.parametrize("stream", ["sys.stderr", "open(2, 'w', closefd=False)"])
def test_pipe_that_takes_nothing(stream: str, tmp_path: Path) -> None:
    """A full pipe does not block, and one without a reader does not end a process in which SIGPIPE does: the line is lost."""
    script = (
        f"say = come(); sys.stderr = {stream}; signal.signal(signal.SIGPIPE, signal.SIG_DFL); say('LINE'); print('on')"
    )
    for full in (True, False):
        reader, writer = os.pipe()
        if full:
            os.set_blocking(writer, False)
            while True:
                try:
                    os.write(writer, b"x" * 4096)
                except BlockingIOError:
                    break
            os.set_blocking(writer, True)
        else:
            os.close(reader)
        done = run(script, tmp_path, stderr=writer)
        assert (done.returncode, done.stdout) == (0, b"on\n")
        os.close(writer)


def test_file_size_limit(tmp_path: Path) -> None:
    """A line that would pass the limit of file sizes is lost, and the kernel sends no signal."""
    script = (
        "say = come(); signal.signal(signal.SIGXFSZ, signal.SIG_DFL); resource.setrlimit(resource.RLIMIT_FSIZE, (12, 12));"
        "[say('LINE') for _ in range(5)]; print('on')"
    )
    for mode in ("wb", "ab"):
        with (tmp_path / "log").open(mode) as log:
            done = run(script, tmp_path, stderr=log.fileno())
        assert (done.returncode, done.stdout) == (0, b"on\n")
        assert (tmp_path / "log").read_bytes() == b"LINE\nLINE\n"


def test_inode_that_is_used_again(tmp_path: Path) -> None:
    """A new file with device and inode of a deleted one is another file: it was created later, or opened otherwise."""
    path = tmp_path / "file"
    with path.open("wb") as first:
        one = descriptor.OpenFile.of(first.fileno())
    with path.open("ab") as second:
        two = descriptor.OpenFile.of(second.fileno())
    assert one[:3] == two[:3]
    assert one != two
    path.unlink()
    with path.open("wb") as third:
        assert descriptor.OpenFile.of(third.fileno()).born_ns > one.born_ns > 0


def test_no_other_way() -> None:
    """Nothing that runs in the trainer writes to standard error, but for the two functions that check what it is."""
    collectors = Path(__file__).parents[3] / "collectors" / "commwatch"
    rooms = [collectors / name for name in ("probe", "wire", "nccl_plugin")]
    sources = [path for room in rooms for path in room.rglob("*.*") if path.suffix in (".py", ".c", ".cpp", ".h")]
    found = {
        str(path.relative_to(collectors))
        for path in (*sources, collectors / "torch_entry.py")
        if re.search("|".join(WAYS), re.sub(r"\bsnprintf\(", "", path.read_text(encoding="utf-8")))
    }
    assert found == CHECKED | OWN_PROCESS
