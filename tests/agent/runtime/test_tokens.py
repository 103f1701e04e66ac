"""The token file: who can read it, what is accepted as a token, and what is not."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from commwatch.wire import tokens
from commwatch.wire.tokens import BadToken
from tests.helpers import NOBODY, needs


def test_made(tmp_path: Path) -> None:
    """A token is readable by this user alone, whatever the umask, cannot be guessed, and survives a restart."""
    path, before = tmp_path / tokens.NAME, os.umask(0)
    try:
        tokens.make(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first = tokens.read_own(path, os.getuid())
    assert re.fullmatch(r"[\w-]{43}", first)
    tokens.make(path)
    assert tokens.read_own(path, os.getuid()) == first
    assert list(tmp_path.iterdir()) == [path]
    tokens.make(tmp_path / "other")
    assert tokens.read_own(tmp_path / "other", os.getuid()) != first


@pytest.mark.parametrize("mode", [0o606, 0o604, 0o620, 0o601])
def test_open_to_others(tmp_path: Path, mode: int) -> None:
    """A file that others can read or write is refused, with the remedy; the agent's own is then made anew."""
    path = tmp_path / tokens.NAME
    tokens.make(path)
    before = path.read_text()
    path.chmod(mode)
    with pytest.raises(BadToken, match=f"chmod 600 {path}"):
        tokens.read(path)
    tokens.make(path)
    assert path.read_text() != before
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "content", [b"", b"short", b"x" * 1025, b"two words that are long", b"\xff" * 32, b"a" * 20 + b"\nb", b"\0" * 32]
)
def test_what_is_no_token(tmp_path: Path, content: bytes) -> None:
    """An empty, short, huge or odd token is refused in one line that names the file and shows nothing of it."""
    path = tmp_path / "given"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(BadToken) as caught:
        tokens.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "two words" not in str(caught.value)


def test_line_end(tmp_path: Path) -> None:
    """What an editor or echo leaves around a token is no part of it; a group may read it, as where secrets are mounted."""
    path = tmp_path / "given"
    path.write_text("  a-token-of-a-secret\r\n\n")
    path.chmod(0o440)
    assert tokens.read(path) == "a-token-of-a-secret"


def test_what_is_no_file(tmp_path: Path) -> None:
    """A directory, a pipe (which must not be waited for), nothing: each is refused by name."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("pipe", "", "nothing"):
        with pytest.raises(BadToken, match=re.escape(str(tmp_path / name))):
            tokens.read(tmp_path / name)


def test_put_there_by_somebody_else(tmp_path: Path) -> None:
    """In a directory that a group may write to, a link or a file of another user in the token's place is not accepted."""
    good = tmp_path / "good"
    tokens.make(good)
    link = tmp_path / "link"
    link.symlink_to(good)
    with pytest.raises(BadToken, match="symbolic links"):
        tokens.read_own(link, os.getuid())
    tokens.make(link)
    assert not link.is_symlink()
    needs(os.getuid() == 0, "root, to give a file away")
    os.chown(good, NOBODY, NOBODY)
    with pytest.raises(BadToken, match=f"belongs to uid {NOBODY}"):
        tokens.read_own(good, os.getuid())
    before = good.read_text()
    tokens.make(good)
    assert (good.read_text() != before, good.stat().st_uid) == (True, 0)
