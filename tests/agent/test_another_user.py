"""Another user of the node reads what is public, and nothing else; triggers nothing; blocks nothing."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import NOBODY, PATIENCE_S, RunningAgent, agent, commwatch, commwatch_as_nobody, lost_rank, wait_for
from tests.live import HandMade

#: The alert on a lost rank fires at once, so that there are alerts, evidence, and what a receiver was told.
AT_ONCE = "[kinds.rank_lost]\nfor = '0s'\n"
#: What somebody else makes of requests, of paths and of a process: statuses, and why not or ``done``.
AS_SOMEBODY_ELSE = """
import encodings.idna, json, os, signal, sys, urllib.error, urllib.request
asked = json.load(sys.stdin)
os.setgroups([]); os.setgid(asked["uid"]); os.setuid(asked["uid"]); os.chdir("/")
def status(path, body):
    request = urllib.request.Request(asked["url"] + path, body and body.encode(), {"Content-Type": "application/json"})
    try:
        return urllib.request.urlopen(request, timeout=60).status
    except urllib.error.HTTPError as error:
        return error.code
def tried(what, *arguments):
    try:
        what(*arguments)
    except OSError as error:
        return error.strerror
    return "done"
print(json.dumps({
    "requests": [status(path, body) for path, body in asked["requests"]],
    "listed": {path: tried(os.listdir, path) for path in asked["folders"]},
    "read": {path: tried(open, path) for path in asked["files"]},
    "written": {path: tried(open, path, "r+") for path in asked["files"]},
    "put": {path: tried(open, path + "/new", "x") for path in asked["folders"]},
    "taken": {path: tried(os.unlink, path) for path in asked["files"]},
    "signal": tried(os.kill, asked["pid"], signal.SIGHUP),
}))
"""


@contextmanager
def busy(place: Path, settings: str = "") -> Iterator[RunningAgent]:
    """An agent with all files that it ever writes: rings, a history, alerts, evidence, a requested profile."""
    receiver = "[[receivers]]\nkind = 'command'\nname = 'nothing'\ncommand = ['true']\n"
    (place / "commwatch.toml").write_text(f"{settings}\n{AT_ONCE}{receiver}")
    (place / "commwatch.toml").chmod(0o644)  # settings that others may write are refused
    flags = ("--state", str(place / "state"), "--config", str(place / "commwatch.toml"))
    with (
        agent(place / "run", *flags) as running,
        HandMade(running.directory, "job") as job,
        lost_rank(running.directory / "rings"),
    ):
        job.run(20)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {running.token}"}
        wait_for(lambda: 'job_id="job"' in running.get("/metrics"), "the job")
        urllib.request.urlopen(
            urllib.request.Request(f"{running.url}/api/v1/profiles", b'{"job": "job"}', headers)
        ).close()
        kept = ("evidence-*/*.json", "sent-*.json", "history-*.sqlite")
        wait_for(lambda: all(list((place / "state").glob(pattern)) for pattern in kept), "all of its files")
        yield running


def somebody_else(running: RunningAgent, *places: Path, requests: tuple[tuple[str, str | None], ...] = ()) -> Any:
    """What becomes of all that another user tries on these folders, all in them, and the agent."""
    paths = [path for place in places for path in (place, *place.rglob("*"))]
    asked = {
        "uid": NOBODY,
        "url": running.url,
        "pid": running.process.pid,
        "requests": requests,
        "folders": [str(path) for path in paths if path.is_dir()],
        "files": [str(path) for path in paths if path.is_file()],
    }
    command = [sys.executable, "-c", AS_SOMEBODY_ELSE]
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(("settings", "reading"), [("", 200), ("require_token = true", 401)])
def test_requests(public: Path, settings: str, reading: int) -> None:
    """Without the token another user triggers nothing, and if the settings demand it, reads only metrics and health."""
    asked = (("/api/v1/profiles", '{"job": "job"}'), ("/login", "token=guess"), ("/", None), ("/api/v1/jobs", None))
    with busy(public, settings) as running:
        found = somebody_else(running, requests=(*asked, ("/metrics", None), ("/healthz", None)))
    assert found["requests"] == [401, 401, reading, reading, 200, 200]
    assert found["signal"] == "Operation not permitted"


def test_files(public: Path) -> None:
    """Run directory and state directory are closed: no other user lists, reads, writes, adds or removes anything."""
    with busy(public) as running:
        found = somebody_else(running, public / "run", public / "state")
        assert {Path(path).suffix for path in found["read"]} >= {
            ".ring",
            ".names",
            ".token",
            ".sqlite",
            ".json",
            ".lock",
        }
        assert len(found["listed"]) >= 5
        for tried in ("listed", "read", "written", "put", "taken"):
            assert set(found[tried].values()) == {"Permission denied"}, tried
        assert stat.S_IMODE((public / "run").stat().st_mode) == stat.S_IMODE((public / "state").stat().st_mode) == 0o700


def test_files_in_an_open_directory(public: Path) -> None:
    """In an existing state directory that every user may enter, each file is readable by its owner alone."""
    (public / "state").mkdir(mode=0o755)
    with busy(public) as running:
        found = somebody_else(running, public / "state")
        assert any(path.endswith(".sqlite") for path in found["read"])
        assert any(path.endswith(".sqlite-wal") for path in found["read"])
        for tried in ("read", "written", "put", "taken"):
            assert set(found[tried].values()) == {"Permission denied"}, (tried, found[tried])
        assert found["listed"].pop(str(public / "state")) == "done"
        assert set(found["listed"].values()) == {"Permission denied"}


def test_history_of_a_group(public: Path) -> None:
    """In a directory of a group, its members may read the history, and no other user."""
    (public / "state").mkdir()
    (public / "state").chmod(0o2755)
    with busy(public):
        (history,) = (public / "state").glob("history-*.sqlite")
        assert stat.S_IMODE(history.stat().st_mode) == 0o640


def test_commands(public: Path) -> None:
    """Another user's commands find no token and no agent in closed directories, and print one line."""
    with busy(public, "require_token = true") as running:
        for asked in (
            ("diagnose", "--dir", public / "run"),
            ("diagnose", running.url),
            ("profile", "--dir", public / "run"),
        ):
            done = commwatch_as_nobody(*asked)
            assert done.returncode in (1, 2), done
            assert "Traceback" not in done.stderr
            assert "job" not in done.stdout


def test_places_taken_before(public: Path) -> None:
    """A run directory that somebody else has put there, or a link to one, is refused by name; so is a token of theirs in one's own,
    and a link in the place of a lock."""
    public.chmod(0o1777)
    theirs, mine, link = public / "theirs", public / "mine", public / "link"
    theirs.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    link.symlink_to(theirs)
    mine.mkdir(mode=0o700)
    (mine / "agent.token").write_text("known-to-somebody-else")
    (mine / "agent.token").chmod(0o600)
    os.chown(mine / "agent.token", NOBODY, NOBODY)
    with agent(mine) as running:
        assert running.token != "known-to-somebody-else"
    (mine / f"alerts-{socket.gethostname()}.lock").unlink()
    (mine / f"alerts-{socket.gethostname()}.lock").symlink_to(public / "made")
    for flags in (("--dir", mine), ("--dir", link)):
        done = commwatch("agent", *flags, "--port", "0")
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert str(flags[1]) in done.stderr
    assert not (public / "made").exists()
