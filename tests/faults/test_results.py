"""What was concluded of jobs is kept, and put into tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.judging import Outcome
from tests.faults.results import filled, keep, kept, line, state, table
from tests.faults.scenarios import LATE, LISTS, Scenario

LATE_2, CALM, OTHER = (
    Scenario("ddp4", "late", (2,), LATE),
    Scenario("ddp4", "nothing", (0,)),
    Scenario("pipe", "nothing", (0,)),
)


def test_kept(tmp_path: Path) -> None:
    """A result is found again as it was, and a job without one is missing."""
    found = {LATE_2: Outcome(LATE_2, 7.25, 0.95, ()), CALM: Outcome(CALM, None, 0.0, ("alert: a", "straggler late 1"))}
    for each in found.values():
        keep(tmp_path / "run-1", each)
    assert kept(tmp_path / "run-1", [LATE_2, OTHER, CALM]) == found
    assert kept(tmp_path / "run-2", [LATE_2]) == {}


def test_every_job_has_its_own() -> None:
    """No two jobs share a name, and so none shares a result or a recording."""
    names = [each.name for some in LISTS.values() for each in some]
    assert len(names) == len(set(names))


def test_state() -> None:
    """The name changes with a file's path or content, and not with the order of the files."""
    names = [
        state(files) for files in ({"a": b"1", "b": b"2"}, {"a": b"12"}, {"a": b"1", "b": b"3"}, {"a": b"1", "c": b"2"})
    ]
    assert len(set(names)) == 4
    assert state({"b": b"2", "a": b"1"}) == names[0]


def test_line() -> None:
    """A row has the verdict on each run: how many are right, when, and the least steady."""
    right, late = Outcome(LATE_2, 7.25, 1.0, ()), Outcome(LATE_2, 25.0, 0.95, ("advice: b", "alert: a"))
    assert line([right]) == "| ddp4x4 late 2 | straggler | right | 7.2 s | 100% | – |"
    assert line([right, late]) == "| ddp4x4 late 2 | straggler | 1 of 2 | 7.2, 25.0 s | 95% | advice: b; alert: a |"
    assert (
        line([Outcome(CALM, None, 0.0, ("hang dead 1",))])
        == "| ddp4x4 nothing 0 | nothing | WRONG | – | – | hang dead 1 |"
    )


def test_table() -> None:
    """A job without a result has no row, and each run has its total."""
    first = {LATE_2: Outcome(LATE_2, 7.0, 1.0, ()), CALM: Outcome(CALM, None, 0.0, ())}
    second = {LATE_2: Outcome(LATE_2, None, 0.0, ())}
    rows = table([LATE_2, CALM, OTHER], {"run-1": first, "run-2": second}).splitlines()
    assert [row.split(" | ")[0] for row in rows[2:4]] == ["| ddp4x4 late 2", "| ddp4x4 nothing 0"]
    assert rows[4:] == ["", "run-1: 2 of 2 right; 7.0 s (median), 7.0 s (longest)", "run-2: 0 of 1 right"]


def test_filled() -> None:
    """Only what is between the comments of that word changes."""
    document = "# A\n<!-- results: rhythm -->\nold\n<!-- end of results -->\nB\n"
    assert filled(document, "rhythm", "new") == "# A\n<!-- results: rhythm -->\nnew\n<!-- end of results -->\nB\n"
    with pytest.raises(ValueError, match="no place for matrix"):
        filled(document, "matrix", "new")
