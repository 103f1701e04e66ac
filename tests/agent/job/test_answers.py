"""Answers of other agents: one that is not plausible counts as none, and what several have counts once."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.job.job_report import StepRow, StepRows
from commwatch_agent.job.merging import Heard, merged_jobs
from commwatch_agent.model.api_views import AlertsView, AlertView
from commwatch_agent.model.views import JobView
from commwatch_agent.questions.answer import text_of
from commwatch_agent.questions.incidents import alerts
from commwatch_agent.questions.operations import cells as cells_of
from commwatch_agent.questions.operations import summary
from tests.helpers import MS, Watch, operation, write_ring

ALERT = AlertView("1", "X", "warning", "resolved", {"job_id": "a"}, {}, 1.0, 100.0, 101.0, 200.0)


@pytest.mark.parametrize("change", [{"bins": [10**6], "in_bins": [1]}, {"busy_ns": 10**400}, {"bus_bytes": 1e308}])
def test_implausible_cells(tmp_path: Path, change: dict[str, Any]) -> None:
    """An agent whose sums are out of range counts as silent; the answer has the others."""
    watch = Watch(tmp_path)
    write_ring(watch.rings, [operation(start_ns=n * MS, end_ns=n * MS + 9, seq=n) for n in range(9)])
    watch.tick(60_000 * MS)
    agent = QueryService(watch.path)
    cells = json.loads(text_of(cells_of(agent, 0, 1 << 62, "job")).body)
    good = json.dumps(cells).encode()
    cells["cells"][0].update(change)
    heard = Heard({"http://good": [good], "http://bad": [json.dumps(cells).encode()]}, {})
    answer = summary(agent, 0, 1 << 62, "job", by=["op"], same={}, heard=heard)
    assert answer.nodes is not None
    assert (answer.nodes.answered, list(answer.nodes.silent)) == (2, ["http://bad"])
    assert [row.count for row in answer.data.rows] == [18]


@pytest.mark.parametrize("times", [{"duration_s": 0.0}, {"comm_s": 1e400}, {"exposed_s": -1.0}])
def test_implausible_steps(times: dict[str, Any]) -> None:
    """Steps without a length, or with impossible times, are refused."""
    step = StepRow(0, 1, 1.0, 2.0, 1.0, 0.5, None, None, False, [])
    StepRows([], [step], False)
    with pytest.raises(ValueError, match="out of range"):
        StepRows([], [step._replace(**times)], False)


def test_past_alerts_of_several_agents(tmp_path: Path) -> None:
    """An alert of a job that several agents have raised, each by its own clock, is listed once; a later occurrence is another."""
    other = replace(ALERT, id="2", active_at=103.1, resolved_at=203.0)
    later = replace(ALERT, id="3", active_at=300.0, resolved_at=400.0)
    of_node = [replace(alert, labels={"instance": "n"}) for alert in (ALERT, other)]
    heard = Heard({"http://other": [json.dumps(asdict(AlertsView([], [other, of_node[1]]))).encode()]}, {})
    own = AlertsView([], [ALERT, later, of_node[0]])
    answer = alerts(QueryService(tmp_path / "h"), own=own, limit=9, heard=heard)
    assert [alert.id for alert in answer.data.past if "job_id" in alert.labels] == ["3", "1"]
    assert len(answer.data.past) == 4


def test_end_of_a_job_on_several_nodes() -> None:
    """A job has failed if it has on one node, with the exit code of a launcher that failed; while it runs on one node, it has not ended."""
    well = JobView("a", "ended", 4, [2, 3], 0, 10.0, 50.0, 0, None, exit_code=0, failed=False)
    bad = replace(well, ranks=[0, 1], exit_code=3, failed=True, ending="exit code 3")
    for views in ([well, bad], [bad, well]):
        (job,) = merged_jobs(views)
        assert (job.state, job.exit_code, job.failed, job.ending) == ("ended", 3, True, "exit code 3")
        assert job.ranks == [0, 1, 2, 3]
    (job,) = merged_jobs([well, replace(well, exit_code=None, failed=None)])
    assert (job.exit_code, job.failed) == (0, None)
    (job,) = merged_jobs([bad, replace(well, state="running", exit_code=None, failed=None)])
    assert (job.state, job.exit_code, job.failed, job.ending) == ("running", None, None, "")
