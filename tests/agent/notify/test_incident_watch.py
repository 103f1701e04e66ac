"""What the agent concludes, once a second: under clocks of the test, and in a real agent that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.error
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest

from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.config_sources import load
from commwatch_agent.history.history import History
from commwatch_agent.history.store import Writer
from commwatch_agent.incidents.conclude import Finder
from commwatch_agent.incidents.evidence import Evidence, KnownJob
from commwatch_agent.incidents.incident import Condition, EvidenceItem
from commwatch_agent.incidents.lifecycle import Table
from commwatch_agent.notify.incident_watch import SETTLED_S, IncidentWatch, Plan
from commwatch_agent.runtime.run_lock import place_of_alerts
from commwatch_agent.web.problems import answer_problems
from commwatch_agent.web.routes import alerts, incidents
from commwatch_alerts.model import CRITICAL, FIRING, PENDING, RESOLVED, WARNING, Alert, Kind, Rule
from tests.agent.prometheus.test_metrics import samples
from tests.helpers import PATIENCE_S, RunningAgent, clean_env, fetch, idle_services, wait_for

WALL_S = 1_700_000_000.0
AGENT = "/run/commwatch"


def table(*rules: Rule) -> Table:
    """The kind ``hang`` with these rules."""
    return Table({"hang": Kind("hang", WARNING, 0, 60, "", "Hang")}, {"hang": rules})


def rule(name: str, for_s: float, severity: str = WARNING, **about: Any) -> Rule:
    return Rule(name, "", for_s, 0, severity, summary=name.lower(), description="", kind="hang", **about)


LONG, WORSE = rule("Long", 30, above=10.0), rule("Long", 0, CRITICAL, above=100.0)


class Scene:
    """A watch over conditions that the test sets, under clocks that it moves."""

    def __init__(self, directory: Path, *rules: Rule, at_s: float = 0, wall_s: float = WALL_S) -> None:
        self.conditions: list[Condition] = []
        self.look: Callable[[], list[Condition]] | None = None
        self.jobs = {"train": KnownJob("key", 4, ended=False)}
        self.at_s, self.wall_s = at_s, wall_s
        self.delivered: list[Sequence[Alert]] = []
        self.path = directory / "history.sqlite"
        self.store = Writer(self.path)
        self.writes = True
        with History(self.path) as history:
            kept = history.incidents(agent=AGENT)
        plan = Plan(
            table(*(rules or (LONG, WORSE))), deliver=self.delivered.append, finders=(Finder((), "", self._find),)
        )
        self.watch = IncidentWatch(plan, self._look, AGENT, kept, clock=lambda: self.at_s, wall=lambda: self.wall_s)

    def _look(self, now: float, now_s: float) -> Evidence:
        return Evidence(now, self.jobs, common={"key": "common"})

    def _find(self, evidence: Evidence, thresholds: Mapping[str, float]) -> list[Condition]:
        return self.conditions if self.look is None else self.look()

    def later(self, seconds: int, *values: float) -> list[tuple[str, str]]:
        """So many seconds on, with hangs of these values; what was delivered meanwhile, by severity and state."""
        before = len(self.delivered)
        for _ in range(seconds):
            self.conditions = [hang(value, rank, self.wall_s) for rank, value in enumerate(values)]
            self.watch.tick()
            self.at_s, self.wall_s = self.at_s + 1, self.wall_s + 1
            rows = self.watch.unstored()
            for _, row in rows if self.writes else ():
                self.store.incident(row)
            if self.writes and self.store.commit():
                self.watch.stored(rows)
        return [(alert.labels["severity"], alert.state) for some in self.delivered[before:] for alert in some]

    def again(self, *rules: Rule, after: float = 1.0) -> Scene:
        """Another agent on the same history, so much later."""
        self.store.close()
        return Scene(self.path.parent, *rules, at_s=self.at_s + after, wall_s=self.wall_s + after)

    def page(self) -> dict[str, float]:
        """Its metrics."""
        registry = CollectorRegistry()
        registry.register(self.watch)
        found = samples(generate_latest(registry).decode())
        return {f"{name}{dict(sorted(labels)) or ''}": value for (name, labels), value in found.items()}


def hang(value: float, rank: int = 0, now: float = WALL_S) -> Condition:
    return Condition(
        "hang", ("g", str(rank)), "stuck", now - value, "train", "key", value=value, ranks=(rank,), idle_ranks=4.0
    )


def test_delivers(tmp_path: Path) -> None:
    """An alert is delivered each second while it fires, and its end once; the second after it is in the history."""
    with closing((scene := Scene(tmp_path)).store):
        assert scene.later(31, 50) == []
        assert scene.later(2, 50) == [(WARNING, FIRING)] * 2
        assert set(scene.later(2, 150)) == {(WARNING, FIRING), (CRITICAL, FIRING)}
        found = scene.later(80)
        assert sorted(each for each in found if each[1] == RESOLVED) == [(CRITICAL, RESOLVED), (WARNING, RESOLVED)]
        assert [len(some) for some in scene.watch.alerts()] == [0, 2]


def test_in_the_history_before_anyone_knows(tmp_path: Path) -> None:
    """An alert waits until its incident is in the history, and at most five seconds if the history cannot be written."""
    with closing((scene := Scene(tmp_path, rule("Hang", 0))).store):
        scene.writes = False
        assert scene.later(5, 50) == []
        assert scene.later(3, 50) == [(WARNING, FIRING)] * 3


def test_metrics(tmp_path: Path) -> None:
    """Alerts and incidents are counted, open ones by culprit; their cost is in rank seconds."""
    with closing((scene := Scene(tmp_path)).store):
        scene.later(11, 20)
        found = scene.page()
        assert found.pop("commwatch_alert_evaluation_seconds_total") >= 0
        job = "'job_id': 'train', 'kind': 'hang'"
        assert found == {
            "commwatch_alerts{'alertname': 'Long', 'severity': 'warning', 'state': 'pending'}": 1,
            "commwatch_incident_open{" + job + ", 'rank': '0', 'severity': 'warning'}": 1,
            "commwatch_incidents_total{" + job + "}": 1,
            "commwatch_incident_cost_seconds_total{" + job + "}": 4 * (20 + 10),
            "commwatch_verdict_seconds{'group': '', 'group_id': '', " + job + ", 'rank': '0'}": 20 + 11,
        }


def test_metrics_of_a_job_that_is_gone(tmp_path: Path) -> None:
    """A job that is no longer in memory has no series, and gets none from what the history knows of it."""
    scene = Scene(tmp_path)
    scene.later(11, 20)
    scene.jobs = {}
    scene.later(90)
    with closing((second := scene.again()).store):
        second.jobs = {}
        second.later(90)
        for each in (scene, second):
            assert [name for name in each.page() if "'job_id'" in name] == []


def test_restart(tmp_path: Path) -> None:
    """An agent goes on with the incidents of an earlier one: same id and begin, its alert is not new; they end when they are known to be over."""
    first = Scene(tmp_path)
    first.later(40, 50)
    (before,) = first.watch.incidents()
    with closing((second := first.again()).store):
        assert [alert.state for alert in second.watch.alerts()[0]] == [FIRING]
        assert set(second.later(5, 50)) == {(WARNING, FIRING)}
        (after,) = second.watch.incidents()
        assert (after.id, after.seen_at, after.alerts[0].fired_at) == (
            before.id,
            before.seen_at,
            before.alerts[0].fired_at,
        )
        second.later(round(SETTLED_S) - 6)
        assert [each.state for each in second.watch.incidents()] == ["open"]
        assert second.later(70)[-1] == (WARNING, RESOLVED)
    third = second.again()
    with closing(third.store):
        assert [[alert.state for alert in some] for some in third.watch.alerts()] == [[], [RESOLVED]]
        assert third.later(10) == []


def test_pending_over_a_restart(tmp_path: Path) -> None:
    """An alert that was pending fires in time after a restart."""
    first = Scene(tmp_path)
    first.later(20, 50)
    with closing((second := first.again()).store):
        assert second.later(9, 50) == []
        assert second.later(4, 50)[-1] == (WARNING, FIRING)


def test_job_that_ended_meanwhile(tmp_path: Path) -> None:
    """An incident of a job that is gone ends with it."""
    first = Scene(tmp_path)
    first.later(40, 50)
    with closing((second := first.again()).store):
        second.jobs = {}
        second.later(round(SETTLED_S) + 2)
        (ended,) = second.watch.incidents()
        assert (ended.state, ended.outcome) == ("ended", "job_ended")


def test_end_of_the_job(tmp_path: Path) -> None:
    """With its job an incident ends at once, and so do its alerts."""
    with closing((scene := Scene(tmp_path)).store):
        scene.later(40, 50)
        scene.jobs = {"train": KnownJob("key", 4, ended=True)}
        assert scene.later(3) == [(WARNING, RESOLVED)]


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_clock_that_is_set(tmp_path: Path, step_s: float) -> None:
    """An alert fires after the time by the monotonic clock, whatever the wall clock does; times are by the new one."""
    with closing((scene := Scene(tmp_path)).store):
        scene.later(10, 50)
        scene.wall_s += step_s
        assert scene.later(21, 50) == []
        assert scene.later(1, 50) == [(WARNING, FIRING)]
        (open_one,) = scene.watch.incidents()
        assert open_one.began_at == pytest.approx(WALL_S - 50 + step_s)
        assert len({each.id for each in scene.watch.incidents()}) == 1


def test_settings_that_change(tmp_path: Path) -> None:
    """Alerts of rules in both plans go on; those of others end."""
    with closing((scene := Scene(tmp_path)).store):
        scene.later(40, 50)
        scene.watch.change(replace(scene.watch.plan, table=table(WORSE)))
        assert scene.later(20, 50)[-1] == (WARNING, RESOLVED)
        assert [each.state for each in scene.watch.incidents()] == ["open"]


def test_evidence_that_takes_time(tmp_path: Path) -> None:
    """Evidence that comes later is part of the incident, and of the history."""
    with closing((scene := Scene(tmp_path)).store):
        scene.later(3, 50)
        (incident,) = scene.watch.incidents()
        scene.watch.add_evidence(incident.id, [EvidenceItem("stack", WALL_S, "main at line 3")])
        scene.later(3, 50)
        assert [each.source for each in scene.watch.incidents()[0].evidence] == ["stack"]
        with History(scene.path) as history:
            assert "main at line 3" in history.incidents()[0].data


def test_what_is_explained(tmp_path: Path) -> None:
    """An alert that another one of the same severity explains is not delivered, and neither is its end."""
    with closing((scene := Scene(tmp_path, rule("Hang", 0))).store):
        kinds = {**scene.watch.plan.table.kinds, "desync": Kind("desync", CRITICAL, 0, 60, "", "Desync")}
        rules = {**scene.watch.plan.table.rows, "desync": [replace(rule("Desync", 0, CRITICAL), kind="desync")]}
        scene.watch.change(replace(scene.watch.plan, table=Table(kinds, rules)))
        both = [replace(hang(50), kind="desync", subject=("g", "9")), hang(50)]
        scene.look = lambda: both
        names = set()
        for each in range(150):
            scene.look = (lambda: both) if each < 10 else list
            before = len(scene.delivered)
            scene.later(1)
            names |= {(alert.name, alert.state) for some in scene.delivered[before:] for alert in some}
        assert names == {("Desync", FIRING), ("Desync", RESOLVED)}
        (effect,) = [each for each in scene.watch.incidents() if each.kind == "hang"]
        (cause,) = [each for each in scene.watch.incidents() if each.kind == "desync"]
        assert (effect.consequence_of, cause.consequence_of) == (cause.id, None)


def test_cause_without_an_alert(tmp_path: Path) -> None:
    """The message on what follows from an incident names that incident, which may have no alert yet."""
    with closing((scene := Scene(tmp_path, rule("Hang", 300))).store):
        kinds = {**scene.watch.plan.table.kinds, "nccl_fault": Kind("nccl_fault", WARNING, 0, 60, "", "Errors")}
        rules = {**scene.watch.plan.table.rows, "nccl_fault": [replace(rule("Errors", 0), kind="nccl_fault")]}
        scene.watch.change(replace(scene.watch.plan, table=Table(kinds, rules)))
        closed = Condition("nccl_fault", ("watchdog_timeout",), "timed out", WALL_S, "train", "key", value=1.0)
        scene.look = lambda: [hang(50), closed]
        scene.later(5)
        (sent,) = {alert.annotations["where"] for some in scene.delivered for alert in some}
        assert sent.endswith("It follows from: Hang: rank 0, stuck.")


# -- the routes --------------------------------------------------------------------------------


@contextmanager
def routes(scene: Scene) -> Iterator[Callable[[str], httpx.Response]]:
    """What the routes answer."""
    app = FastAPI()
    services = app.state.services = idle_services(QueryService(scene.path), incidents=scene.watch)
    for router in (alerts.router, incidents.router):
        app.include_router(router)
    answer_problems(app)

    async def ask(path: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://agent") as client:
            return await client.get(f"/api/v1/{path}")

    try:
        yield lambda path: asyncio.run(ask(path))
    finally:
        services.worker.close()


def test_route_of_alerts(tmp_path: Path) -> None:
    """Active and past alerts are shown with their times, and chosen by state, severity and job."""
    with closing((scene := Scene(tmp_path)).store), routes(scene) as answer:
        scene.later(3, 150)
        scene.later(20, 50)

        def shown(query: str) -> list[list[str]]:
            found = answer(f"alerts{query}").json()
            return [[f"{one['severity']} {one['state']}" for one in found[part]] for part in ("active", "past")]

        active, past = ["warning pending"], ["critical resolved"]
        assert shown("") == [active, past]
        assert shown("?job=train") == [active, past]
        assert shown("?state=pending") == [active, []]
        assert shown("?state=resolved") == [[], past]
        assert shown("?severity=warning") == [active, []]
        (ended,) = answer("alerts").json()["past"]
        (incident,) = scene.watch.incidents()
        assert ended["labels"] == {"alertname": "Long", "severity": "critical", "job_id": "train", "rank": "0"}
        assert ended["annotations"]["incident"] == incident.id
        assert (ended["value"], ended["active_at"], ended["resolved_at"]) == (150, WALL_S, WALL_S + 17)


def test_route_of_incidents(tmp_path: Path) -> None:
    """Open and ended incidents are listed and chosen by state, kind, severity and time; one by its id has its evidence."""
    with closing((scene := Scene(tmp_path)).store), routes(scene) as answer:
        scene.later(2, 50, 60)
        scene.later(100, 50)

        def shown(query: str) -> list[tuple[str, list[int]]]:
            return [(one["state"], one["ranks"]) for one in answer(f"incidents{query}").json()]

        both = [("open", [0]), ("ended", [1])]
        assert shown("") == both
        assert shown("?state=open") == both[:1]
        assert shown("?state=open&state=ended") == both
        assert shown("?kind=hang") == both
        assert shown("?kind=straggler") == []
        assert shown("?severity=critical") == []
        assert shown(f"?until={WALL_S - 100}") == []
        assert shown(f"?since={WALL_S + 90}") == both[:1]
        assert shown("?limit=1") == both
        assert answer("incidents?job=nope").status_code == 404
        (one, _) = answer("incidents").json()
        found = answer(f"incidents/{one['id']}").json()
        assert found == {**one, "evidence": []}
        assert answer("incidents/none").status_code == 404


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("alerts?state=over", "state=over"),
        ("alerts?severity=loud", "severity=loud"),
        ("alerts?jobs=x", "jobs"),
        ("incidents?state=over", "state"),
    ],
)
def test_routes_refuse(tmp_path: Path, path: str, named: str) -> None:
    """What does not exist is refused by name."""
    with closing((scene := Scene(tmp_path)).store), routes(scene) as answer:
        refused = answer(path)
        assert refused.status_code in (400, 422)
        assert named in refused.json()["detail"]


# -- a real agent -----------------------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path
from commwatch_agent.notify.incident_watch import Plan
from commwatch_agent.incidents.conclude import Finder
from commwatch_agent.incidents.incident import Condition
from commwatch_agent.incidents.lifecycle import Table
from commwatch_alerts.model import Kind, Rule
from commwatch_agent.config_sources import load
from commwatch_agent.daemon import Daemon
kind = Kind("agent_fault", "info", 0, 60, "", "Here")
rules = [
    Rule("Here", "", 0, 0, "info", summary="an agent is here", description="", kind=kind.name),
    Rule("Long", "", 3600, 0, "warning", summary="an agent is here for long", description="", kind=kind.name),
]
told = open(sys.argv[2], "a", buffering=1)
def deliver(alerts):
    told.writelines(f"{alert.name} {alert.id} {alert.state}\\n" for alert in alerts)
here = Finder((kind.name,), "", lambda evidence, _: [Condition(kind.name, (), "here", evidence.now)])
plan = Plan(Table({kind.name: kind}, {kind.name: rules}), deliver=deliver, finders=(here,))
Daemon(load({}, None, dir=Path(sys.argv[1]), port=0), plan).run()
"""


@contextmanager
def alerting_agent(directory: Path, told: Path) -> Iterator[RunningAgent]:
    """An agent with two alerts."""
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
    """An agent that is killed while alerts are pending and firing has the same ones afterwards, and the same incident."""
    told = tmp_path / "told.txt"
    with alerting_agent(tmp_path / "run", told) as running:
        before = wait_for(lambda: len(found := states(running)) == 2 and found, "both alerts")
        assert (before["Here"][1], before["Long"][1]) == (FIRING, PENDING)
        series = 'commwatch_alerts{{alertname="{}",severity="{}",state="{}"}}'
        page = running.samples()
        assert page[series.format("Here", "info", FIRING)] == page[series.format("Long", "warning", PENDING)] == 1
        with pytest.raises(urllib.error.HTTPError, match="404"):
            running.get("/api/v1/alerts?job=nope")
        wait_for(lambda: told.exists() and told.read_text(), "a delivery")
        (incident,) = running.get("/api/v1/incidents")
        running.kill()
    with alerting_agent(tmp_path / "run", told) as running:
        told.write_text("")
        assert states(running) == before
        wait_for(lambda: told.read_text().count("\n") > 2, "deliveries")
        assert [one["id"] for one in running.get("/api/v1/incidents")] == [incident["id"]]
    assert set(told.read_text().splitlines()) == {f"Here {before['Here'][0]} {FIRING}"}


def test_two_agents_of_a_host(tmp_path: Path) -> None:
    """Of two agents that share a state directory each keeps its own evidence; once the first is gone its place is free again."""
    first, second = (load({}, None, dir=tmp_path / name, state=tmp_path / "state") for name in ("one", "two"))
    for config in (first, second):
        config.dir.mkdir()
    first.state.mkdir()
    kept, lock_fd = place_of_alerts(first)
    assert kept.evidence == first.evidence
    other, other_fd = place_of_alerts(second)
    assert other.sent_alerts.parent == other.evidence.parent == second.dir
    os.close(lock_fd)
    os.close(other_fd)
    again, lock_fd = place_of_alerts(second)
    assert again.evidence == first.evidence
    os.close(lock_fd)
