"""A member of the group that shares a run directory cannot make other users write, delete, profile or trust anything."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from commwatch.wire import crossing
from commwatch.wire import profile_files as files
from commwatch.wire.announcement import LOCK, answering, operators, requesters
from commwatch.wire.ring_reader import RingReader
from commwatch_agent.config_sources import load
from commwatch_agent.history.chunks import Damaged
from commwatch_agent.history.history import History
from commwatch_agent.history.job_exit import Exit, Exits, leave
from commwatch_agent.history.retention import MOST_EXITS
from commwatch_agent.history.store import begin
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.runtime.run_lock import CannotStart, lock_directory
from commwatch_agent.sources.log_requests import LogRequest
from commwatch_agent.sources.nccl import NcclLogs
from commwatch_agent.sources.profiles import Profiles
from commwatch_alerts.kept import KeptFile
from tests.helpers import Trainer, agent, clean_env, commwatch, wait_for
from tests.hostile.attacker import BOB, MALLORY, as_user, going_on, shared

pytestmark = pytest.mark.long

#: Plays the agent of a run directory, with a history of its own.
PLAYS_AGENT = """
run, place = Path(sys.argv[1]), Path(sys.argv[2])
lock = os.open(run / "agent.lock", os.O_RDWR | os.O_CREAT, 0o640)
fcntl.flock(lock, fcntl.LOCK_EX)
announce(run, lock, {"url": "http://127.0.0.1:1", "history": str(place / "history.sqlite"), "pid": os.getpid()})
"""
#: As NCCL does: writes to the debug file that its environment names.
AS_NCCL = """
import os, socket
name = os.environ["NCCL_DEBUG_FILE"].replace("%h", socket.gethostname().partition(".")[0]).replace("%p", str(os.getpid()))
print(name)
open(name, "w").write("NCCL WARN a warning\\n")
"""


@pytest.fixture
def theirs(public: Path) -> Path:
    """A folder of the attacker's that everybody can reach and write to."""
    place = public / "theirs"
    place.mkdir()
    os.chown(place, MALLORY, MALLORY)
    place.chmod(0o777)
    return place


def test_agent_of_another(public: Path, theirs: Path) -> None:
    """`commwatch run` believes no agent of another user in a shared directory: its job writes nothing where that one says."""
    run, home = shared(public / "run"), public / "home"
    home.mkdir(mode=0o700)
    env = clean_env(COMMWATCH_GROUP=str(MALLORY), XDG_STATE_HOME=str(home), HOME=str(home))
    command = ("run", "--dir", run, "--port", "0", "--state", home / "state", "--", "python3", "-c", AS_NCCL)
    with going_on(MALLORY, PLAYS_AGENT, run, theirs):
        assert answering(run, crossing.ANYBODY) is not None  # it is one that could be believed
        done = commwatch(*command, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith(f"{home}/state/nccl/")
    assert "watching at" in done.stderr  # its own agent
    assert list(theirs.iterdir()) == []


def test_whose_agent_is_believed(public: Path, theirs: Path) -> None:
    """For what acts for a user, agents of this user, of root, and of the owner of a directory that only root could give away are believed."""
    run = shared(public / "run")
    with going_on(MALLORY, PLAYS_AGENT, run, theirs):
        assert answering(run, operators(run)) is None
        os.chown(run, MALLORY, MALLORY)
        assert answering(run, operators(run)) is not None  # only root can write to the folder above
        public.chmod(0o1777)
        assert answering(run, operators(run)) is None  # as in /tmp: everybody could have made it


def test_lock_of_an_agent_that_has_ended(public: Path, theirs: Path) -> None:
    """Whoever locks the file of another user's agent that was killed is not taken for that agent."""
    run = shared(public / "run")
    with going_on(BOB, PLAYS_AGENT, run, theirs):
        assert answering(run, crossing.user(BOB)) is not None
    holds = "lock = os.open(Path(sys.argv[1]) / 'agent.lock', os.O_RDONLY); fcntl.flock(lock, fcntl.LOCK_EX)"
    with going_on(MALLORY, holds, run):
        assert answering(run, crossing.user(BOB)) is None


def test_lock_in_the_way(public: Path) -> None:
    """A lock file of another user is refused with one line: whoever made it could announce another agent."""
    run = shared(public / "run")
    as_user(MALLORY, "os.close(os.open(Path(sys.argv[1]) / 'agent.lock', os.O_RDWR | os.O_CREAT, 0o666))", run)
    (run / LOCK).chmod(0o666)
    with pytest.raises(CannotStart, match=f"belongs to uid {MALLORY}"):
        lock_directory(load({}, dir=run))


def test_lock_and_announcement_stay(public: Path) -> None:
    """While an agent of the directory's owner runs, a member cannot remove or replace its lock, announcement or token."""
    run = shared(public / "run")
    with agent(run, "--state", str(public / "state"), env=clean_env(COMMWATCH_GROUP=str(MALLORY))):
        for name in ("agent.lock", "agent.json", "agent.token", "rings"):
            for what in ("os.unlink(path)", "path.rename(path.with_name('x'))", "Path('/tmp/x').rename(path)"):
                tried = f"path = Path(sys.argv[1])\ntry: {what}\nexcept OSError as error: print(error.strerror)"
                assert as_user(MALLORY, tried, run / name) != ""
        found = answering(run, crossing.own())
        assert found is not None
        assert found.uid == 0


# -- profiles


def _request(run: Path, owner: int) -> Path:
    path = files.request_path(run, "job")
    path.parent.mkdir(exist_ok=True)
    request = files.Request("a1", "job", 50, [0], time.time() + 600, "job", ["host:1"])
    files.write(path, request, {"COMMWATCH_GROUP": str(MALLORY)})
    os.chown(path, owner, MALLORY)
    return path


def test_request_of_a_profile(public: Path, theirs: Path) -> None:
    """A trainer obeys requests of its own user, of root, and of the agent that watches; not of another member of the group."""
    run = shared(public / "run")
    path = _request(run, MALLORY)
    with going_on(BOB, PLAYS_AGENT, run, theirs):
        for owner in (BOB, 0):
            os.chown(path, owner, MALLORY)
            assert files.read_request(path, requesters(run)).id == "a1"
        os.chown(path, MALLORY, MALLORY)
        with pytest.raises(crossing.Refused, match=f"belongs to uid {MALLORY}"):
            files.read_request(path, requesters(run))
    os.chown(path, BOB, MALLORY)
    with pytest.raises(crossing.Refused):  # the agent has ended
        files.read_request(path, requesters(run))


def test_requests_of_an_earlier_agent(public: Path) -> None:
    """An agent takes no request of a profile from another member for one of its own earlier ones, and removes it."""
    run = shared(public / "run")
    path = _request(run, MALLORY)
    profiles = Profiles(run, public / "kept", None)  # type: ignore[arg-type]
    assert profiles.get("a1") is None
    assert not path.exists()


# -- folders in the run directory


def test_links_in_place_of_folders(public: Path) -> None:
    """A member who puts a link in the place of a folder makes the agent read, write and delete nothing behind it."""
    run, precious = shared(public / "run"), public / "precious"
    precious.mkdir(mode=0o700)
    for name in ("7.json", "x.request.json", "job.r0.0.1.ring", "a.claim"):
        (precious / name).write_text(json.dumps(["job", 1, 1.0]))
        os.utime(precious / name, (1, 1))
    for name in ("profiling", "exits", "logs", "rings", "probes"):
        as_user(MALLORY, "Path(sys.argv[1]).symlink_to(sys.argv[2])", run / name, precious)
    before = {path.name: path.read_text() for path in precious.iterdir()}
    exits = Exits(run)
    assert exits.take() == []
    exits.remove()
    profiles = Profiles(run, public / "kept", None)  # type: ignore[arg-type]
    profiles.tidy(time.time())
    logs = NcclLogs(run, JobTable(), threading.RLock())
    logs.tick()
    with pytest.raises(OSError, match=r"not a directory|symbolic links"):
        LogRequest("job", ["/logs/*"], 0.0, 7).write(run)
    with pytest.raises(CannotStart):
        lock_directory(load({"COMMWATCH_GROUP": str(MALLORY)}, dir=run))
    assert {path.name: path.read_text() for path in precious.iterdir()} == before


def test_links_in_place_of_files(public: Path) -> None:
    """Through a link or a pipe that a member has put in the place of a file nothing is read or written."""
    run, precious = shared(public / "run"), public / "precious"
    precious.write_text("mine")
    for name in ("told.json", f".told.json.{os.getpid()}"):
        as_user(MALLORY, "Path(sys.argv[1]).symlink_to(sys.argv[2])", run / name, precious)
    kept = KeptFile(run / "told.json")
    assert kept.load(str) is None
    assert kept.save("{}")
    assert precious.read_text() == "mine"
    assert not (run / "told.json").is_symlink()


def test_state_of_another(public: Path) -> None:
    """What another member has put in the place of the agent's memory of alerts is not believed."""
    run = shared(public / "run")
    as_user(MALLORY, "Path(sys.argv[1]).write_text('{}')", run / "told.json")
    assert KeptFile(run / "told.json").load(str) is None


def test_any_number_of_files(public: Path) -> None:
    """Any number of files in the shared folders costs a bounded look at each tick; real requests among them are still found in time."""
    run = shared(public / "run")
    for name in ("logs", "exits", "profiling"):
        shared(run / name, MALLORY)
    flood = "for n in range(3000): (Path(sys.argv[1]) / f'z{n}.json').write_text('[]')"
    for name in ("logs", "exits", "profiling"):
        as_user(MALLORY, flood, run / name)
    exits = Exits(run)
    for _ in range(20):
        exits.take()
        exits.remove()
    wait_for(lambda: list((run / "exits").iterdir()) == [], "the flood to be removed")


def test_exit_code_of_another(public: Path) -> None:
    """How a job ended is believed of root and of the users who wrote its rings, not of another member; it did not end in the future."""
    run = shared(public / "run")
    exits = Exits(run)
    for uid, believed in ((MALLORY, False), (BOB, True), (0, True)):
        path = leave(run, "job", 7)
        path.write_text(json.dumps(["job", 7, 5e10]))
        os.chown(path, uid, MALLORY)
        found = exits.take(lambda job: {BOB})
        assert [(each.job, each.code) for each in found] == [("job", 7)] * believed
        assert all(each.at <= time.time() for each in found)
        exits.remove()
    path = leave(run, "unknown", 7)
    os.chown(path, MALLORY, MALLORY)
    assert [each.job for each in exits.take(lambda job: ())] == ["unknown"]


def test_exit_codes_of_many_jobs(public: Path) -> None:
    """The exit codes of any number of jobs take bounded room in the history: the latest are kept."""
    path = public / "history.sqlite"
    store = begin(path, Damaged())
    for number in range(MOST_EXITS + 50):
        store.exit(Exit(f"job{number}", 0, 1e9 + number))
    store.commit()
    for _ in store.tidy(int(2e18), 1 << 40, 1 << 40, int(2e18)):
        pass
    store.close()
    kept = History(path).exits()
    assert len(kept) == MOST_EXITS
    assert ("job49", "") not in kept
    assert ("job50", "") in kept


def test_names_of_another(public: Path) -> None:
    """The names beside a ring are those of the ring's owner: another member's file in their place is not read."""
    run = shared(public / "run")
    with Trainer(run / "a.ring") as trainer:
        trainer.call("name", [({"dtype": 1, "name": "float32"},)])
        names = run / "a.names"
        reader = RingReader(run / "a.ring")
        assert reader.names() == [{"dtype": 1, "name": "float32"}]
        reader.close()
        os.chown(names, MALLORY, MALLORY)
        reader = RingReader(run / "a.ring")
        assert reader.names() == []
        with crossing.folder(run) as rings:
            assert reader.next_names(rings) == []
        reader.close()
