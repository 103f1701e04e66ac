"""What ``commwatch run`` does about ``NCCL_DEBUG``: nothing the user has set is touched."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import pytest

from commwatch.collectors.nccl import debug
from commwatch.debugging import Plan, in_memory, plan
from commwatch.passing import Keeper, pass_on
from tests.helpers import PATIENCE_S, clean_env, wait_for

HOST = socket.gethostname().partition(".")[0]


# -- settings in force


def test_settings_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment wins over the user's file, that over the machine's; comments and other settings do not count."""
    etc, home, other = tmp_path / "nccl.conf", tmp_path / "home", tmp_path / "other.conf"
    home.mkdir()
    etc.write_text("NCCL_DEBUG=WARN\nNCCL_DEBUG_SUBSYS=ALL\nNCCL_IB_HCA=mlx5_0\n")
    monkeypatch.setattr(debug, "home_conf", lambda: None)
    assert debug.in_force({}, etc) == {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_SUBSYS": "ALL"}
    own = home / ".nccl.conf"
    own.write_text("# NCCL_DEBUG_SUBSYS=INIT\nNCCL_DEBUG=INFO\nNCCL_DEBUG=TRACE\n NCCL_DEBUG_FILE=/no\nnonsense\n")
    monkeypatch.setattr(debug, "home_conf", lambda: own)
    env: dict[str, str] = {}
    assert debug.in_force(env, etc) == {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "ALL"}
    other.write_text("NCCL_DEBUG=TRACE")
    assert debug.in_force({**env, "NCCL_CONF_FILE": str(other)}, etc)["NCCL_DEBUG"] == "TRACE"
    assert debug.in_force({**env, "NCCL_DEBUG": "VERSION"}, etc)["NCCL_DEBUG"] == "VERSION"
    assert debug.in_force({"NCCL_DEBUG": ""}, tmp_path / "none") == {}


@pytest.mark.parametrize(
    ("settings", "file"),
    [
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/l/%h.%p"}, f"/l/{HOST}.{os.getpid()}"),
        ({"NCCL_DEBUG": "warn", "NCCL_DEBUG_FILE": "/l/100%%"}, "/l/100%"),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "here"}, str(Path.cwd() / "here")),
        ({"NCCL_DEBUG": "VERSION", "NCCL_DEBUG_FILE": "/l/x"}, None),
        ({"NCCL_DEBUG": "debug", "NCCL_DEBUG_FILE": "/l/x"}, None),
        ({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/dev/stdout"}, None),
        ({"NCCL_DEBUG": "INFO"}, None),
        ({"NCCL_DEBUG_FILE": "/l/x"}, None),
    ],
    ids=["host and process", "percent", "here", "version", "unknown level", "standard output", "no file", "no level"],
)
def test_own_file(settings: dict[str, str], file: str | None) -> None:
    """A process's debug file is what NCCL would open: at levels that write, with host and pid."""
    assert debug.own_file({**settings, "NCCL_CONF_FILE": "/none"}) == file


# -- the plan


def planned(tmp_path: Path, level: str = "warn", **env: str) -> Plan:
    """The plan for a job with that environment."""
    return plan({"NCCL_CONF_FILE": str(tmp_path / "none"), **env}, level, tmp_path / "50%" / "job")


def test_nothing_set(tmp_path: Path) -> None:
    """WARN goes to files beside the history, one for each process; ``info`` asks for more, ``off`` for nothing."""
    directory = tmp_path / "50%" / "job"
    file = f"{tmp_path}/50%%/job/%h.%p"
    assert planned(tmp_path) == Plan(
        {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": file}, [f"{directory}/{HOST}.*"], directory=directory
    )
    assert planned(tmp_path, "info").env == {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,GRAPH,TUNING",
        "NCCL_DEBUG_FILE": file,
    }
    assert planned(tmp_path, "off") == Plan()
    assert debug.expanded(file, "7") == f"{directory}/{HOST}.7"


def test_subsystems_are_the_users(tmp_path: Path) -> None:
    """Subsystems that the user has chosen stay."""
    assert planned(tmp_path, "info", NCCL_DEBUG_SUBSYS="COLL").env.keys() == {"NCCL_DEBUG", "NCCL_DEBUG_FILE"}


def test_file_is_the_users(tmp_path: Path) -> None:
    """Where the user has named a file, it is followed, whoever has set the level."""
    assert planned(tmp_path, NCCL_DEBUG_FILE="/l/%h-%p") == Plan({"NCCL_DEBUG": "WARN"}, [f"/l/{HOST}-[0-9]*"])
    assert planned(tmp_path, NCCL_DEBUG="INFO", NCCL_DEBUG_FILE="/l/%h-%p") == Plan(patterns=[f"/l/{HOST}-[0-9]*"])
    assert planned(tmp_path, NCCL_DEBUG="INFO", NCCL_DEBUG_FILE="log").patterns == [str(Path.cwd() / "log")]


def test_level_is_the_users(tmp_path: Path) -> None:
    """Where NCCL writes to standard output, its lines are kept as they pass; the environment is not touched."""
    directory = tmp_path / "50%" / "job"
    kept = [f"{directory}/{HOST}.stdout*", f"{directory}/{HOST}.stderr*"]
    assert planned(tmp_path, NCCL_DEBUG="INFO") == Plan({}, kept, directory / HOST, directory)
    assert planned(tmp_path, "off", NCCL_DEBUG="INFO") == Plan()
    assert planned(tmp_path, NCCL_DEBUG="INFO", NCCL_DEBUG_FILE="/dev/stderr").capture == directory / HOST
    assert planned(tmp_path, "info", NCCL_DEBUG="WARN").remark == "NCCL_DEBUG=WARN stays as it is"
    assert planned(tmp_path, NCCL_DEBUG="VERSION") == Plan()
    conf = tmp_path / "conf"
    conf.write_text("NCCL_DEBUG=INFO")
    assert planned(tmp_path, NCCL_CONF_FILE=str(conf)).env == {}


def test_not_in_memory() -> None:
    """Nothing is written where files are memory; the user is told what to do."""
    made = plan({"NCCL_CONF_FILE": "/none"}, "warn", Path("/dev/shm/commwatch-test/nccl/job"))
    assert (made.env, made.patterns) == ({}, [])
    assert "--state" in made.remark


def test_in_memory(tmp_path: Path) -> None:
    """The innermost mount decides, the later one of two at the same place; a missing table says no."""
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "disk / ext4 rw 0 0\ntmpfs /run tmpfs rw 0 0\ndisk /run/my\\040disk ext4 rw 0 0\nram /run/ram ramfs rw 0 0\n"
        "tmpfs /two tmpfs rw 0 0\ndisk /two ext4 rw 0 0\n"
    )
    expected = {
        "/home/x": False,
        "/run": True,
        "/run/a/b": True,
        "/running": False,
        "/run/my disk/a": False,
        "/run/ram/a": True,
    }
    assert {path: in_memory(Path(path), mounts) for path in expected} == expected
    assert not in_memory(Path("/two/a"), mounts)
    assert not in_memory(Path("/run"), tmp_path / "none")


# -- the filter


def passed(data: list[bytes], file: Path, most_bytes: int = 1 << 20) -> bytes:
    """What comes out of the filter when it is written to piece by piece."""
    read, write = os.pipe()
    out = file.with_suffix(".out")
    with out.open("wb") as target:
        child = os.fork()
        if child == 0:
            os.close(read)
            for piece in data:
                os.write(write, piece)
            os._exit(0)
        os.close(write)
        pass_on(read, target.fileno(), Keeper(file, most_bytes))
        os.waitpid(child, 0)
    os.close(read)
    return out.read_bytes()


def test_passes_everything_on(tmp_path: Path) -> None:
    """Every byte comes out as it went in; only NCCL's and PyTorch's lines are kept, cut or not by the pieces."""
    file = tmp_path / "kept"
    text = (
        bytes(range(256)) * 300
        + b"\nstep 1\nh:1:2 [0] NCCL INFO Connected all rings\n[rank1]: RuntimeError\nloss NCC\nRCCL end"
    )
    pieces = [text[at : at + 7000] for at in range(0, len(text), 7000)]
    assert passed(pieces, file) == text
    assert file.read_bytes() == b"h:1:2 [0] NCCL INFO Connected all rings\n[rank1]: RuntimeError\nRCCL end\n"


def test_kept_lines_are_bounded(tmp_path: Path) -> None:
    """A full file is renamed, and so replaces the one before: no more than twice the bound is kept, the newest."""
    file = tmp_path / "kept"
    lines = [f"NCCL {n:04d}\n".encode() for n in range(1000)]
    assert passed(lines, file, 1000) == b"".join(lines)
    kept = (tmp_path / "kept.1").read_bytes() + file.read_bytes()
    assert kept.endswith(b"".join(lines[-50:]))
    assert len(kept) < 70_000


def test_no_line_ends(tmp_path: Path) -> None:
    """Output without a newline passes, and takes no memory."""
    file = tmp_path / "kept"
    keeper = Keeper(file)
    for _ in range(100):
        keeper.feed(b"x" * 65_000)
        assert len(keeper._rest) <= 65_536
    keeper.feed(b"NCCL\n")
    assert file.read_bytes().endswith(b"NCCL\n")


def test_file_that_cannot_be_written(tmp_path: Path) -> None:
    """Where nothing can be kept, everything still passes."""
    out = tmp_path / "out"
    for name in (str(tmp_path / "nope" / "kept"), "/dev/full"):
        read, write = os.pipe()
        os.write(write, b"NCCL one\ntwo\nNCCL three")
        os.close(write)
        with out.open("wb") as target:
            pass_on(read, target.fileno(), Keeper(Path(name)))
        os.close(read)
        assert out.read_bytes() == b"NCCL one\ntwo\nNCCL three"


def test_filter_outlives_signals(tmp_path: Path) -> None:
    """Signals are for the job: the filter ends when the job's output does."""
    command = [sys.executable, "-m", "commwatch.passing", str(tmp_path / "kept")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=clean_env()) as filtering:
        assert filtering.stdin is not None
        assert filtering.stdout is not None
        filtering.stdin.write(b"first\n")
        filtering.stdin.flush()
        assert filtering.stdout.read(6) == b"first\n"
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            filtering.send_signal(number)
        filtering.stdin.write(b"NCCL last\n")
        filtering.stdin.close()
        assert filtering.stdout.read() == b"NCCL last\n"
        assert filtering.wait(PATIENCE_S) == 0


TALKS = """
import pathlib, sys
try:
    while True:
        print("NCCL", flush=True)
except BrokenPipeError:
    pathlib.Path(sys.argv[1]).touch()
"""


def test_nobody_listens(tmp_path: Path) -> None:
    """When the reader of the output goes, the job is told so as it would be without us."""
    told, filter_command = tmp_path / "told", [sys.executable, "-m", "commwatch.passing", str(tmp_path / "kept")]
    talks = [sys.executable, "-c", TALKS, str(told)]
    read, write = os.pipe()
    with subprocess.Popen(talks, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as job:
        with subprocess.Popen(filter_command, stdin=job.stdout, stdout=write, env=clean_env()) as filtering:
            os.close(write)
            assert job.stdout is not None
            job.stdout.close()
            assert os.read(read, 4) == b"NCCL"
            os.close(read)
            assert filtering.wait(PATIENCE_S) == 0
        job.wait(PATIENCE_S)
    assert told.exists()


# -- around a job

#: A rank as NCCL sees it: writes where it is told to, and says what standard output is.
RANK = """
import os, socket, sys
host, pid = socket.gethostname().partition(".")[0], os.getpid()
file = os.environ.get("NCCL_DEBUG_FILE", "").replace("%h", host).replace("%p", str(pid))
out = open(file, "w") if file else sys.stdout
print(f"{host}:{pid}:{pid} [0] x.cc:1 NCCL WARN Cuda failure 'out of memory'", file=out, flush=True)
print("terminal" if sys.stdout.isatty() else "none", os.environ.get("NCCL_DEBUG"), flush=True)
print("words", file=sys.stderr)
"""
WARNED = "commwatch: NCCL error: CUDA or HIP failed: Cuda failure 'out of memory'"


def watched(directory: Path, *flags: str, code: str = RANK) -> list[str]:
    """The command of a watched job."""
    ours = [sys.executable, "-m", "commwatch", "run", "--dir", str(directory), "--port", "0", *flags]
    return [*ours, "--", sys.executable, "-c", code]


def run_watched(directory: Path, *flags: str, code: str = RANK, **env: str) -> subprocess.CompletedProcess[str]:
    """A watched job to its end."""
    command, patience = watched(directory, *flags, code=code), PATIENCE_S * 2
    return subprocess.run(command, capture_output=True, text=True, timeout=patience, check=False, env=clean_env(**env))


def in_terminal(command: list[str], env: dict[str, str]) -> tuple[int, str]:
    """Exit code and output of a command in a terminal of its own."""
    child, terminal = pty.fork()
    if child == 0:
        os.execve(command[0], command, env)
    output = b""
    while True:
        try:
            piece = os.read(terminal, 65_536)
        except OSError:  # its last process has gone
            break
        output += piece
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output.decode()


def test_warnings_of_a_job(tmp_path: Path) -> None:
    """Without NCCL_DEBUG a job's warnings lie in files beside the history, and what they mean stands at the end."""
    done = run_watched(tmp_path)
    assert (done.returncode, done.stdout) == (0, "none WARN\n"), done.stderr
    (file,) = tmp_path.glob(f"nccl/*/{HOST}.*")
    assert "NCCL WARN" in file.read_text()
    assert WARNED in done.stderr
    assert f"commwatch explain '{file.parent}/{HOST}.*'" in done.stderr


def test_nothing_is_left(tmp_path: Path) -> None:
    """Where NCCL wrote nothing, no folder is left; ``--nccl-debug off`` leaves the environment alone."""
    done = run_watched(tmp_path, "--nccl-debug", "off")
    assert "none None" in done.stdout, done.stderr
    assert not (tmp_path / "nccl").exists()
    assert run_watched(tmp_path, code="pass").returncode == 0
    assert not (tmp_path / "nccl").exists()


def test_output_passes(tmp_path: Path) -> None:
    """With NCCL_DEBUG set and no file, NCCL's lines are kept as the output passes; streams and order stay as they were."""
    done = run_watched(tmp_path, NCCL_DEBUG="INFO")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "none INFO"
    assert "NCCL WARN" in done.stdout.splitlines()[0]
    assert "words\n" in done.stderr
    assert WARNED in done.stderr
    (file,) = tmp_path.glob(f"nccl/*/{HOST}.stdout")
    assert file.read_text() == done.stdout.splitlines()[0] + "\n"


def test_terminal_stays_a_terminal(tmp_path: Path) -> None:
    """A job in a terminal still has one, and every line comes out once."""
    code, output = in_terminal(watched(tmp_path), clean_env(NCCL_DEBUG="INFO", TERM="dumb"))
    assert code == 0
    lines = output.split("\r\n")
    assert lines.count("terminal INFO") == 1
    assert lines.count("words") == 1
    assert sum("NCCL WARN" in line for line in lines) == 1
    assert WARNED in output


def test_exit_code_with_a_filter(tmp_path: Path) -> None:
    """The exit code is the job's, and a process that it leaves behind with its output does not hold us up."""
    leaves = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print('done'); sys.exit(7)"
    command, env = watched(tmp_path, code=leaves), clean_env(NCCL_DEBUG="WARN")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"done\n"
        assert run.wait(PATIENCE_S) == 7
        run.stdout.close()


def test_full_disk(tmp_path: Path) -> None:
    """Where the output's disk is full the job goes on, as it would without us."""
    prints = "import time\nfor n in range(50):\n    print('x' * 1000, flush=n < 0)\n    time.sleep(0.01)\nraise SystemExit(5)"
    with open("/dev/full", "wb") as full:
        command, env = watched(tmp_path, code=prints), clean_env(NCCL_DEBUG="INFO")
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=env, timeout=PATIENCE_S, check=False)
    assert done.returncode == 5, done.stderr


def test_reader_that_does_not_block(tmp_path: Path) -> None:
    """An output that somebody has set to non-blocking is waited for, and loses nothing."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    command = [sys.executable, "-m", "commwatch.passing", str(tmp_path / "kept")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=write, env=clean_env()) as filtering:
        os.close(write)
        assert filtering.stdin is not None
        feeder = threading.Thread(target=_feed, args=(filtering.stdin, b"0123456789" * 100_000))
        feeder.start()
        total = 0
        while piece := os.read(read, 10_000):
            total += len(piece)
        feeder.join()
        os.close(read)
    assert total == 1_000_000


def _feed(stream: IO[bytes], data: bytes) -> None:
    stream.write(data)
    stream.close()


def test_closed_output(tmp_path: Path) -> None:
    """A job whose standard output is closed runs as it would without us."""
    command = ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *watched(tmp_path, code="raise SystemExit(5)")]
    done = subprocess.run(
        command, capture_output=True, env=clean_env(NCCL_DEBUG="INFO"), timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 5, done.stderr


GOES_ON = """
import sys
print("NCCL", flush=True)
sys.stdin.read()
print("more", flush=True)
open({!r}, "w")
"""


def test_job_survives_us(tmp_path: Path) -> None:
    """A job whose output we pass on goes on when we are killed."""
    command, pipe = watched(tmp_path / "run", code=GOES_ON.format(str(tmp_path / "end"))), subprocess.PIPE
    env = clean_env(NCCL_DEBUG="WARN")
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=env) as run:
        assert run.stdout is not None
        assert run.stdin is not None
        assert run.stdout.readline() == b"NCCL\n"
        run.kill()
        run.wait()
        run.stdin.close()
        assert run.stdout.readline() == b"more\n"
    wait_for((tmp_path / "end").exists, "the job's end")
