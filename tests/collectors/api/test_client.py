"""The Python client: rows of a real agent's answers, figures for trackers, and errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import commwatch
from commwatch.api import training
from commwatch.api.figures import figures_of
from tests.helpers import RunningAgent, clean_env, free_port, wait_for
from tests.live import LATE_MS, PERIOD_MS, TRANSFER_MS, late_job

STEPS = 300
#: Mean of both ranks: rank 0 waits for rank 1 in each all_reduce.
SHARE = (2 * (5 + TRANSFER_MS) + LATE_MS) / 2 / PERIOD_MS


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """The agent of ``late_job``."""
    with late_job(tmp_path_factory.mktemp("run"), STEPS) as running:
        wait_for(lambda: running.get("/api/v1/verdicts"), "the verdict on the late rank")
        yield running


@pytest.fixture
def client(watched: RunningAgent, monkeypatch: pytest.MonkeyPatch) -> commwatch.Client:
    """A client of the agent of the run directory."""
    monkeypatch.setenv("COMMWATCH_DIR", str(watched.directory))
    return commwatch.Client()


@pytest.mark.parametrize("job", [None, "train"])
def test_rows(client: commwatch.Client, watched: RunningAgent, job: str | None) -> None:
    """Each method returns the rows of its route, for the node or for all nodes of a job."""
    same = "?job=train&scope=job" if job else ""
    for method, route in (
        (client.ranks, "ranks"), (client.groups, "groups"), (client.steps, "steps"), (client.summary, "summary"),
    ):  # fmt: skip
        expected = watched.get(f"/api/v1/{route}{same}")
        found = method(job)
        assert found.nodes == (expected["nodes"] if job else None)
        rows = expected["data"] if job else expected
        assert [row.keys() for row in found] == [row.keys() for row in (rows["rows"] if route == "summary" else rows)]
        assert len(found) > 0
    assert [row["job_id"] for row in client.jobs(figures=True)] == ["train"]
    assert [row["comm_share"] for row in client.jobs(figures=True)] == [pytest.approx(SHARE, abs=0.01)]
    assert [verdict["ranks"] for verdict in client.verdicts(job)] == [[1]]
    assert {row["rank"] for row in client.operations(job, op="all_gather", limit=4)} == {0, 1}
    assert [row["by"] for row in client.summary(job, by="op", op="all_gather")] == [{"op": "all_gather"}]


def test_figures(client: commwatch.Client) -> None:
    """The flat figures of a job are those of the records that were written."""
    figures = client.metrics()
    assert figures["comm/share"] == pytest.approx(SHARE, abs=0.01)
    # 30 ms of each step are exposed, but no more than its communication.
    assert figures["comm/exposed_share"] == pytest.approx((30 + 5 + TRANSFER_MS) / 2 / PERIOD_MS, abs=0.01)
    assert figures["comm/step_time"] == pytest.approx(PERIOD_MS / 1e3, abs=1e-4)
    assert figures["comm/straggler_rank"] == 1
    assert figures["comm/problems"] == 1
    assert client.metrics("no-such-job") == {}


def test_incidents(client: commwatch.Client, watched: RunningAgent) -> None:
    """The incidents of a job are those of the REST API with the same filters, as rows, and their figures are those of these rows."""
    (late,) = wait_for(lambda: client.incidents("train", kind="straggler", state=["open", "ended"]), "the late rank")
    assert (late["ranks"], late["title"], late["state"]) == ([1], "Late rank: rank 1", "open")
    assert commwatch.incidents()[0]["id"] == late["id"]
    assert list(client.incidents("train", state="ended", severity="critical")) == []
    figures = client.metrics("train")
    every = watched.get("/api/v1/incidents?job=train&state=open&state=ended")
    assert figures["comm/incidents_open"] == sum(each["state"] == "open" for each in every)
    assert figures["comm/incidents/straggler"] == 1


def test_unknown_is_absent() -> None:
    """Figures that are not known are absent, not 0."""
    verdict = {"kind": "hang", "ranks": [3], "cost_share": None}
    job = {"comm": None, "exposed": None, "step_s": None, "slots": [], "verdicts": [verdict]}
    assert figures_of({"job": job}) == {"comm/problems": 1.0}
    assert figures_of({"job": None}) == {}


def _incident(kind: str, state: str, cost_rank_s: float | None, consequence_of: str | None = None) -> dict[str, object]:
    return {"kind": kind, "state": state, "cost_rank_s": cost_rank_s, "consequence_of": consequence_of}


def test_figures_of_incidents() -> None:
    """Incidents count by kind, and their costs add up but for those that another one explains; an unknown cost is absent, without incidents it is 0."""
    job: dict[str, object] = {"comm": None, "exposed": None, "step_s": None, "slots": [], "verdicts": []}

    def found(*incidents: dict[str, object]) -> dict[str, float]:
        return {name: value for name, value in figures_of({"job": job}, incidents).items() if "incident" in name}

    assert found() == {"comm/incidents_open": 0.0, "comm/incident_cost": 0.0}
    assert found(_incident("gpu_fault", "ended", None)) == {"comm/incidents_open": 0.0, "comm/incidents/gpu_fault": 1.0}
    hangs = [_incident("hang", "open", 60.0), _incident("hang", "ended", 30.0), _incident("rank_lost", "open", None)]
    assert found(*hangs, _incident("comm_bound", "open", 500.0, "a")) == {
        "comm/incidents_open": 3.0, "comm/incident_cost": 90.0, "comm/incidents/hang": 2.0, "comm/incidents/rank_lost": 1.0,
        "comm/incidents/comm_bound": 1.0,
    }  # fmt: skip


def test_busbw_in_gigabytes() -> None:
    """Bus bandwidth and waiting are those of the last complete bucket, in GB/s."""
    slots = [{"busbw": {"all_reduce": 25e9}, "waiting": 0.1}, {"busbw": {"all_reduce": 1e9}, "waiting": None}]
    late = [{"kind": "straggler", "ranks": [rank], "cost_share": cost} for rank, cost in ((5, 0.1), (7, 0.3))]
    job = {"comm": 0.5, "exposed": 0.25, "step_s": 0.1, "slots": slots, "verdicts": late}
    assert figures_of({"job": job}) == {
        "comm/share": 0.5, "comm/exposed_share": 0.25, "comm/wait_share": 0.1, "comm/step_time": 0.1,
        "comm/straggler_rank": 7.0, "comm/problems": 2.0, "comm/busbw/all_reduce": 25.0,
    }  # fmt: skip


def test_initial_operations_are_no_figures() -> None:
    """Before the first step, trackers get no bandwidth of the operations that only begin a job; one that has no steps for a minute may have none."""
    slots = [{"busbw": {"broadcast": 1e9}, "waiting": 0.1}]
    job = {
        "comm": None,
        "exposed": None,
        "step_s": None,
        "slots": slots,
        "verdicts": [],
        "started_at": 100.0,
        "step": None,
    }
    assert figures_of({"job": job, "at": 115.0}) == {"comm/problems": 0.0}
    for later in ({"job": job, "at": 170.0}, {"job": job | {"step": 3}, "at": 115.0}):
        assert figures_of(later)["comm/busbw/broadcast"] == 1.0


def test_notebook() -> None:
    """A notebook shows rows as a table, without markup from names; and says how many it leaves out."""
    rows = commwatch.Rows([{"group": "<dp>", "share": 0.123456, "ranks": [1, 2], "none": None}] * 51)
    text = rows._repr_html_()
    assert "<td>&lt;dp&gt;</td><td>0.1235</td><td>[1, 2]</td><td></td>" in text
    assert "and 1 more rows" in text
    assert json.loads(repr(list(rows[:1])).replace("'", '"').replace("None", "null"))[0]["group"] == "<dp>"


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: commwatch.Client) -> None:
    """An error is one line with the agent and the reason."""
    with pytest.raises(commwatch.AgentError, match=r"^http://127.0.0.1:\d+: by=nope: unknown dimension; choose from "):
        client.summary(by="nope")
    with pytest.raises(commwatch.AgentError, match=f"^http://127.0.0.1:{(port := free_port())}: Connection refused$"):
        commwatch.Client(f"127.0.0.1:{port}").jobs()
    monkeypatch.setenv("COMMWATCH_DIR", str(tmp_path))
    with pytest.raises(commwatch.AgentError, match=r"no agent watches .*; start one with commwatch agent"):
        commwatch.Client()


def test_in_a_process_without_job(watched: RunningAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions for scripts use the latest job where the process has none, and return nothing without an agent."""
    monkeypatch.setenv("COMMWATCH_DIR", str(watched.directory))
    assert {row["by"]["op"] for row in commwatch.summary()} == {"all_gather", "all_reduce"}
    wait_for(lambda: commwatch.summary().incidents.get("straggler") == 1, "the incident")
    assert [verdict["ranks"] for verdict in commwatch.verdicts()] == [[1]]
    step = commwatch.last_step()
    assert step is not None
    assert step["seq"] == STEPS
    wait_for(commwatch.metrics, "the first figures")
    assert commwatch.metrics()["comm/straggler_rank"] == 1
    monkeypatch.setenv("COMMWATCH_DIR", "/nonexistent")
    assert (list(commwatch.summary()), list(commwatch.verdicts()), commwatch.last_step()) == ([], [], None)
    assert list(commwatch.incidents()) == []


def test_agent_of_another_version(
    watched: RunningAgent, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An answer in another form reaches no script: there are no figures, and one line says why, once."""
    monkeypatch.setenv("COMMWATCH_DIR", str(watched.directory))
    monkeypatch.setattr(training, "_said", False)
    monkeypatch.setattr(commwatch.Client, "get", lambda *_, **__: {"job": {"other": 1}})
    none: dict[str, float] = {}
    for _ in range(2):
        assert training._asked(lambda client, job: client.metrics(job), none) == {}
    assert capfd.readouterr().err == "commwatch: no figures: KeyError: 'job_id'\n"


def test_import_is_light() -> None:
    """The API loads neither torch nor numpy nor a web framework."""
    names = ("torch", "numpy", "fastapi", "pydantic", "prometheus_client", "yaml")
    script = f"import sys, commwatch; commwatch.metrics, commwatch.Client, commwatch.watch; print([n for n in {names} if n in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=clean_env())
    assert found.stdout.strip() == "[]"
    assert set(commwatch.__all__) <= set(dir(commwatch))
