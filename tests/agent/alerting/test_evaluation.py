"""The agent's own alerts: under a clock of the test, and in a real agent that is killed."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import subprocess
import sys
import urllib.error
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from commwatch_agent.alerting.evaluation import Alerting, Plan
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.config import load
from commwatch_agent.runtime.run_lock import place_of_alerts
from commwatch_agent.server.problems import answer_problems
from commwatch_agent.server.routes import alerts
from commwatch_alerts.book import Book
from commwatch_alerts.evaluator import LEAST_WARM_S
from commwatch_alerts.model import CRITICAL, FIRING, PENDING, RESOLVED, WARNING, Alert, Record, Rule
from tests.agent.prometheus.test_metrics import samples
from tests.helpers import PATIENCE_S, RunningAgent, clean_env, fetch, idle_services, wait_for

HIGH = Rule("ShareHigh", "commwatch_comm_share_ratio > 0.3", 30, 0, WARNING, summary="high", description="quite high")
WORSE = Rule("ShareHigh", "commwatch_comm_share_ratio > 0.5", 0, 0, CRITICAL, summary="higher", description="very high")


class Scene:
    """An agent's alerting over shares that the test sets, under clocks that it moves."""

    def __init__(
        self, directory: Path, *rules: Rule, records: Sequence[Record] = (), at_s: float = 0, every_s: float = 15
    ) -> None:
        self.shares: dict[str, float] = {}
        self.at_s, self.wall_s = at_s, 1_700_000_000.0
        self.delivered: list[Sequence[Alert]] = []
        self.collected = 0
        plan = Plan(rules or (HIGH, WORSE), records, deliver=self.delivered.append, every_s=every_s)
        self.alerting = Alerting(
            plan, self._collect, Book(directory / "alerts.json"), lambda: self.at_s, lambda: self.wall_s
        )

    def _collect(self) -> Iterable[Metric]:
        self.collected += 1
        family = GaugeMetricFamily("commwatch_comm_share_ratio", "Share.", labels=("job_id", "rank"))
        for rank, value in self.shares.items():
            family.add_metric(("train", rank), value)
        return [family, GaugeMetricFamily("commwatch_other", "Other.", value=1)]

    def later(self, seconds: float, **shares: float) -> list[tuple[str, str]]:
        """So many seconds on, with these shares from now on; what was delivered meanwhile, by severity and state."""
        self.shares = {name[1:]: value for name, value in shares.items()}
        before = len(self.delivered)
        for _ in range(round(seconds)):
            self.alerting.tick()
            self.at_s, self.wall_s = self.at_s + 1, self.wall_s + 1
        return [(alert.labels["severity"], alert.state) for alerts in self.delivered[before:] for alert in alerts]

    def page(self) -> dict[str, float]:
        """The metrics of alerting."""
        registry = CollectorRegistry()
        registry.register(self.alerting)
        from prometheus_client import generate_latest

        found = samples(generate_latest(registry).decode())
        return {f"{name}{dict(sorted(labels)) or ''}": value for (name, labels), value in found.items()}


def test_rounds(tmp_path: Path) -> None:
    """Rules are evaluated every fifteen seconds, however often the method is called; firing alerts are sent each round, and their end once."""
    scene = Scene(tmp_path)
    assert scene.later(30, r0=0.4) == []
    assert scene.collected == 2
    assert scene.later(30, r0=0.4) == [(WARNING, FIRING)] * 2
    assert scene.later(15, r0=0.6) == [(WARNING, FIRING), (CRITICAL, FIRING)]
    assert scene.later(30, r0=0.1) == [(WARNING, RESOLVED), (CRITICAL, RESOLVED)]
    assert [len(alerts) for alerts in scene.alerting.alerts()] == [0, 2]


def test_late_round(tmp_path: Path) -> None:
    """After a machine has slept rounds are not made up for."""
    scene = Scene(tmp_path)
    scene.later(1, r0=0.1)
    scene.at_s += 1000
    scene.later(30, r0=0.1)
    assert scene.collected == 3


def test_own_metrics(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The number of alerts is served by name, severity and state; a rule that fails is counted, and logged once."""
    broken = Rule(
        "Broken",
        "commwatch_comm_share_ratio * on () commwatch_comm_share_ratio",
        0,
        0,
        WARNING,
        summary="",
        description="",
    )
    scene = Scene(tmp_path, HIGH, WORSE, broken)
    with caplog.at_level(logging.WARNING, "commwatch"):
        scene.later(30, r0=0.6, r1=0.4)
    assert len([record for record in caplog.records if "Broken" in record.getMessage()]) == 1
    found = scene.page()
    assert found.pop("commwatch_alert_evaluation_seconds_total") >= 0
    assert found == {
        "commwatch_alerts{'alertname': 'ShareHigh', 'severity': 'warning', 'state': 'pending'}": 2,
        "commwatch_alerts{'alertname': 'ShareHigh', 'severity': 'critical', 'state': 'firing'}": 1,
        "commwatch_alert_evaluation_failures_total": 2,
    }


def test_restart(tmp_path: Path) -> None:
    """Alerts that an earlier agent has left are shown at once, sent again, and resolved when they are known to be over."""
    first = Scene(tmp_path)
    first.later(60, r0=0.4)
    second = Scene(tmp_path, at_s=5)
    second.wall_s = first.wall_s
    assert [alert.state for alert in second.alerting.alerts()[0]] == [FIRING]
    rounds = round(LEAST_WARM_S / 15)
    assert second.later(LEAST_WARM_S + 30) == [(WARNING, FIRING)] * rounds + [(WARNING, RESOLVED)]
    third = Scene(tmp_path)
    assert [[alert.state for alert in some] for some in third.alerting.alerts()] == [[], [RESOLVED]]


def test_kept_before_anybody_is_told(tmp_path: Path) -> None:
    """Alerts that fire or are over are on disk before they are sent, so an agent that is killed then does not forget what it sent."""
    scene, book, found = Scene(tmp_path), tmp_path / "alerts.json", list[tuple[int, int]]()

    def deliver(alerts: Sequence[Alert]) -> None:
        kept = Book(book).load()
        assert kept is not None
        found.append((len(kept.state["active"]), len(kept.past)))

    plan = Plan((WORSE,), deliver=deliver)
    scene.alerting = Alerting(plan, scene._collect, Book(book), lambda: scene.at_s, lambda: scene.wall_s)
    scene.later(15, r0=0.6)
    scene.later(15, r0=0.1)
    assert found == [(1, 0), (0, 1)]


def test_clean_end_keeps_what_is_pending(tmp_path: Path) -> None:
    """An agent that ends in order leaves the last second of ``for``; the next one fires in time."""
    long = Rule("Long", "commwatch_comm_share_ratio > 0.3", 75, 0, WARNING, summary="", description="")
    first = Scene(tmp_path, long)
    first.later(46, r0=0.4)
    first.alerting.close()
    second = Scene(tmp_path, long, at_s=1000)
    second.wall_s = first.wall_s
    assert second.later(30, r0=0.4) == []
    assert second.later(15, r0=0.4) == [(WARNING, FIRING)]


# -- the route --------------------------------------------------------------------------------


def answer(scene: Scene, query: str) -> httpx.Response:
    """What the route says."""
    app = FastAPI()
    app.state.services = idle_services(QueryService(Path("none")), alerts=scene.alerting)
    app.include_router(alerts.router)
    answer_problems(app)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://agent") as client:
            return await client.get(f"/api/v1/alerts{query}")

    return asyncio.run(ask())


def test_route(tmp_path: Path) -> None:
    """Active and past alerts are shown with their times, and chosen by state, severity and job."""
    scene = Scene(tmp_path)
    scene.later(15, r0=0.6)
    scene.later(15, r1=math.inf)

    def shown(query: str) -> tuple[list[str], list[str]]:
        found = answer(scene, query).json()
        return tuple(
            [f"{one['labels']['rank']} {one['severity']} {one['state']}" for one in found[part]]
            for part in ("active", "past")
        )  # type: ignore[return-value]

    active, past = ["1 warning pending", "1 critical firing"], ["0 critical resolved"]
    assert shown("") == (active, past)
    assert shown("?job=train") == (active, past)
    assert shown("?state=firing") == (active[1:], [])
    assert shown("?state=resolved") == ([], past)
    assert shown("?severity=warning") == (active[:1], [])
    assert shown("?limit=1") == (active[:1], past)
    assert answer(scene, "").json()["past"][0] | {"id": ""} == {
        "id": "",
        "name": "ShareHigh",
        "severity": "critical",
        "state": "resolved",
        "labels": {"alertname": "ShareHigh", "severity": "critical", "job_id": "train", "rank": "0"},
        "annotations": {"summary": "higher", "description": "very high"},
        "value": 0.6,
        "active_at": 1_700_000_000,
        "fired_at": 1_700_000_000,
        "resolved_at": 1_700_000_015,
    }
    assert {one["value"] for one in answer(scene, "").json()["active"]} == {None}


@pytest.mark.parametrize(
    ("query", "named"), [("state=over", "state=over"), ("severity=loud", "severity=loud"), ("jobs=x", "jobs")]
)
def test_route_refuses(tmp_path: Path, query: str, named: str) -> None:
    """What does not exist is refused by name."""
    refused = answer(Scene(tmp_path), f"?{query}")
    assert refused.status_code in (400, 422)
    assert named in refused.json()["detail"]


# -- a real agent -----------------------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path
from commwatch_agent.alerting.evaluation import Plan
from commwatch_alerts.model import Rule
from commwatch_agent.config import load
from commwatch_agent.daemon import Daemon
rules = [
    Rule("Here", "commwatch_build_info == 1", 0, 0, "info", summary="an agent is here", description=""),
    Rule("Long", "commwatch_build_info == 1", 3600, 0, "warning", summary="an agent is here for long", description=""),
]
told = open(sys.argv[2], "a", buffering=1)
def deliver(alerts):
    told.writelines(f"{alert.name} {alert.id} {alert.state}\\n" for alert in alerts)
Daemon(load({}, None, dir=Path(sys.argv[1]), port=0), Plan(rules, deliver=deliver, every_s=0.2)).run()
"""


@contextmanager
def alerting_agent(directory: Path, told: Path) -> Iterator[RunningAgent]:
    """An agent that evaluates two rules five times a second."""
    command = [sys.executable, "-c", SCRIPT, str(directory), str(told)]
    running = RunningAgent(subprocess.Popen(command, env=clean_env()), directory, fetch)
    try:

        def answers() -> bool:
            assert running.process.poll() is None, "the agent ended at its start"
            try:
                running.url = json.loads((directory / "agent.json").read_text())["url"]
                return bool(running.get("/api/v1/alerts")["active"])
            except (OSError, ValueError, urllib.error.URLError):
                return False

        wait_for(answers, "the agent")
        yield running
    finally:
        running.process.terminate()
        running.process.wait(PATIENCE_S)


def states(running: RunningAgent) -> dict[str, Any]:
    """Id, state and begin of the active alerts by name."""
    found = running.get("/api/v1/alerts")
    assert not found["past"]
    return {one["name"]: (one["id"], one["state"], one["active_at"]) for one in found["active"]}


def test_killed(tmp_path: Path) -> None:
    """An agent that is killed while alerts are pending and firing has the same ones afterwards, and sends them again."""
    told = tmp_path / "told.txt"
    with alerting_agent(tmp_path / "run", told) as running:
        before = wait_for(lambda: len(found := states(running)) == 2 and found, "both alerts")
        assert (before["Here"][1], before["Long"][1]) == (FIRING, PENDING)
        series = 'commwatch_alerts{{alertname="{}",severity="{}",state="{}"}}'
        page = running.samples()
        assert page[series.format("Here", "info", FIRING)] == page[series.format("Long", "warning", PENDING)] == 1
        with pytest.raises(urllib.error.HTTPError, match="404"):
            running.get("/api/v1/alerts?job=nope")
        running.kill()
    with alerting_agent(tmp_path / "run", told) as running:
        told.write_text("")
        assert states(running) == before
        wait_for(lambda: told.read_text().count("\n") > 2, "deliveries")
    assert set(told.read_text().splitlines()) == {f"Here {before['Here'][0]} {FIRING}"}


def test_rule_that_the_agent_cannot_read(tmp_path: Path) -> None:
    """An agent whose list has a rule that it cannot evaluate does not start, and names the rule."""
    script = SCRIPT.replace("commwatch_build_info == 1", "commwatch_build_info offset 5m")
    command = [sys.executable, "-c", script, str(tmp_path / "run"), str(tmp_path / "told.txt")]
    done = subprocess.run(command, env=clean_env(), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1
    assert "CannotStart: alert Here: offset is not supported" in done.stderr


def test_two_agents_of_a_host(tmp_path: Path) -> None:
    """Of two agents that share a state directory each keeps its own alerts; once the first is gone its place is free again."""
    first, second = (load({}, None, dir=tmp_path / name, state=tmp_path / "state") for name in ("one", "two"))
    for config in (first, second):
        config.dir.mkdir()
    first.state.mkdir()
    kept, lock_fd = place_of_alerts(first)
    assert kept.alerts == first.alerts
    other, other_fd = place_of_alerts(second)
    assert other.alerts.parent == other.sent_alerts.parent == other.evidence.parent == second.dir
    os.close(lock_fd)
    os.close(other_fd)
    again, lock_fd = place_of_alerts(second)
    assert again.alerts == first.alerts
    os.close(lock_fd)
