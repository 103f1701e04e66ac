"""`commwatch timeline` and its route: the same trace, errors in one line."""

from __future__ import annotations

import gzip
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.history.store import Writer
from commwatch_agent.incidents.incident import AlertState, Incident
from commwatch_agent.incidents.stored import row_of
from commwatch_agent.report.chrome_trace import pid_of
from tests.agent.test_config import one_line
from tests.agent.web.routes.test_jobs import populated
from tests.chrome_trace import Trace, parsed, read
from tests.helpers import RunningAgent, commwatch


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent with three jobs in its history."""
    with populated(tmp_path_factory.mktemp("timeline") / "run") as running:
        yield running


def test_file_and_route(asked: RunningAgent, tmp_path: Path) -> None:
    """The file has all records of the job; the route answers with the same, compressed, under a name."""
    out = tmp_path / "trace.json.gz"
    done = commwatch("timeline", "train", "--dir", asked.directory, "--last", "all", "--out", out)
    assert (done.returncode, done.stderr) == (0, "")
    trace = read(out)
    # On a busy machine, the agent may have something to mark by now.
    counts = rf"32 operations, 4 steps, {len(trace.arrows)} arrows, \d+ marks"
    assert re.fullmatch(rf"{re.escape(str(out))}: {counts}\n", done.stdout), done.stdout
    assert len(trace.of("operation")) == 27
    assert len([each for each in trace.instants if each["cat"] != "mark"]) == 5
    assert (0, 1, "message") in trace.arrows
    with urllib.request.urlopen(f"{asked.url}/api/v1/timeline?job=train&last=all") as answer:
        assert answer.headers["Content-Type"] == "application/gzip"
        assert answer.headers["Content-Disposition"] == 'attachment; filename="timeline-train.json.gz"'
        assert parsed(gzip.decompress(answer.read())) == trace
    assert route(asked, "").about["job"] == "eval"


def route(asked: RunningAgent, query: str) -> Trace:
    """The trace with which the route answers."""
    return parsed(gzip.decompress(urllib.request.urlopen(f"{asked.url}/api/v1/timeline?{query}").read()))


def test_between_two_times(asked: RunningAgent) -> None:
    """With ``since`` and ``until`` the trace has what ended between these times, each of them by itself, too."""
    whole = route(asked, "job=train&last=all").of("operation")
    ends = [each.end_ns + route(asked, "job=train").about["Unix time of 0, in ns"] for each in whole]
    middle = sorted(ends)[len(ends) // 2] / 1e9
    for query, expected in (
        (f"since={middle:.9f}", sum(end / 1e9 >= middle for end in ends)),
        (f"until={middle:.9f}", sum(end / 1e9 < middle for end in ends)),
        (f"since={middle - 60:.9f}&until={middle:.9f}", sum(end / 1e9 < middle for end in ends)),
    ):
        assert len(route(asked, f"job=train&{query}").of("operation")) == expected, query


def test_incidents_in_the_timeline(asked: RunningAgent, tmp_path: Path) -> None:
    """The incidents of the job are in the file, with their alerts; those of other jobs are not."""
    out, state = tmp_path / "trace.json", tmp_path / "state"
    state.mkdir()
    for path in asked.directory.glob("history-*"):
        (state / path.name).write_bytes(path.read_bytes())
    (history,) = state.glob("history-*.sqlite")
    at, key = read_begin(asked) + 0.05, QueryService(history).stored("train").key
    alert = AlertState("StragglerRank", "warning", at, at, annotations={"summary": "late"})
    late = Incident(
        "a",
        "straggler",
        "warning",
        "open",
        "train",
        key,
        ("2",),
        at,
        at,
        at + 2,
        says="rank 2 is late",
        ranks=(2,),
        alerts=(alert,),
    )
    with closing(Writer(history)) as store:
        for each in (late, replace(late, id="b", run="other", job_id="other")):
            store.incident(row_of(each, "/run"))
    done = commwatch("timeline", "train", "--state", state, "--last", "all", "--out", out)
    assert (done.returncode, done.stderr) == (0, "")
    trace = read(out)
    marks = [(each["name"], each["pid"], each["args"]) for each in trace.instants if each["cat"] == "mark"]
    assert ("alert StragglerRank", pid_of(0), {"summary": "late"}) in marks
    assert "b" not in {each.args["id"] for each in trace.of("mark")}
    (late_rank,) = (each for each in trace.of("mark") if each.args["id"] == "a")
    assert (late_rank.name, late_rank.rank, late_rank.args["says"]) == (
        "incident late rank: rank 2",
        2,
        "rank 2 is late",
    )
    assert late_rank.end_ns - late_rank.start_ns == pytest.approx(2e9, abs=1000)


def read_begin(asked: RunningAgent) -> float:
    """Unix time at which the job began."""
    return float(next(job["started_at"] for job in asked.get("/api/v1/jobs") if job["job_id"] == "train"))


@pytest.mark.parametrize(
    ("query", "code", "detail"),
    [
        ("last=5", 400, "last=5: give an age"),
        ("job=none", 404, "no job 'none'"),
        ("last=0s", 400, "last=0s: give an age"),
        ("last=5m&since=1", 400, "last=5m: not together with since or until"),
        ("since=5&until=4", 400, "since=5 is later than until=4"),
    ],
)
def test_wrong_requests(asked: RunningAgent, query: str, code: int, detail: str) -> None:
    """A wrong age and an unknown job are refused by name."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{asked.url}/api/v1/timeline?{query}")
    with caught.value as error:
        assert error.code == code
        assert detail in json.loads(error.read())["detail"]


def test_wrong_usage(asked: RunningAgent, tmp_path: Path) -> None:
    """A job or a folder that is not there is named in one line, and no file is left."""
    out = tmp_path / "trace.json"
    assert "no job 'none'" in one_line(commwatch("timeline", "none", "--dir", asked.directory, "--out", out))
    there = commwatch("timeline", "train", "--dir", asked.directory, "--out", tmp_path / "no" / "x.gz")
    assert f"cannot write {tmp_path / 'no' / 'x.gz'}: No such file or directory" in one_line(there)
    assert "--out" in commwatch("timeline", "train").stderr
    assert list(tmp_path.iterdir()) == []
