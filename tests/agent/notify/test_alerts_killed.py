"""An agent that is killed, and its receivers: none gets one occurrence twice, and each gets its end."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commwatch_alerts.model import FIRING, PENDING, RESOLVED
from tests.helpers import RunningAgent, Trainer, clean_env, fetch, free_port, identity, wait_for
from tests.receivers import Server

pytestmark = pytest.mark.long

#: An agent that has just started does not judge for some seconds what it does not find, in which it reads the rings.
SCRIPT = """
import sys
from pathlib import Path
from commwatch_agent.notify import incident_watch
from commwatch_agent.notify.incident_watch import Plan
from commwatch_agent.incidents.conclude import Finder
from commwatch_agent.incidents.incident import Condition
from commwatch_agent.incidents.lifecycle import Table
from commwatch_agent.incidents import lifecycle
from commwatch_alerts.model import Kind, Rule
from commwatch_agent.config_sources import load
from commwatch_agent.daemon import Daemon
incident_watch.SETTLED_S, lifecycle.GAP_S = 6.0, 1.0
kind = Kind("straggler", "warning", 0, 0, "", "Here")
rules = [
    Rule("Here", "", 0, 0, "warning", summary="a rank is here", description="", kind=kind.name),
    Rule("Later", "", 5, 0, "warning", summary="a rank has been here", description="", kind=kind.name),
]
def here(evidence, thresholds):
    live = [view.job_id for view in evidence.ranks if view.state == "running"]
    return [Condition(kind.name, ("0",), "here", evidence.now, name, evidence.jobs[name].run) for name in live]
finders = (Finder((kind.name,), "", here),)
plan = Plan(Table({kind.name: kind}, {kind.name: rules}), deliver=lambda alerts: daemon._deliver(alerts), finders=finders)
daemon = Daemon(load({}, Path(sys.argv[2]), dir=Path(sys.argv[1]), port=0), plan)
daemon.run()
"""


class Scene:
    """Ranks, an agent whose alerts watch them, and a webhook."""

    def __init__(self, directory: Path, url: str) -> None:
        self.run = directory / "run"
        self._settings = directory / "commwatch.toml"
        self.leads_to(url)

    def leads_to(self, url: str) -> None:
        """The receiver of the agent's alerts, from its next start on."""
        self._settings.write_text(f'[[receivers]]\nkind = "webhook"\nurl = "{url}"\n')

    def noted(self, name: str) -> bool:
        """The agent has stored that an alert was sent, and not that its end was."""
        return any(f'"name": "{name}"' in file.read_text() for file in self.run.glob("sent-*.json"))

    def rank(self, job: str = "train") -> Trainer:
        """A rank that lives until it is killed."""
        return Trainer(self.run / "rings" / f"{job}.r0.0.ring", identity(job))

    @contextmanager
    def agent(self) -> Iterator[RunningAgent]:
        """An agent with five passes a second; it is killed at the end."""
        command = [sys.executable, "-c", SCRIPT, str(self.run), str(self._settings)]
        running = RunningAgent(subprocess.Popen(command, env=clean_env()), self.run, fetch)
        try:
            wait_for(lambda: answers(running), "the agent")
            yield running
        finally:
            running.kill()


def answers(running: RunningAgent) -> bool:
    """It is there."""
    assert running.process.poll() is None, "the agent ended at its start"
    try:
        about = json.loads((running.directory / "agent.json").read_text())
        running.url = about["url"]
        return bool(about["pid"] == running.process.pid and running.get("/healthz"))
    except (OSError, ValueError, urllib.error.URLError):
        return False


def state(running: RunningAgent, name: str) -> list[str]:
    """Of the alerts of that name: what they are, active ones first."""
    found = running.get("/api/v1/alerts")
    return [one["state"] for part in ("active", "past") for one in found[part] if one["name"] == name]


def statuses(server: Server, name: str, job: str = "train") -> list[str]:
    """Return the status of each message that a server received about an alert."""
    wanted = {"alertname": name, "job_id": job}
    return [asked.json["status"] for asked in list(server.asked) if asked.json["groupLabels"] == wanted]


def others_are_told(scene: Scene, server: Server, number: int) -> None:
    """Another job, about which the server gets a message: all earlier messages have been sent by then."""
    with scene.rank(f"other{number}"):
        wait_for(lambda: statuses(server, "Later", f"other{number}") == [FIRING], "news of another job")


def test_while_firing(tmp_path: Path) -> None:
    """An alert that keeps firing after a restart is not sent again; its end is, once, also after yet another restart."""
    with Server() as server:
        scene = Scene(tmp_path, server.url)
        with scene.rank() as rank:
            with scene.agent():
                wait_for(lambda: statuses(server, "Here") == [FIRING] and scene.noted("Here"), "the alert")
            with scene.agent():
                others_are_told(scene, server, 1)
                assert statuses(server, "Here") == [FIRING]
                rank.kill()
                wait_for(lambda: statuses(server, "Here") == [FIRING, RESOLVED] and not scene.noted("Here"), "the end")
            with scene.agent():
                others_are_told(scene, server, 2)
            assert statuses(server, "Here") == [FIRING, RESOLVED]


def test_end_while_away(tmp_path: Path) -> None:
    """If an alert ended while the agent was away, the next agent sends its end, and not that it fires again."""
    with Server() as server:
        scene = Scene(tmp_path, server.url)
        with scene.rank(), scene.agent():
            wait_for(lambda: statuses(server, "Here") == [FIRING] and scene.noted("Here"), "the alert")
        with scene.agent():
            wait_for(lambda: len(statuses(server, "Here")) > 1, "the end")
        assert statuses(server, "Here") == [FIRING, RESOLVED]


def test_end_that_did_not_arrive(tmp_path: Path) -> None:
    """An end that no receiver accepted before the agent was killed is sent by the next agent."""
    with Server() as server:
        scene = Scene(tmp_path, server.url)
        with scene.rank() as rank:
            with scene.agent():
                wait_for(lambda: statuses(server, "Here") == [FIRING] and scene.noted("Here"), "the alert")
            scene.leads_to(f"http://127.0.0.1:{free_port()}/nobody")
            with scene.agent() as running:
                rank.kill()
                wait_for(lambda: state(running, "Here") == [RESOLVED], "its end")
        scene.leads_to(server.url)
        with scene.agent():
            wait_for(lambda: statuses(server, "Here") == [FIRING, RESOLVED], "the end")
            others_are_told(scene, server, 1)
        assert statuses(server, "Here") == [FIRING, RESOLVED]


def test_while_pending(tmp_path: Path) -> None:
    """A pending alert stays pending and then fires, which is sent once, and so is its end."""
    with Server() as server:
        scene = Scene(tmp_path, server.url)
        with scene.rank() as rank:
            with scene.agent() as running:
                wait_for(lambda: state(running, "Later") == [PENDING], "the condition")
            assert statuses(server, "Later") == []
            with scene.agent():
                wait_for(lambda: statuses(server, "Later") == [FIRING], "the alert")
                rank.kill()
                wait_for(lambda: len(statuses(server, "Later")) > 1, "the end")
            assert statuses(server, "Later") == [FIRING, RESOLVED]
