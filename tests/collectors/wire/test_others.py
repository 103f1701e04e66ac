"""Files of others: read at once, within bounds, and only where they are regular and of an owner who may write there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from commwatch.collectors.wire import others
from tests.helpers import NOBODY, PATIENCE_S, PLANTED, clean_env

MOST = 1000


@pytest.mark.parametrize("what", PLANTED)
def test_planted(what: str, tmp_path: Path) -> None:
    """A FIFO, a link to a device, a file without end: none is waited for, followed or read."""
    path = tmp_path / "file"
    why = PLANTED[what](path)
    with pytest.raises(OSError, match=why) as raised:
        others.read(path, MOST)
    assert raised.value.filename == str(path)


def test_as_large_as_may_be(tmp_path: Path) -> None:
    """A file of the most bytes is read whole; one byte more, and it is refused."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * MOST)
    assert others.read(path, MOST) == b"x" * MOST
    path.write_bytes(b"x" * (MOST + 1))
    with pytest.raises(others.Refused, match="larger than"):
        others.read(path, MOST)


def test_links_where_they_are_wanted(tmp_path: Path) -> None:
    """A link to a file may be followed, one to a FIFO is refused all the same."""
    (tmp_path / "file").write_text("here")
    (tmp_path / "link").symlink_to("file")
    with open(others.open_plain(tmp_path / "link", links=True)) as file:
        assert file.read() == "here"
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "other").symlink_to("fifo")
    with pytest.raises(others.Refused, match="not a file"):
        others.open_plain(tmp_path / "other", links=True)


#: Reads a file as nobody; prints what it holds, or why it is refused.
AS_NOBODY = f"""
import os, sys
from pathlib import Path
from commwatch.collectors.wire import others
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
try:
    print(others.read(Path(sys.argv[1]), 1000).decode())
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.parametrize(
    ("owner", "group", "mode", "says"),
    [
        (NOBODY, NOBODY, 0o755, "content"),
        (0, 0, 0o755, "content"),
        (NOBODY - 1, 0, 0o755, f"belongs to uid {NOBODY - 1}; set COMMWATCH_GROUP for trainer and agent"),
        (NOBODY - 1, NOBODY, 0o755, f"belongs to uid {NOBODY - 1}; set COMMWATCH_GROUP for trainer and agent"),
        (NOBODY - 1, NOBODY, 0o2775, "content"),
    ],
)
def test_owners(owner: int, group: int, mode: int, says: str, public: Path) -> None:
    """A file is read where it is this user's, root's, or of the group that the directory is shared with."""
    path = public / "file"
    path.write_text("content")
    path.chmod(0o644)
    os.chown(path, owner, group)
    os.chown(public, -1, NOBODY)
    public.chmod(mode)
    command = [sys.executable, "-c", AS_NOBODY, str(path)]
    done = subprocess.run(command, env=clean_env(), capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.strip() == says


@pytest.mark.parametrize("planted", ["link", "fifo"])
def test_create(planted: str, tmp_path: Path) -> None:
    """In place of a link or a FIFO a new file is made: nothing is written through either."""
    (tmp_path / "checkpoint").write_text("mine")
    path = tmp_path / "new"
    path.symlink_to("checkpoint") if planted == "link" else os.mkfifo(path)
    with open(others.create(path, 0o640), "w") as file:
        file.write("new")
    assert (path.read_text(), path.is_symlink(), path.stat().st_mode & 0o777) == ("new", False, 0o640)
    assert (tmp_path / "checkpoint").read_text() == "mine"
