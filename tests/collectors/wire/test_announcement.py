"""Who is believed to be the agent of a run directory."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commwatch.wire.announcement import FILE, LOCK, announce, answering
from commwatch.wire.crossing import Trust, own
from commwatch_agent.sources.log_requests import LogRequest
from commwatch_alerts.kept import KeptFile
from tests.helpers import commwatch

ABOUT = {"url": "http://127.0.0.1:9477", "history": "/h", "pid": os.getpid()}
OWN = own()


@contextmanager
def held(directory: Path) -> Iterator[int]:
    """The lock of a running agent."""
    fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield fd
    finally:
        os.close(fd)


def test_believed_while_it_runs(tmp_path: Path) -> None:
    """An agent is there as long as it holds its lock."""
    assert answering(tmp_path, OWN) is None
    with held(tmp_path) as lock:
        assert answering(tmp_path, OWN) is None
        announce(tmp_path, lock, ABOUT)
        found = answering(tmp_path, OWN)
        assert found is not None
        assert (found.url, found.history, found.pid, found.uid) == (*ABOUT.values(), os.getuid())
    assert answering(tmp_path, OWN) is None


def test_one_of_an_earlier_life(tmp_path: Path) -> None:
    """An announcement that another user has copied and moved back is not trusted, because tokens are sent to its address."""
    with held(tmp_path) as lock:
        announce(tmp_path, lock, ABOUT)
        (tmp_path / FILE).rename(tmp_path / "kept")
    with held(tmp_path) as lock:
        announce(tmp_path, lock, {**ABOUT, "url": "http://127.0.0.1:9999"})
        (tmp_path / "kept").rename(tmp_path / FILE)
        assert answering(tmp_path, OWN) is None


def test_only_of_whom_is_believed(tmp_path: Path) -> None:
    """The agent of another user is not queried where its owner matters."""
    with held(tmp_path) as lock:
        announce(tmp_path, lock, ABOUT)
        assert answering(tmp_path, Trust(frozenset({os.getuid()}))) is not None
        assert answering(tmp_path, Trust(frozenset({os.getuid() + 1}))) is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"mark": "x"}', "[" * 100_000, '{"mark": 7, "url": "", "history": "", "pid": "x"}']
)
def test_nonsense(tmp_path: Path, text: str) -> None:
    """What is none is none."""
    with held(tmp_path) as lock:
        announce(tmp_path, lock, ABOUT)
        (tmp_path / FILE).write_text(text)
        assert answering(tmp_path, OWN) is None
        (tmp_path / FILE).unlink()
        os.mkfifo(tmp_path / FILE)
        assert answering(tmp_path, OWN) is None
        (tmp_path / FILE).unlink()
        (tmp_path / "other").write_text(json.dumps({**ABOUT, "mark": "x"}))
        (tmp_path / FILE).symlink_to(tmp_path / "other")
        assert answering(tmp_path, OWN) is None


def test_links_are_not_followed(tmp_path: Path) -> None:
    """A link that another user has put in the place of a file beside the rings is not followed: lock, announcement, alerts, requests."""
    run, precious = tmp_path / "run", tmp_path / "precious"
    run.mkdir(mode=0o700)
    precious.write_text("mine")
    with held(run) as lock:
        (run / f".{FILE}.{os.getpid()}").symlink_to(precious)
        announce(run, lock, ABOUT)
        assert answering(run, OWN) is not None
    (run / LOCK).unlink()
    (run / LOCK).symlink_to(precious)
    done = commwatch("agent", "--dir", run, "--port", "0")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"cannot use run directory {run}" in done.stderr
    (run / f".told.json.{os.getpid()}").symlink_to(precious)
    assert KeptFile(run / "told.json").save("{}")
    (run / "logs").mkdir(mode=0o700)
    (run / "logs" / f".7.json.{os.getpid()}").symlink_to(precious)
    request = LogRequest("job", ["/logs/*"], 0.0, 7).write(run)
    assert (request.is_symlink(), request.stat().st_mode & 0o777) == (False, 0o600)
    assert precious.read_text() == "mine"
