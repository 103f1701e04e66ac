"""Paths that a job of another user names make the agent read, write or search nothing but that user's own files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.sources.inspector import Inspector
from commwatch_agent.sources.log_requests import LogRequest
from commwatch_agent.sources.nccl import MOST_JOBS, NcclLogs
from commwatch_agent.sources.stack_capture import flight_recorder, recorder, trainer_of
from tests.helpers import PATIENCE_S, clean_env, wait_for
from tests.hostile.attacker import BOB, MALLORY, as_user, going_on, shared

pytestmark = pytest.mark.long

WARNING = "host:1:2 [0] misc/socket.cc:1 NCCL WARN Connect to 10.0.0.1<1> failed : Connection refused\n"
IDENTITY = {"job": "job", "rank": 0, "restart": 0, "wall_offset_ns": 0, "started_ns": 0, "host": "host", "pid": 1}


def requested(run: Path, uid: int, *patterns: str) -> None:
    """A request of a user to follow logs."""
    path = LogRequest("job", list(patterns), 0.0, os.getpid()).write(run)
    os.chown(path, uid, -1)


def followed(run: Path, aggregate: JobTable | None = None) -> tuple[list[str], dict[str, str]]:
    """The files that an agent follows for the job, and its troubles."""
    logs = NcclLogs(run, aggregate or JobTable(), threading.RLock())
    logs.tick()
    try:
        topologies = logs.topology("job")
        troubles = dict(logs._jobs["job"].follower.troubles) if logs.knows("job") else {}
        return [file for each in topologies for file in each.files], troubles
    finally:
        logs.close()


def named(how: str, path: Path) -> dict[str, object]:
    """How a rank names a file as NCCL's log, or as its output."""
    about = path.stat()
    place = {"output": str(path), "device": about.st_dev, "inode": about.st_ino, "size": 0}
    return place if how == "output" else {"nccl_log": str(path)}


#: Prints how many folders are listed and files opened while the agent looks at the logs once.
COUNTS = """
import sys, threading
from pathlib import Path
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.sources.nccl import NcclLogs
logs, counts = NcclLogs(Path(sys.argv[1]), JobTable(), threading.RLock()), {"os.scandir": 0, "open": 0}
logs.tick()
def count(event, arguments):
    if event in counts:
        counts[event] += 1
sys.addaudithook(count)
logs.tick()
print(counts["os.scandir"], counts["open"])
"""


@pytest.mark.parametrize("pattern", ["/*/*/*/*/*/*/*/*", "/*", "/root/*", "/proc/*/environ", "/usr/*/*", "/[a-z]*/x"])
@pytest.mark.parametrize("uid", [MALLORY, 0])
def test_search_of_the_file_system(pattern: str, uid: int, tmp_path: Path) -> None:
    """A request with wildcards costs a bounded look, whoever made it; for another user it searches no folder but those the user can write to."""
    requested(tmp_path, uid, pattern)
    command = [sys.executable, "-c", COUNTS, str(tmp_path)]
    done = subprocess.run(command, env=clean_env(), capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    listed, opened = map(int, done.stdout.split())
    if uid == MALLORY:
        assert (listed, opened < 30) == (1, True)  # the folder of the requests
    else:
        assert listed + opened < 50_000
    if uid == MALLORY:
        files, troubles = followed(tmp_path)
        assert files == []
        assert pattern in troubles


def test_many_requests(tmp_path: Path) -> None:
    """Requests of one user are bounded in number, size and patterns; those of another user are followed all the same."""
    for number in range(400):
        request = LogRequest("job", [f"/x{number}/*"], 0.0, os.getpid()).write(tmp_path)
        os.chown(request, MALLORY, -1)
        request.rename(tmp_path / "logs" / f"a{number}.json")
    requested(tmp_path, MALLORY, *(f"/y{number}" for number in range(100)))
    (tmp_path / "logs" / f"{os.getpid()}.json").rename(tmp_path / "logs" / "many.json")
    log = tmp_path / "log"
    log.write_text(WARNING)
    os.chown(log, BOB, -1)
    requested(tmp_path, BOB, str(log))
    logs = NcclLogs(tmp_path, JobTable(), threading.RLock())
    logs.tick()
    patterns = [each.pattern for each in logs._jobs["job"].follower.patterns]
    logs.close()
    assert str(log) in patterns
    assert len(patterns) <= 257
    assert not any(pattern.startswith("/y") for pattern in patterns)


def test_many_jobs(tmp_path: Path) -> None:
    """Requests for any number of jobs take bounded memory and files; the logs of a user with one job are followed beside them."""
    for number in range(200):
        log = tmp_path / f"log{number}"
        log.write_text(WARNING)
        os.chown(log, MALLORY, -1)
        request = LogRequest(f"job{number}", [str(log)], 0.0, os.getpid()).write(tmp_path)
        os.chown(request, MALLORY, -1)
        request.rename(tmp_path / "logs" / f"a{number}.json")
    log = tmp_path / "mine"
    log.write_text(WARNING)
    os.chown(log, BOB, -1)
    logs = NcclLogs(tmp_path, JobTable(), threading.RLock())
    try:
        logs.tick()
        requested(tmp_path, BOB, str(log))
        wait_for(lambda: logs.tick() is not None and logs.knows("job"), "the other user's logs")
        assert len(logs._jobs) <= MOST_JOBS
        assert sum(each.facts for each in logs._jobs.values()) <= 100_000 + 2_000 * MOST_JOBS
        assert sum(each.follower.most_files for each in logs._jobs.values()) <= 1024
    finally:
        logs.close()


def test_flood_of_requests(tmp_path: Path) -> None:
    """A folder full of requests is not searched at each tick: the longer a look takes, the longer the pause after it."""
    folder = tmp_path / "logs"
    folder.mkdir()
    for number in range(5000):
        (folder / f"{number}.json").write_text('{"job": 7}')
    command = [sys.executable, "-c", COUNTS, str(tmp_path)]
    done = subprocess.run(command, env=clean_env(), capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.split() == ["0", "0"]  # the second tick follows the first at once


@pytest.mark.parametrize("how", ["request", "ring", "output"])
def test_logs_of_others(how: str, public: Path) -> None:
    """As the NCCL log of a user's job only files of that user are read: not the agent's, not a third user's, no pipe, nothing behind a link."""
    run, aggregate = shared(public / "run"), JobTable()
    home = public / "home"
    home.mkdir()
    os.chown(home, MALLORY, MALLORY)
    for name, uid in (("good", MALLORY), ("root", 0), ("bob", BOB)):
        (home / name).write_text(WARNING)
        os.chown(home / name, uid, uid)
    (home / "link").symlink_to(home / "root")
    os.mkfifo(home / "pipe")
    names = ["good", "root", "bob", "link", "pipe"]
    if how == "request":
        requested(run, MALLORY, *(str(home / name) for name in names), f"{home}/[a-z]*")
    else:
        for rank, name in enumerate(names):
            totals = aggregate.open(f"ring{rank}", {**IDENTITY, "rank": rank}, MALLORY)
            totals.owner_uid = MALLORY
            totals.learn([named(how, home / name)])
        unknown = aggregate.open("ring9", {**IDENTITY, "rank": 9})
        unknown.learn([named(how, home / "good")])
    files, troubles = followed(run, aggregate)
    assert files == [str(home / "good")]
    assert troubles[str(home / "root")] == "belongs to uid 0"
    assert troubles[str(home / "bob")] == f"belongs to uid {BOB}"


def test_job_of_another(public: Path) -> None:
    """Logs that one user requests are not taken for those of another user's running job."""
    run, aggregate = shared(public / "run"), JobTable()
    log = public / "log"
    log.write_text(WARNING)
    os.chown(log, MALLORY, MALLORY)
    requested(run, MALLORY, str(log))
    assert followed(run, aggregate)[0] == [str(log)]
    aggregate.open("ring", IDENTITY).owner_uid = BOB
    assert followed(run, aggregate)[0] == []


def test_inspector_of_others(public: Path) -> None:
    """Of the folder that a rank names for NCCL Inspector only files of the rank's user are read."""
    aggregate = JobTable()
    totals = aggregate.open("ring", IDENTITY)
    totals.owner_uid = MALLORY
    totals.learn([{"inspector": str(public)}])
    (public / "host-pid1.log").write_text("{}\n")
    inspector = Inspector(None, aggregate, threading.RLock())
    try:
        inspector.tick()
        view = inspector.view("job")
    finally:
        inspector.close()
    assert view.files == []
    assert any("belongs to uid 0" in text for text in inspector._jobs["job"].follower.troubles.values())


# -- the Flight Recorder


#: A trainer with its memory in sight, or hidden (``prctl(PR_SET_DUMPABLE)``): then its folder in ``/proc`` belongs to root.
TRAINER = """
ctypes.CDLL(None).prctl(4, int(sys.argv[1]), 0, 0, 0)
"""


@pytest.mark.parametrize("in_sight", [0, 1])
@pytest.mark.parametrize(
    "how", ["pipe of root", "pipe of another", "link to a pipe of root", "link to a device", "own pipe"]
)
def test_pipe_of_the_recorder(how: str, in_sight: int, public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent writes to a pipe of the trainer's own user; another, or what a link leads to, is not even opened."""
    target, pipe = public / "target", public / "pipe_3.pipe"
    place = target if how.startswith("link") else pipe
    os.mkfifo(place)
    os.chown(place, *((MALLORY, MALLORY) if how == "own pipe" else (BOB, BOB) if how == "pipe of another" else (0, 0)))
    if how.startswith("link"):
        pipe.symlink_to("/dev/full" if how == "link to a device" else target)
    reader = os.open(place, os.O_RDONLY | os.O_NONBLOCK)
    variables = {
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(public / "pipe_"),
        "TORCH_FR_DUMP_TEMP_FILE": str(public / "dump_"),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    try:
        with going_on(MALLORY, TRAINER, in_sight) as process, trainer_of(process.pid) as trainer:
            assert trainer.env["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] == str(public / "pipe_")
            written = trainer.poke(pipe)
            assert written == (how == "own pipe")
            assert flight_recorder(trainer, 3, timeout_s=0.0) is None
            assert recorder(3, process.pid) == ("works" if how == "own pipe" else "down")
        assert os.read(reader, 10) == (b"1\n1\n" if how == "own pipe" else b"")
    finally:
        os.close(reader)


def test_dump_of_another(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dump that a trainer names is read only if it is of the trainer's user."""
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(public / "dump_"))
    (public / "dump_3").write_text(json.dumps({"entries": []}))
    with going_on(MALLORY, TRAINER, 1) as process, trainer_of(process.pid) as trainer:
        assert trainer.changed_ns(public / "dump_3") == 0
        os.chown(public / "dump_3", MALLORY, MALLORY)
        assert trainer.changed_ns(public / "dump_3") > time.time_ns() - 3600 * 10**9


def test_mark_of_the_probe(public: Path) -> None:
    """A trainer writes the sign that its probe is loaded into a file of its own user or root's, not where another member has put a link or a file."""
    from commwatch.wire.identity import mark_probe, probe_mark

    run = shared(public / "run")
    shared(run / "probes", MALLORY)
    mark = probe_mark(run, "job")
    env = {"COMMWATCH_DIR": str(run), "COMMWATCH_JOB": "job"}
    precious = public / "precious"
    precious.write_text("mine")
    as_user(MALLORY, "Path(sys.argv[1]).symlink_to(sys.argv[2])", mark, precious)
    with pytest.raises(OSError, match="symbolic links"):
        mark_probe(env)
    mark.unlink()
    as_user(MALLORY, "Path(sys.argv[1]).write_text('')", mark)
    with pytest.raises(OSError, match=f"belongs to uid {MALLORY}"):
        mark_probe(env)
    assert precious.read_text() == "mine"
