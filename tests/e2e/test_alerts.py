"""From a real job to the receivers: over Prometheus and Alertmanager, and from the agent itself, at the same time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from commwatch_alerts.catalogue import read
from commwatch_alerts.export import prometheus as exported
from commwatch_alerts.model import FIRING, RESOLVED
from tests import prefork
from tests.alerts.impatient import impatient, impatient_agent
from tests.e2e.hosts import Host
from tests.e2e.quiet import PAUSE_S, QuietJob
from tests.e2e.test_shares import SIZE as WHOLE
from tests.e2e.test_shares import TAKES_S as WHOLE_S
from tests.e2e.test_verdicts import Job, Trouble
from tests.e2e.torchjob import JOBS
from tests.helpers import PATIENCE_S, SOON_LOOKED, RunningAgent, agent, clean_env, fetch, needs, wait_for
from tests.prometheus import Prometheus, prometheus
from tests.receivers import Server, alertmanager

#: It runs beside all of them.
pytestmark = pytest.mark.usefixtures("quiet")
JOB = "ddp"
HIGH = "CommShareHigh"
#: What a job that waits for its link may be told of, and no more.
WAITING = {HIGH, "CommShareCritical", "ExposedCommHigh"}
SHARE = f'job:commwatch_comm_share_ratio:avg{{job_id="{JOB}"}}'
#: Bytes of a step, and how long they take: so many steps a second that shares are known after seconds.
SIZE, TAKES_S = WHOLE // 2, WHOLE_S / 2
#: Conditions have to hold for five rounds of an agent.
FOR_S = 5
#: Rounds of the agent by Prometheus' reckoning, and how many of them a healthy job is watched for.
ROUNDS = "changes(commwatch_alert_evaluation_seconds_total[1h])"
HEALTHY_ROUNDS = 3 * FOR_S
#: A share goes down over the time that it is of; then there are ``keep_firing_for`` and the rounds.
LONG_S = 3 * PATIENCE_S
#: Age of the quiet job at the end: past the longest window in which a straggler is looked for, or two minutes.
AGES_S = (40, pytest.param(125, marks=pytest.mark.long))


class Scene:
    """A job, its agent, a Prometheus, and the receivers of each."""

    def __init__(self, running: RunningAgent, prom: Prometheus, told: dict[str, Server]) -> None:
        self.agent, self.prom, self.told = running, prom, told

    def said(self, way: str) -> list[dict[str, Any]]:
        """What came of the alert on the share, the warning, in the order in which it came."""
        found = [one for asked in list(self.told[way].asked) for one in asked.json["alerts"]]
        return [one for one in found if (one["labels"]["alertname"], one["labels"]["severity"]) == (HIGH, "warning")]

    def is_told(self, way: str, status: str) -> bool:
        """The latest that came of it is this."""
        return [one["status"] for one in self.said(way)][-1:] == [status]

    def names(self) -> set[str]:
        """All alerts that any receiver got, from any sender."""
        asked = [asked for server in self.told.values() for asked in list(server.asked)]
        return {one["labels"]["alertname"] for each in asked for one in each.json["alerts"]}

    def shown(self, part: str, state: str, name: str | None = None) -> list[dict[str, Any]]:
        """``active`` or ``past`` alerts of the agent."""
        found = self.agent.get("/api/v1/alerts")[part]
        return [one for one in found if one["state"] == state and name in (None, one["name"])]

    def rounds(self) -> float:
        """How often the agent has evaluated its rules."""
        return self.prom.value(ROUNDS) or 0.0


def soon(directory: Path) -> dict[str, float | str]:
    """For an agent whose shares are of a quarter of a minute, and that looks at them each second."""
    shares = {"commwatch_agent.ingest.step_accounting.SHARE_WINDOW_NS": 15e9}
    return {**SOON_LOOKED, **shares, **impatient_agent(directory / "list.yaml", FOR_S)}


def settings(directory: Path, manager: str, webhook: str) -> Path:
    """Settings of an agent with a receiver of all its alerts, even the least severe."""
    file = directory / "commwatch.toml"
    file.write_text(
        f'[[receivers]]\nkind = "alertmanager"\nurl = "{manager}"\nseverity = "info"\n'
        f'[[receivers]]\nkind = "webhook"\nurl = "{webhook}"\nseverity = "info"\n'
    )
    return file


@contextmanager
def scene(hosts: list[Host], directory: Path, share: float) -> Iterator[Scene]:
    """A job of two ranks over the two hosts whose communication takes this share of its time, watched; killed at the end."""
    for host in hosts:
        host.shape("200mbit")
    with ExitStack() as stack:
        told = {way: stack.enter_context(Server()) for way in ("over prometheus", "over alertmanager", "directly")}
        of_prometheus = stack.enter_context(alertmanager(directory / "first", told["over prometheus"].url))
        of_agent = stack.enter_context(alertmanager(directory / "second", told["over alertmanager"].url))
        config = settings(directory, of_agent.url, told["directly"].url)
        rules = directory / "exported.yaml"
        rules.write_text(exported(read(impatient(FOR_S))), encoding="utf-8")
        run = directory / "run"
        run.mkdir(mode=0o700)
        running = stack.enter_context(agent(run, "--config", str(config), "--quiet", constants=soon(directory)))
        prom = stack.enter_context(prometheus(directory, [running.url], (rules,), tells=(of_prometheus.url,)))
        stack.enter_context(job(hosts, run, TAKES_S / share - TAKES_S))
        yield Scene(running, prom, told)


@contextmanager
def job(hosts: list[Host], run: Path, rest_s: float) -> Iterator[None]:
    """A rank on each host, whose steps take so much longer than their communication."""
    where = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29700", "WORLD_SIZE": str(len(hosts))}
    watched = {"COMMWATCH": "1", "COMMWATCH_DIR": str(run), "COMMWATCH_JOB": JOB}
    ranks = []
    try:
        for rank, host in enumerate(hosts):
            command = [*host.there, *prefork.command(JOBS / "ddp.py", f"{rest_s:.4f}", str(SIZE))]
            env = clean_env(**where, **watched, RANK=str(rank), GLOO_SOCKET_IFNAME=host.device)
            ranks.append(subprocess.Popen(command, env=env))
        yield
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def bundle(url: str) -> dict[str, Any]:
    """The evidence of an alert."""
    found: dict[str, Any] = json.loads(fetch(url)[0])
    return found


def test_from_a_job_to_a_person(hosts: list[Host], tmp_path: Path) -> None:
    """A job that its link slows down causes one message over each way, with evidence, and another one when the link is freed."""
    with scene(hosts, tmp_path, 0.6) as it:
        for way in it.told:
            wait_for(partial(it.is_told, way, FIRING), f"{HIGH} {way}", LONG_S)
        (shown,) = it.shown("active", FIRING, HIGH)
        assert 0.4 < shown["value"] < 0.8
        for way in ("directly", "over alertmanager"):
            said = it.said(way)[0]
            assert said["status"] == FIRING
            assert (said["labels"], said["annotations"].keys()) == (shown["labels"], shown["annotations"].keys())
            assert said["annotations"]["evidence_url"] == shown["annotations"]["evidence_url"]
        assert it.said("over prometheus")[0]["labels"].items() >= shown["labels"].items()
        evidence = wait_for(lambda: bundle(shown["annotations"]["evidence_url"]), "the evidence")
        assert (evidence["id"], evidence["alert"]["name"], evidence["left_out"]) == (shown["id"], HIGH, {})
        assert [rank["rank"] for rank in evidence["ranks"]] == [0, 1]
        assert {one["rank"] for one in evidence["operations"] if one["op"] == "all_reduce"} == {0, 1}
        assert max(step["comm_share"] for step in evidence["steps"]) > 0.3
        for host in hosts:
            host.free()
        for way in it.told:
            wait_for(partial(it.is_told, way, RESOLVED), f"the end {way}", LONG_S)
        for way in it.told:
            assert [said["status"] for said in it.said(way)] == [FIRING, RESOLVED]
            assert it.said(way)[1]["startsAt"] == it.said(way)[0]["startsAt"]
        (past,) = it.shown("past", RESOLVED, HIGH)
        assert (past["id"], it.shown("active", FIRING, HIGH)) == (shown["id"], [])
        assert it.names() <= WAITING


def test_healthy_job(hosts: list[Host], tmp_path: Path) -> None:
    """For a job whose communication takes a tenth of its time no message is sent, and no alert fires."""
    with scene(hosts, tmp_path, 0.1) as it:
        wait_for(lambda: it.prom.value(SHARE) is not None, "the share", LONG_S)
        before = it.rounds()
        wait_for(lambda: it.rounds() >= before + HEALTHY_ROUNDS, "rounds", LONG_S)
        share = it.prom.value(SHARE)
        assert share is not None
        assert 0.05 < share < 0.25
        assert it.prom.query('count_over_time(ALERTS{alertstate="firing"}[1h])') == []
        assert (it.shown("active", FIRING), it.shown("past", RESOLVED), it.names()) == ([], [], set())


def test_hang(tmp_path: Path) -> None:
    """The evidence of a hang has the verdict, what is in flight, and the Python stack of the rank that holds up the others."""
    needs(shutil.which("py-spy", path=f"{os.environ['PATH']}:{Path(sys.executable).parent}"), "py-spy")
    stopped = Trouble("stop", 1, "hang", "stopped", "")
    with agent(tmp_path, "--quiet", constants=soon(tmp_path)) as running:
        job = Job(tmp_path, "hang", stopped.does, stopped.culprit, stopped.good)
        try:
            firing = "/api/v1/alerts?state=firing&severity=critical"
            # It fires a moment before it is delivered, with its evidence.
            (alert,) = wait_for(
                lambda: [each for each in running.get(firing)["active"] if "evidence_url" in each["annotations"]],
                "the alert",
            )
            evidence = wait_for(lambda: bundle(alert["annotations"]["evidence_url"]), "the evidence")
        finally:
            job.end()
    assert (alert["name"], alert["labels"]["rank"], evidence["id"]) == ("CollectiveHang", "1", alert["id"])
    assert [(one["kind"], one["ranks"]) for one in evidence["verdicts"]] == [("hang", [stopped.culprit])]
    assert {rank["rank"] for rank in evidence["ranks"] if rank["in_flight"]} == {0, 2}
    stacks = {one["rank"]: one["text"] for one in evidence["stacks"] if one["kind"] == "python_stack"}
    assert "stop (" in stacks[stopped.culprit]
    assert evidence["left_out"] == {}


@pytest.mark.parametrize("age_s", AGES_S)
def test_no_verdict_on_a_healthy_job(quiet: QuietJob, age_s: int) -> None:
    """Uneven compute, checkpoints and posted receives on a busy machine, and not one verdict."""
    old = partial(quiet.is_old, age_s, 100)
    wait_for(lambda: old() or not quiet.running(), "its age", age_s + PATIENCE_S)
    assert quiet.running()
    assert quiet.asked > 0.2 * age_s / PAUSE_S
    assert quiet.verdicts == []
