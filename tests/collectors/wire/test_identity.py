"""Who a process is in its job, and where its ring goes."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch.wire.identity import (
    boot_id,
    describe,
    job_id,
    make_private_dir,
    network_namespace,
    restart_count,
    ring_path,
    run_dir,
)
from tests.helpers import PATIENCE_S, clean_env, examples

# -- names ----------------------------------------------------------------------------------------

OURS = {"COMMWATCH_JOB": "ours"}
ELASTIC = {"TORCHELASTIC_RUN_ID": "elastic"}
SLURM = {"SLURM_JOB_ID": "4711"}
RAY = {"RAY_JOB_ID": "02000000"}


@pytest.mark.parametrize(
    ("env", "job"),
    [
        ({**OURS, **ELASTIC, **SLURM, **RAY}, "ours"),
        ({**ELASTIC, **SLURM, **RAY}, "elastic"),
        ({**SLURM, **RAY}, "4711"),
        (RAY, "02000000"),
        ({"COMMWATCH_JOB": "", **SLURM}, "4711"),
        ({"COMMWATCH_JOB": "  ", **SLURM}, "4711"),
        ({"COMMWATCH_JOB": " a b "}, "a b"),
        # What torchrun says where nobody gave it a name.
        ({"TORCHELASTIC_RUN_ID": "none", **SLURM}, "4711"),
        ({"TORCHELASTIC_RUN_ID": "None", **SLURM}, "4711"),
    ],
)
def test_job(env: dict[str, str], job: str) -> None:
    """A job has the name in the setting, otherwise the name from its launcher; an empty name is skipped."""
    assert job_id(env) == job


RUN_ID = "1b4e28ba-2fa1-41d2-883f-0016d3cca427"


@pytest.mark.parametrize(
    ("program", "job"),
    [
        ("/home/me/train.py", "train-1b4e28ba"),
        ("pkg/pretrain/__main__.py", "pretrain-1b4e28ba"),
        ("train", "train-1b4e28ba"),
        ("-m", RUN_ID),
        ("", RUN_ID),
    ],
)
def test_job_with_a_made_up_name(program: str, job: str) -> None:
    """A run that torchrun has given a random name has its script's, too, and the beginning of that; where there is none, all of it."""
    assert job_id({"TORCHELASTIC_RUN_ID": RUN_ID}, program) == job
    assert job_id({"COMMWATCH_JOB": RUN_ID}, program) == RUN_ID
    assert job_id({"TORCHELASTIC_RUN_ID": "llama-7b"}, program) == "llama-7b"


def test_job_of_static_ranks() -> None:
    """Where torchrun has no name at all, it is the script's with a hash of the launcher."""
    whole = job_id({}, "train.py")
    assert whole.startswith("local-")
    assert job_id({"TORCHELASTIC_RUN_ID": "none"}, "/x/train.py") == whole.replace("local", "train")
    assert job_id({"TORCHELASTIC_RUN_ID": "none"}, "") == whole


ASK = "import os; from commwatch.wire.identity import job_id; print(job_id({}))"


def test_job_without_a_name() -> None:
    """Without a name, children of one launcher share a name, and those of another launcher have another."""
    twice = "import subprocess, sys\nfor _ in range(2): subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    launched = [
        subprocess.run(
            [sys.executable, "-c", twice, ASK], capture_output=True, check=True, text=True, env=clean_env()
        ).stdout.split()
        for _ in range(2)
    ]
    assert [len(set(names)) for names in launched] == [1, 1]
    assert launched[0][0] != launched[1][0]
    assert launched[0][0].startswith("local-")


FIRST_RANK = """
import os, subprocess, sys, time
from commwatch.wire.identity import job_id
os.environ["MASTER_PORT"] = "29511"
if sys.argv[1] == "forks":  # a worker that loads data
    read, write = os.pipe()
    if os.fork() == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
else:
    given = {**os.environ, "LOCAL_RANK": sys.argv[1]}
    ask = "import os, sys; from commwatch.wire.identity import job_id; print(job_id(os.environ)); sys.stdout.flush(); sys.stdin.read()"
    second = subprocess.Popen([sys.executable, "-c", ask], env=given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    print(second.stdout.readline(), end="")
print(job_id(os.environ))
"""


def first_rank(what: str, local_rank: str) -> list[str]:
    """The jobs of what a first rank starts and of itself."""
    command = [sys.executable, "-c", FIRST_RANK, what]
    env = clean_env(LOCAL_RANK=local_rank)
    return subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=PATIENCE_S, check=True
    ).stdout.split()


def test_job_of_a_rank_that_starts_the_others() -> None:
    """The first rank is of the job of those that it starts; a child that is no other rank, or is forked, does not count."""
    (one,) = set(first_rank("1", "0"))
    (another,) = set(first_rank("1", "0"))
    assert one != another
    same, of_launcher = first_rank("0", "0")
    assert same != of_launcher
    assert first_rank("forks", "0") == [of_launcher]


@pytest.mark.parametrize(("value", "count"), [(None, 0), ("", 0), ("0", 0), ("3", 3), ("-1", 0), ("x", 0), ("1.5", 0)])
def test_restarts(value: str | None, count: int) -> None:
    """The launcher's count of restarts; what is no count is none."""
    assert restart_count({} if value is None else {"TORCHELASTIC_RESTART_COUNT": value}) == count


def test_network_namespace() -> None:
    """An identity has the number of the process's network namespace; what is no number is not known."""
    assert network_namespace(describe({}, 0, 1)) == Path("/proc/self/ns/net").stat().st_ino
    assert [network_namespace({"network_namespace": each}) for each in (7, 0, -7, True, "7", None)] == [
        7,
        0,
        0,
        0,
        0,
        0,
    ]
    assert network_namespace({}) == 0


def test_describe() -> None:
    """The identity says who, where and since when, and fits into JSON; what more is given is in it."""
    wall, mono = time.time_ns(), time.monotonic_ns()
    who = describe({**OURS, "TORCHELASTIC_RESTART_COUNT": "2", "LOCAL_RANK": "1"}, 5, 8, hook="native")
    wall_after, mono_after = time.time_ns(), time.monotonic_ns()
    assert json.loads(json.dumps(who)) == who
    told = [who[key] for key in ("job", "restart", "rank", "world_size", "local_rank", "pid", "boot_id", "hook")]
    assert told == ["ours", 2, 5, 8, 1, os.getpid(), boot_id(), "native"]
    assert mono <= who["started_ns"] <= mono_after
    assert wall - mono_after <= who["wall_offset_ns"] <= wall_after - mono


@pytest.mark.parametrize("value", [None, "", "x", "-1"])
def test_no_local_rank(value: str | None) -> None:
    """Without a local rank there is none, which is not rank 0."""
    assert describe({} if value is None else {"LOCAL_RANK": value}, 0, 1)["local_rank"] is None


def test_boot_id() -> None:
    """The boot has one name as long as it lasts, the same for every process."""
    ask = "from commwatch.wire.identity import boot_id; print(boot_id())"
    other = subprocess.run([sys.executable, "-c", ask], capture_output=True, check=True, text=True).stdout.strip()
    assert boot_id() == other != ""


# -- paths ----------------------------------------------------------------------------------------


def test_run_dir(tmp_path: Path) -> None:
    """The run directory is the one in the setting, otherwise this user's own, in memory if possible."""
    assert run_dir({"COMMWATCH_DIR": str(tmp_path)}) == tmp_path
    for env in ({}, {"COMMWATCH_DIR": ""}):
        own = run_dir(env)
        assert own.name == f"commwatch-{os.getuid()}"
        assert own.parent == Path("/dev/shm" if Path("/dev/shm").is_dir() else "/tmp")


@examples(100)
@given(
    st.text(min_size=1, max_size=300)
    | st.sampled_from(["..", ".", "../../etc/passwd", ".hidden", "a/b", "\0", "x" * 5000])
)
def test_ring_path(job: str) -> None:
    """Whatever the job is called, its ring lies in the directory under a visible, short name that was never given before."""
    directory = Path("/run/rings")
    first, second = ring_path(directory, job, 1, 3), ring_path(directory, job, 1, 3)
    assert first != second
    for path in (first, second):
        assert Path(os.path.normpath(path)).parent == directory
        assert path.name.endswith(".ring")
        # The agent passes over names that begin with a dot: a ring that is still being made.
        assert not path.name.startswith(".")
        assert len(os.fsencode(path.with_name(f".{path.name}.new").name)) <= 255


def test_ring_path_is_readable() -> None:
    """An ordinary job name, the restart and the rank can be read off the ring's name."""
    assert ring_path(Path("/r"), "llama-7b_v2.1", 4, 17).name.startswith("llama-7b_v2.1.r4.17.")


# -- the directory --------------------------------------------------------------------------------


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_private_directory(tmp_path: Path, umask: int) -> None:
    """The directory is private to this user, and so are the files in it, whatever the umask."""
    before = os.umask(umask)
    try:
        assert make_private_dir(tmp_path / "a" / "b", {}) == 0o600
        assert make_private_dir(tmp_path / "a" / "b", {}) == 0o600
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "a" / "b") == 0o700


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_group_directory(tmp_path: Path, umask: int) -> None:
    """With a group set, directory and files are the group's too, and files made in it belong to the group."""
    group = 12_345 if os.geteuid() == 0 else os.getgid()
    before = os.umask(umask)
    try:
        assert make_private_dir(tmp_path / "a", {"COMMWATCH_GROUP": str(group)}) == 0o640
    finally:
        os.umask(before)
    (tmp_path / "a" / "file").touch()
    assert mode_of(tmp_path / "a") == 0o2770
    assert (tmp_path / "a").stat().st_gid == (tmp_path / "a" / "file").stat().st_gid == group


def test_unknown_group(tmp_path: Path) -> None:
    """A group that does not exist is an ``OSError`` that names it, and no directory is made."""
    with pytest.raises(OSError, match="COMMWATCH_GROUP=no-such-group"):
        make_private_dir(tmp_path / "a", {"COMMWATCH_GROUP": "no-such-group"})
    assert list(tmp_path.iterdir()) == []


def test_not_a_directory(tmp_path: Path) -> None:
    """A file, or a link wherever it leads, in the directory's place is refused by name."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link"):
        with pytest.raises(OSError, match=f"{name} is not a directory"):
            make_private_dir(tmp_path / name, {})


SOMEBODY_ELSE = """
import os, sys
from pathlib import Path
from commwatch.wire.identity import make_private_dir
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
for env in ({}, {"COMMWATCH_GROUP": str(os.getgid())}):
    try:
        print(make_private_dir(Path(sys.argv[1]), env))
    except OSError as error:
        print(error)
"""


def test_directory_of_somebody_else() -> None:
    """A directory of another user is refused by name, with the remedy: any user may create one in /dev/shm."""
    lines = subprocess.run(
        [sys.executable, "-c", SOMEBODY_ELSE, "/etc"], capture_output=True, check=True, text=True
    ).stdout.splitlines()
    assert lines == ["/etc belongs to uid 0, not to this user; set COMMWATCH_DIR"] * 2
