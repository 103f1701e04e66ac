"""Jobs over two hosts, each with an agent of its own: neither blames anybody, together they name who is late, if one is."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.alerts.promtool import exported
from tests.alerts.test_rules import SECONDS
from tests.e2e import prefork
from tests.e2e.hosts import Host
from tests.e2e.torchjob import JOBS
from tests.helpers import PATIENCE_S, RunningAgent, agent, clean_env, wait_for
from tests.prometheus import Prometheus, prometheus

LATE_S = 0.05
NOBODY = -1
#: A whole mean of the rules' window is not needed to judge: so many collectives are.
ENOUGH = 20


class Nodes:
    """A job on two hosts, its agents, and a Prometheus that scrapes both."""

    def __init__(self, hosts: list[Host], agents: list[RunningAgent], prom: Prometheus, ranks: int) -> None:
        self.agents, self.prom, self.ranks = agents, prom, ranks
        self._hosts = hosts

    def diagnose(self) -> list[dict[str, Any]]:
        """What ``commwatch diagnose A B`` says, on the first host."""
        command = [sys.executable, "-m", "commwatch", "diagnose", *(each.url for each in self.agents), "--json"]
        done = subprocess.run(
            [*self._hosts[0].there, *command],
            env=clean_env(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        found: list[dict[str, Any]] = json.loads(done.stdout)["verdicts"]
        assert (done.returncode, done.stderr) == (int(bool(found)), "")
        return found

    def joined(self) -> int:
        """Collectives that all ranks have told their agents of, and these would tell a fan-out."""
        parts = [part for each in self.agents for part in each.get("/api/v1/parts")["parts"]]
        assert {part["group_size"] for part in parts} <= {self.ranks}
        told = [set(part["seq"]) for part in parts]
        return len(set.intersection(*told)) if len(told) == self.ranks else 0

    def verdicts(self) -> list[Any]:
        """What the agents themselves say is wrong."""
        return [verdict for each in self.agents for verdict in each.get("/api/v1/verdicts")]

    def lateness(self) -> dict[int, float]:
        """By the rules, of the group over both hosts; empty until all ranks are there."""
        found = self.prom.query(f"{SECONDS}lateness{{group='default_pg'}}")
        return {int(labels["rank"]): value for labels, value in found}

    def stragglers(self) -> list[tuple[int, str]]:
        """Rank and group of those that the rules name."""
        return [(int(labels["rank"]), labels["group"]) for labels, _ in self.prom.query(f"{SECONDS}straggler")]


@contextmanager
def nodes(hosts: list[Host], directory: Path, per_node: int, *arguments: int) -> Iterator[Nodes]:
    """The job ``nodes.py`` with so many ranks a host, watched; killed at the end."""
    ranks: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        agents = []
        for host in hosts:
            (directory / host.address).mkdir(mode=0o700)
            flags = (directory / host.address, "--host", host.address, "--insecure", "--quiet")
            agents.append(stack.enter_context(agent(*flags, there=host.there, fetch=host.fetch)))
        scraping = prometheus(
            directory, [each.url for each in agents], (exported(directory),), there=hosts[0].there, fetch=hosts[0].fetch
        )
        prom = stack.enter_context(scraping)
        try:
            for rank in range(per_node * len(hosts)):
                host = hosts[rank // per_node]
                where = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29700", "GLOO_SOCKET_IFNAME": host.device}
                who = {"RANK": str(rank), "WORLD_SIZE": str(per_node * len(hosts)), "PER_NODE": str(per_node)}
                watched = {"COMMWATCH": "1", "COMMWATCH_DIR": str(directory / host.address), "COMMWATCH_JOB": "nodes"}
                command = [*host.there, *prefork.command(JOBS / "nodes.py", *map(str, arguments))]
                quiet = subprocess.DEVNULL
                env = clean_env(**where, **who, **watched)
                ranks.append(subprocess.Popen(command, env=env, stdout=quiet, stderr=quiet))
            yield Nodes(hosts, agents, prom, len(ranks))
        finally:
            for process in ranks:
                process.send_signal(signal.SIGKILL)
                process.wait()


@pytest.mark.parametrize(("per_node", "culprit"), [(2, 2), (1, 1)])
def test_late_rank_on_another_node(hosts: list[Host], tmp_path: Path, per_node: int, culprit: int) -> None:
    """No agent blames a rank; `diagnose` over both and the rules of Prometheus name the late one, the rules by how much within 20 %."""
    with nodes(hosts, tmp_path, per_node, culprit, 1000) as running:
        wait_for(lambda: running.joined() > ENOUGH, "collectives")
        (verdict,) = wait_for(running.diagnose, "the verdict")
        assert (verdict["kind"], verdict["cause"], verdict["group"]) == ("straggler", "late", "default_pg")
        assert (verdict["ranks"], len(verdict["waiting"])) == ([culprit], 2 * per_node - 1)
        assert 0.7 < verdict["cost_share"] < 1
        named = wait_for(running.stragglers, "the straggler in Prometheus")
        assert named == [(culprit, "default_pg")]
        assert 0.8 * LATE_S < running.lateness()[culprit] < 1.2 * LATE_S
        assert running.verdicts() == []


def test_slow_link(hosts: list[Host], tmp_path: Path) -> None:
    """Where the link is slow all ranks are, and none of them is late: not for the agents, nor together, nor by the rules."""
    for host in hosts:
        host.shape("100mbit")
    with nodes(hosts, tmp_path, 2, NOBODY, 250_000) as running:  # 1 MB: 120 ms and more
        wait_for(lambda: running.joined() > ENOUGH, "collectives")
        lateness = wait_for(running.lateness, "lateness in Prometheus")
        means = running.prom.query(f"{SECONDS}mean{{group='default_pg'}}")
        assert len(lateness) == len(means) == running.ranks
        assert min(value for _, value in means) > 0.08
        assert max(lateness.values()) < min(value for _, value in means) / 2
        assert (running.verdicts(), running.diagnose(), running.stragglers()) == ([], [], [])
