"""Files for the user: whole, or as they were."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from commwatch.wire.errors import CommwatchError
from commwatch_agent.runtime.whole_files import write, writing


def test_file_that_was_there(tmp_path: Path) -> None:
    """A file is replaced when the new one is complete, through a link too; if that fails, it is as it was."""
    old, link = tmp_path / "old", tmp_path / "link"
    link.symlink_to(old)
    write(old, "first")
    write(link, "second")
    assert (old.read_text(), link.is_symlink()) == ("second", True)
    with pytest.raises(OSError, match="full"), writing(old) as out:  # noqa: PT012
        out.write("half")
        out.flush()
        raise OSError("full")
    assert old.read_text() == "second"
    assert {path.name for path in tmp_path.iterdir()} == {"old", "link"}


@pytest.mark.parametrize("name", ["r.html", "t.json.gz"])
def test_links_of_others(tmp_path: Path, name: str) -> None:
    """In a folder that others may write, no link with a name that they can guess leads the file elsewhere."""
    theirs = tmp_path / "theirs"
    theirs.write_text("as before")
    for guess in (f".{name}.new", f".{name}.part", f".{name}", ".new"):
        (tmp_path / guess).symlink_to(theirs)
    write(tmp_path / name, "text")
    assert theirs.read_text() == "as before"
    assert not (tmp_path / name).is_symlink()


def test_links_in_a_ring(tmp_path: Path) -> None:
    """Links that lead to each other are an error of the file, as for ``open``."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.symlink_to(other)
    other.symlink_to(one)
    with pytest.raises(CommwatchError, match=f"cannot write {one}: Too many levels"):
        write(one, "text")


@pytest.mark.parametrize("name", [".", "folder", "/", "no/file"])
def test_what_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A folder, or a file in a folder that does not exist, is named in the error."""
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    with pytest.raises(CommwatchError, match=r"cannot write .*: (Is a|No such file or) directory"):
        write(Path(name), "text")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_pipe(tmp_path: Path) -> None:
    """A pipe is written, and stays a pipe."""
    pipe, read = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write(pipe, "text")
    reader.join(30)
    assert (read, pipe.is_fifo()) == (["text"], True)
