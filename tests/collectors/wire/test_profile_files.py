"""What agent and trainer leave each other about a profile: whole, for the right eyes, and refused where damaged."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from commwatch.wire import profile_files as files

REQUEST = files.Request("0123456789abcdef", "job", 3, [0, 1], 1e9, "job#2", ["host:1", "host:2"])
RESULT = files.Result("0123456789abcdef", 1, 3, 10, 13, 5, 6, None)


def test_round_trip(tmp_path: Path) -> None:
    """What one side writes the other reads."""
    for path, content, read in (
        (files.request_path(tmp_path, "job"), REQUEST, files.request_from),
        (files.of_rank(files.directory(tmp_path), REQUEST.id, 1, files.RESULT), RESULT, files.result_from),
    ):
        files.write(path, content, {})
        assert read(path.read_text()) == content
    assert len(list(files.directory(tmp_path).iterdir())) == 2


@pytest.mark.parametrize(("group", "directory", "file"), [("", 0o700, 0o600), (str(os.getgid()), 0o2770, 0o640)])
def test_modes(tmp_path: Path, group: str, directory: int, file: int) -> None:
    """The files are the owner's alone, or readable by COMMWATCH_GROUP, as all of the run directory."""
    path = files.request_path(tmp_path, "job")
    files.write(path, REQUEST, {"COMMWATCH_GROUP": group})
    assert stat.S_IMODE(path.parent.stat().st_mode) == directory
    assert stat.S_IMODE(path.stat().st_mode) == file


def test_link_in_the_way(tmp_path: Path) -> None:
    """A link that a member of the directory's group has put where the file is written is not followed."""
    path, elsewhere = tmp_path / "made" / "a.json", tmp_path / "elsewhere"
    path.parent.mkdir()
    elsewhere.write_text("mine")
    (path.parent / f".{path.name}.{os.getpid()}").symlink_to(elsewhere)
    files.write(path, REQUEST, {})
    assert (elsewhere.read_text(), path.is_symlink()) == ("mine", False)
    assert files.request_from(path.read_text()) == REQUEST


def test_jobs_apart() -> None:
    """The name of a request is a valid file name, whatever the job is called."""
    path = files.request_path(Path("/run"), "../a job/1")
    assert path.parent == Path("/run/profiling")
    assert path.name.endswith(".request.json")


@pytest.mark.parametrize(
    "changed",
    [
        {"steps": 0},
        {"steps": files.MOST_STEPS + 1},
        {"steps": True},
        {"steps": "3"},
        {"ranks": None},
        {"ranks": [0, "1"]},
        {"until": "soon"},
        {"job": 7},
        {"id": "../../etc"},
        {"id": ""},
        {"more": 1},
    ],
)
def test_damaged_requests(changed: dict[str, Any]) -> None:
    """A request that is damaged is none."""
    with pytest.raises(ValueError, match=r"not a request|unexpected keyword"):
        files.request_from(json.dumps({**asdict(REQUEST), **changed}))


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"pid"', "[" * 100_000])
def test_damaged_files(text: str) -> None:
    """What is no JSON, or of another form, is refused with one kind of error."""
    for read in (files.request_from, files.result_from, files.claim_from):
        with pytest.raises(ValueError, match=r"\w"):
            read(text)


@pytest.mark.parametrize("changed", [{"rank": "1"}, {"from_ns": 1.5}, {"steps": None}, {"error": 3}])
def test_damaged_results(changed: dict[str, Any]) -> None:
    """A result that is damaged is none."""
    with pytest.raises(ValueError, match="not the result"):
        files.result_from(json.dumps({**asdict(RESULT), **changed}))
