"""The incidents of a run, and their marks in its timeline."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from commwatch_agent.history.store import Writer
from commwatch_agent.incidents.answers import view_of
from commwatch_agent.incidents.incident import AlertState, Incident
from commwatch_agent.incidents.stored import of_run, row_of
from commwatch_agent.model.runs import Stored
from commwatch_agent.report.chrome_trace import TraceMark
from commwatch_agent.report.incident_marks import marks_of

#: A run that is the only one of its name.
ALL = Stored("", "job", 0.0, inf)
FIRST, LATER = "corruption: the weights of rank 2 differ: <a>", "corruption: the result of rank 1 differs"


def found(name: str, at: float, says: str, kind: str = "corruption", **about: object) -> Incident:
    one = Incident(name, kind, "critical", "ended", "job", "", (name,), at, at, at, says=says, ranks=(2,))
    return replace(one, **about)  # type: ignore[arg-type]


INCIDENTS = [
    found("a", 2000.0, FIRST),
    found("b", 1000.0, FIRST),
    found("c", 500.0, LATER, job_id="other"),
    found(
        "d",
        600.0,
        "hang: rank 1",
        "hang",
        ranks=(1, 3),
        alerts=(AlertState("CollectiveHang", "critical", 600.0, 640.0),),
    ),
    found("e", 2000.0, LATER),
    found("f", 700.0, LATER, run="another run"),
    found("g", 800.0, LATER, state="pending"),
]


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """A history with these incidents."""
    with closing(Writer(tmp_path / "history.sqlite")) as store:
        for each in INCIDENTS:
            store.incident(row_of(each, "/run"))
    return tmp_path / "history.sqlite"


def test_of_a_run(history: Path) -> None:
    """The incidents of a run are those under its key; without a key those under its name in its time. Pending ones do not count."""
    assert {each.id for each in of_run(history, ALL)} == {"a", "b", "d", "e"}
    assert {each.id for each in of_run(history, ALL._replace(name="other"))} == {"c"}
    assert {each.id for each in of_run(history, Stored("another run", "job", 0.0, inf))} == {"f"}
    assert {each.id for each in of_run(history, ALL._replace(from_s=900.0, until_s=1500.0))} == {"b"}


def test_marks(history: Path) -> None:
    """An incident lasts from its begin to its end on each rank that it names, with its words; its alert is a moment, when it began to fire."""
    (hang,) = [each for each in of_run(history, ALL) if each.kind == "hang"]
    hang = replace(hang, last_at=650.0, ended_at=660.0, cause="stopped", cost_rank_s=240.0)
    first, second, alert = marks_of([hang])
    assert alert == TraceMark(640 * 10**9, "alert CollectiveHang", None, {"summary": ""})
    assert second == first._replace(rank=3)
    assert first[:3] + first[4:] == (600 * 10**9, "incident hang: ranks 1, 3", 1, 660 * 10**9)
    view = view_of(hang)
    assert {name: first.args[name] for name in ("says", "cause", "remedy", "severity", "id")} == {
        "says": "hang: rank 1", "cause": "stopped", "remedy": view.remedy, "severity": "critical", "id": "d",
    }  # fmt: skip
    assert first.args["cost"] == "4m00s of rank time"
    assert first.args["when"].split(", ")[1:2] == ["for 60.0 s"]
    assert "place" not in first.args
    effect = found("h", 610.0, "it waits", "gpu_fault", consequence_of="d", ranks=())
    *_, mark = marks_of([hang, effect])
    assert (mark.name, mark.rank, mark.args["consequence of"]) == ("incident GPU fault", None, "Hang: ranks 1, 3")
