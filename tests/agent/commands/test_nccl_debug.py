"""What ``commwatch run`` does about ``NCCL_DEBUG``: nothing the user has set is touched."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from commwatch.wire import nccl_debug_file as debug
from commwatch_agent.commands.nccl_debug import Plan, in_memory, plan
from commwatch_agent.commands.output_filter import Passing
from tests import prefork
from tests.helpers import PATIENCE_S, clean_env, commwatch, wait_for

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


@pytest.mark.parametrize(
    ("shell", "files"),
    [
        ("{run} >>log 2>&1", {"log": 4}),
        ("{run} >>log 2>new", {"log": 4, "new": 0}),
        ("{run} >>log 2>/dev/null", {"log": 4}),
        ("{run} 2>&1 | cat", {}),
        ("{run} >&- 2>>log", {"log": 4}),
        ("exec >>log; rm log; {run} 2>&1", {}),
        ("COMMWATCH_JOB_OUTPUT=off {run} >>log 2>&1", {}),
        ("COMMWATCH_JOB_OUTPUT=what {run} >>log 2>&1", {"log": 4}),
    ],
)
def test_output_files(tmp_path: Path, shell: str, files: dict[str, int]) -> None:
    """Regular files that are a process's output are named once each, with what they had before; pipes, devices and deleted files are not."""
    (tmp_path / "log").write_text("old\n")
    script = (
        "import json, os; from pathlib import Path; from commwatch.wire.nccl_debug_file import output_files; "
        "Path('found').write_text(json.dumps(output_files(os.environ)))"
    )
    command = shell.format(run=f"{sys.executable} -c {shlex.quote(script)}")
    subprocess.run(["sh", "-c", command], cwd=tmp_path, env=clean_env(), check=True, timeout=PATIENCE_S)
    expected = []
    for name, size in files.items():
        about = (tmp_path / name).stat()
        place = {"device": about.st_dev, "inode": about.st_ino}
        expected.append({"output": str(tmp_path / name), **place, "size": size})
    assert json.loads((tmp_path / "found").read_text()) == expected


# -- the plan


def planned(tmp_path: Path, level: str = "warn", **env: str) -> Plan:
    """The plan for a job with that environment."""
    return plan({"NCCL_CONF_FILE": str(tmp_path / "none"), **env}, level, tmp_path / "50%" / "job")


def test_nothing_set(tmp_path: Path) -> None:
    """WARN goes to files beside the history, one for each process; ``info`` asks for more, ``off`` for nothing."""
    directory = tmp_path / "50%" / "job"
    file = f"{tmp_path}/50%%/job/%h.%p"
    assert planned(tmp_path) == Plan(
        {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": file}, [f"{directory}/{HOST}.*"], directory, "more"
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
    """A log file that the user has named is followed, whether the user or commwatch has set the level."""
    assert planned(tmp_path, NCCL_DEBUG_FILE="/l/%h-%p") == Plan({"NCCL_DEBUG": "WARN"}, [f"/l/{HOST}-[0-9]*"])
    assert planned(tmp_path, NCCL_DEBUG="INFO", NCCL_DEBUG_FILE="/l/%h-%p") == Plan(patterns=[f"/l/{HOST}-[0-9]*"])
    assert planned(tmp_path, NCCL_DEBUG="INFO", NCCL_DEBUG_FILE="log").patterns == [str(Path.cwd() / "log")]


def test_level_is_the_users(tmp_path: Path) -> None:
    """Where NCCL would write to standard output, its lines go into files and are shown from there; the level stays."""
    directory = tmp_path / "50%" / "job"
    file = {"NCCL_DEBUG_FILE": f"{tmp_path}/50%%/job/%h.%p"}
    expected = Plan(file, [f"{directory}/{HOST}.*"], directory, "all")
    assert planned(tmp_path, NCCL_DEBUG="INFO") == expected
    assert planned(tmp_path, "off", NCCL_DEBUG="INFO") == Plan()
    assert planned(tmp_path, "info", NCCL_DEBUG="WARN").remark == "NCCL_DEBUG=WARN stays as it is"
    assert planned(tmp_path, NCCL_DEBUG="VERSION") == Plan()
    conf = tmp_path / "conf"
    conf.write_text("NCCL_DEBUG=INFO")
    assert planned(tmp_path, NCCL_CONF_FILE=str(conf)) == expected


@pytest.mark.parametrize("file", ["/dev/stderr", "/dev/stdout", "/proc/self/fd/2"])
def test_stream_is_the_users(tmp_path: Path, file: str) -> None:
    """If the user sends NCCL's lines to a stream, they go there; a remark says that they are not read."""
    made = planned(tmp_path, NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=file)
    assert made == Plan(remark=f"no NCCL logs: NCCL_DEBUG_FILE={file} stays as it is")
    assert planned(tmp_path, NCCL_DEBUG_FILE=file) == Plan()


def test_not_in_memory() -> None:
    """Nothing is written to a file system in memory; a remark gives the remedy."""
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


# -- NCCL's files, shown


class Shown:
    """NCCL's files of a job, and what is shown of them."""

    def __init__(self, tmp_path: Path, shown: str = "all") -> None:
        self.files = tmp_path / "files"
        self.files.mkdir()
        self._out = tmp_path / "out"
        self._target = os.open(self._out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.passing = Passing(self.files, self._target, shown)  # type: ignore[arg-type]

    def after(self, name: str, text: bytes, final: bool = False) -> bytes:
        """What was shown once ``text`` has been added to a file."""
        with (self.files / name).open("ab") as file:
            file.write(text)
        self.passing.tick(final)
        return self._out.read_bytes()


def test_shows_whole_lines(tmp_path: Path) -> None:
    """The lines of all files come out once, each whole: a line that is being written waits for its end, or the job's."""
    job = Shown(tmp_path)
    assert job.after("h.1", b"one\ntw") == b"one\n"
    assert job.after("h.2", b"other\n") == b"one\nother\n"
    assert job.after("h.1", b"o\n") == b"one\nother\ntwo\n"
    assert job.after("h.1", b"end") == b"one\nother\ntwo\n"
    assert job.after("h.1", b"", final=True) == b"one\nother\ntwo\nend"


def test_whole_lines_of_whole_blocks(tmp_path: Path) -> None:
    """An incomplete line waits for its end, even if the available data fills whole blocks."""
    job = Shown(tmp_path)
    line = b"0123456789abcde\n"
    text = line * ((1 << 20) // len(line) - 1) + b"0123456789abcdef"
    assert job.after("h.1", text) == text[: -len(line)]
    assert job.after("h.2", b"other\n").endswith(line + b"other\n")
    assert job.after("h.1", b"\n").endswith(b"other\n0123456789abcdef\n")


def test_shows_much_at_once(tmp_path: Path) -> None:
    """Nothing is left out, however much comes at once and however long a line is."""
    text = b"".join(b"%d " % n + b"x" * (n % 300) + b"\n" for n in range(20_000)) + b"y" * 3_000_000 + b"\nend\n"
    assert Shown(tmp_path).after("h.1", text) == text


def test_same_process_number_again(tmp_path: Path) -> None:
    """A file that is begun anew is shown from its beginning."""
    job = Shown(tmp_path)
    job.after("h.1", b"first life\n")
    (job.files / "h.1").write_bytes(b"")
    assert job.after("h.1", b"next\n") == b"first life\nnext\n"


def test_job_asks_for_more(tmp_path: Path) -> None:
    """If the warnings are ours and the job sets NCCL_DEBUG itself, its own lines are printed and those that we requested are not."""
    job = Shown(tmp_path, "more")
    warning, more = b"\nh:1:1 [0] x.cc:1 NCCL WARN what\n", b"h:2:2 [0] NCCL INFO more\n"
    assert job.after("h.1", warning) == b""
    assert job.after("h.2", warning) == b""
    assert job.after("h.2", more) == warning + more
    assert job.after("h.2", more) == warning + more + more


def test_asked_for_by_us(tmp_path: Path) -> None:
    """Lines that only we have requested are not shown."""
    assert Shown(tmp_path, "none").after("h.1", b"h:1:1 [0] NCCL INFO more\n", final=True) == b""


def test_files_stay_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies far behind gives its disk space back; the file keeps its length, and nothing that is shown is missing."""
    monkeypatch.setattr("commwatch_agent.commands.output_filter.MOST_KEPT_BYTES", 1 << 20)
    job = Shown(tmp_path)
    text = b"0123456789abcde\n" * 65_536
    for n in range(1, 9):
        assert len(job.after("h.1", text)) == n * len(text)
    about = (job.files / "h.1").stat()
    assert about.st_size == 8 << 20
    assert about.st_blocks * 512 <= 3 << 20
    assert (job.files / "h.1").read_bytes().endswith(text)


def test_what_is_no_file(tmp_path: Path) -> None:
    """Links, pipes and files that cannot be read are passed over."""
    job = Shown(tmp_path)
    (tmp_path / "secret").write_text("secret\n")
    (job.files / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(job.files / "pipe")
    (job.files / "folder").mkdir()
    assert job.after("h.1", b"line\n") == b"line\n"


@pytest.mark.parametrize("trouble", ["full disk", "nobody reads", "closed"])
def test_cannot_be_shown(tmp_path: Path, trouble: str) -> None:
    """Where lines cannot be shown, they stay in NCCL's files, and nothing is raised."""
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    target = {"full disk": full, "nobody reads": writer, "closed": 9_999}[trouble]
    passing = Passing(tmp_path, target, "all")
    for _ in range(2):
        with (tmp_path / "h.1").open("ab") as file:
            file.write(b"line\n" * 100_000)
        passing.tick()
    assert (tmp_path / "h.1").read_bytes() == b"line\n" * 200_000
    os.close(writer)
    os.close(full)


def test_reader_that_does_not_block(tmp_path: Path) -> None:
    """A non-blocking output is waited for, and loses nothing."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    (tmp_path / "h.1").write_bytes(b"012345678\n" * 100_000)

    def show() -> None:
        Passing(tmp_path, write, "all").tick()
        os.close(write)

    shows = threading.Thread(target=show)
    shows.start()
    total = 0
    while piece := os.read(read, 10_000):
        total += len(piece)
    shows.join()
    os.close(read)
    assert total == 1_000_000


# -- around a job

#: A rank as NCCL sees it: writes where it is told to, and says what standard output is.
RANK = """
import os, socket, sys
host, pid = socket.gethostname().partition(".")[0], os.getpid()
file = os.environ.get("NCCL_DEBUG_FILE", "").replace("%h", host).replace("%p", str(pid))
out = open(file, "w") if file else sys.stdout
print(f"{host}:{pid}:{pid} [0] x.cc:1 NCCL WARN Cuda failure 'out of memory'", file=out, flush=True)
place = "terminal" if sys.stdout.isatty() else "none"
sys.stdout.write(f"{place} {os.environ.get('NCCL_DEBUG')}\\n")  # at once, for two ranks share the output
sys.stdout.flush()
print("words", file=sys.stderr)
"""
WARNED = "commwatch: NCCL error: CUDA or HIP failed: Cuda failure 'out of memory'"


def watched(directory: Path, *flags: str, code: str = RANK) -> list[str]:
    """What follows ``commwatch`` in the command of a watched job."""
    return ["run", "--dir", str(directory), "--port", "0", *flags, "--", sys.executable, "-c", code]


def anew(words: list[str]) -> list[str]:
    """The command in a new Python, for a test of a closed stream."""
    return [sys.executable, "-m", "commwatch", *words]


def forked(words: list[str]) -> list[str]:
    """The command, whose process starts sooner."""
    return [*prefork.commwatch_command(), *words]


def run_watched(directory: Path, *flags: str, code: str = RANK, **env: str) -> subprocess.CompletedProcess[str]:
    """A watched job to its end."""
    return commwatch(*watched(directory, *flags, code=code), env=clean_env(**env))


def in_terminal(words: list[str], env: dict[str, str]) -> tuple[int, str]:
    """Return exit code and output of a command in its own terminal."""
    terminal, theirs = pty.openpty()
    run = prefork.Commwatch(*words, env=env, streams=(theirs,) * 3, in_session=True)
    os.close(theirs)
    output = b""
    while True:
        try:
            piece = os.read(terminal, 65_536)
        except OSError:  # its last process has gone
            break
        output += piece
    os.close(terminal)
    return run.wait(PATIENCE_S), output.decode()


def test_warnings_of_a_job(tmp_path: Path) -> None:
    """Without NCCL_DEBUG a job's warnings are in files beside the history, and their explanation is printed at the end."""
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


def test_lines_are_shown(tmp_path: Path) -> None:
    """With NCCL_DEBUG set and no file, NCCL's lines still come out on standard output, and what they mean at the end."""
    done = run_watched(tmp_path, NCCL_DEBUG="INFO")
    assert done.returncode == 0
    shown = done.stdout.splitlines()
    assert "none INFO" in shown
    (line,) = [line for line in shown if "NCCL WARN" in line]
    assert len(shown) == 2
    assert "words\n" in done.stderr
    assert WARNED in done.stderr
    (file,) = tmp_path.glob(f"nccl/*/{HOST}.*")
    assert file.read_text() == line + "\n"


def test_job_sets_the_level(tmp_path: Path) -> None:
    """A job that sets NCCL_DEBUG itself gets the requested lines on standard output."""
    sets = "import os\nos.environ['NCCL_DEBUG'] = 'INFO'\n" + RANK.replace("x.cc:1 NCCL WARN", "NCCL INFO")
    assert "NCCL INFO" in run_watched(tmp_path, code=sets).stdout


def test_terminal_stays_a_terminal(tmp_path: Path) -> None:
    """A job in a terminal still has one, and every line comes out once."""
    code, output = in_terminal(watched(tmp_path), clean_env(NCCL_DEBUG="INFO", TERM="dumb"))
    assert code == 0
    lines = output.split("\r\n")
    assert lines.count("terminal INFO") == 1
    assert lines.count("words") == 1
    assert sum("NCCL WARN" in line for line in lines) == 1
    assert WARNED in output


STREAMS = "import os; print([os.fstat(n).st_ino for n in (0, 1, 2)], file=open({!r}, 'w')); raise SystemExit(3)"


@pytest.mark.parametrize("level", ["", "INFO"])
def test_streams_are_the_callers_own(tmp_path: Path, level: str) -> None:
    """Nothing lies between the job and its input, output and errors: they are the caller's very files."""
    seen, names = tmp_path / "seen", ("in", "out", "error")
    for name in names:
        (tmp_path / name).touch()
    with (
        (tmp_path / "in").open() as stdin,
        (tmp_path / "out").open("w") as stdout,
        (tmp_path / "error").open("w") as stderr,
    ):
        command, env = forked(watched(tmp_path / "run", code=STREAMS.format(str(seen)))), clean_env(NCCL_DEBUG=level)
        streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
        done = subprocess.run(command, **streams, env=env, timeout=PATIENCE_S, check=False)  # type: ignore[call-overload]
    assert done.returncode == 3
    assert seen.read_text() == f"{[(tmp_path / name).stat().st_ino for name in names]}\n"


def test_process_that_is_left_behind(tmp_path: Path) -> None:
    """The exit code is the job's, and a process that it leaves behind with its output does not hold us up."""
    leaves = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print('done'); sys.exit(7)"
    command, env = forked(watched(tmp_path, code=leaves)), clean_env(NCCL_DEBUG="WARN")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"done\n"
        assert run.wait(PATIENCE_S) == 7
        run.stdout.close()


def test_full_disk(tmp_path: Path) -> None:
    """Where NCCL's lines cannot be shown, for the output's disk is full, the job notices nothing."""
    warns = RANK.split("place =", maxsplit=1)[0] + "raise SystemExit(5)"
    with open("/dev/full", "wb") as full:
        command, env = forked(watched(tmp_path, code=warns)), clean_env(NCCL_DEBUG="INFO")
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=env, timeout=PATIENCE_S, check=False)
    assert done.returncode == 5, done.stderr
    assert WARNED in done.stderr.decode()


def test_closed_output(tmp_path: Path) -> None:
    """A job whose standard output is closed runs as it would without us."""
    command = ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *anew(watched(tmp_path, code="raise SystemExit(5)"))]
    done = subprocess.run(
        command, capture_output=True, env=clean_env(NCCL_DEBUG="INFO"), timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 5, done.stderr


GOES_ON = """
import os, sys
print(os.getpid(), flush=True)
sys.stdin.read()
for n in range(10_000):
    print(n, flush=True)
open({!r}, "w").close()
raise SystemExit(5)
"""


@pytest.mark.parametrize("killed", ["our children", "we"])
def test_job_survives_us(tmp_path: Path, killed: str) -> None:
    """SIGKILL of any process of commwatch leaves the job and its output intact, and also its exit code while ``commwatch run`` lives."""
    words, env = watched(tmp_path / "run", code=GOES_ON.format(str(tmp_path / "end"))), clean_env(NCCL_DEBUG="WARN")
    (theirs, to_job), (from_job, also_theirs) = os.pipe(), os.pipe()
    with open(os.devnull, "wb") as nothing, open(from_job, "rb") as stdout:
        run = prefork.Commwatch(*words, env=env, streams=(theirs, also_theirs, nothing.fileno()))
        os.close(theirs)
        os.close(also_theirs)
        job = int(stdout.readline())
        if killed == "we":
            run.kill()
            run.wait(PATIENCE_S)
        else:
            children = {int(child) for child in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()}
            assert job in children
            for child in children - {job}:
                os.kill(child, signal.SIGKILL)
        os.close(to_job)
        assert stdout.read().split() == [b"%d" % n for n in range(10_000)]
    wait_for((tmp_path / "end").exists, "the job's end")
    assert run.wait(PATIENCE_S) == (-9 if killed == "we" else 5)
