"""Jobs over two hosts, each with its own agent: neither blames a rank alone, together they name the late rank, if there is one."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import prefork
from tests.alerts.test_rules import SHARE
from tests.e2e.hosts import Host
from tests.e2e.test_fault_matrix import SOON, SPARING
from tests.e2e.torchjob import JOBS
from tests.faults.nodes import WITHIN_S, cluster
from tests.faults.results import line
from tests.faults.scenarios import SCENARIOS
from tests.helpers import RunningAgent, clean_env, commwatch, wait_for
from tests.prometheus import Prometheus

NOBODY = -1
#: Jobs of the fault matrix, which run beside each other; as they are, and with fewer ranks and steps.
WHOLE = {"ddp8x4 late 2": (), "pipex4 slow 1": (), "fsdpx4 uneven 0,1,2,3": ()}
SHORT = {"ddp4x4 late 2": SPARING, "pipex2 slow 1": SOON, "fsdpx4 uneven 0,1,2,3": SPARING}
#: A whole mean of the rules' window is not needed to judge: so many collectives are.
ENOUGH = 20


class Nodes:
    """A job on two hosts, its agents, and a Prometheus that scrapes both."""

    def __init__(
        self, hosts: list[Host], agents: list[RunningAgent], prom: Prometheus, processes: list[subprocess.Popen[bytes]]
    ) -> None:
        self.agents, self.prom, self.processes, self.ranks = agents, prom, processes, len(processes)
        self._hosts = hosts

    def diagnose(self) -> list[dict[str, Any]]:
        """What ``commwatch diagnose A B`` says, on the first host."""
        done = commwatch("diagnose", *(each.url for each in self.agents), "--json", beside=self._hosts[0].process)
        answer = json.loads(done.stdout)
        if answer["silent"]:  # on a busy machine an agent may take too long to answer
            return []
        # An incident stays for a while where the verdict comes and goes.
        wrong = answer["verdicts"] or [each for each in answer["incidents"] if each["holds"]]
        assert (done.returncode, done.stderr) == (int(bool(wrong)), "")
        found: list[dict[str, Any]] = answer["verdicts"]
        return found

    def shows(self, text: str) -> bool:
        """Whether ``commwatch diagnose`` prints this, whichever of the agents it asks."""
        beside = self._hosts[0].process
        return all(text in commwatch("diagnose", each.url, beside=beside).stdout for each in self.agents)

    def parts(self) -> list[dict[str, Any]]:
        """What the agents report to a fan-out of groups over several nodes."""
        return [part for each in self.agents for part in each.get("/api/v1/parts")["parts"]]

    def joined(self) -> int:
        """Collectives that all ranks have reported to their agents, and that these would report to a fan-out."""
        told = [set(part["seq"]) for part in self.parts() if part["group_size"] == self.ranks]
        return len(set.intersection(*told)) if len(told) == self.ranks else 0

    def wait_until_joined(self) -> None:
        """Wait for enough collectives; groups within a node are then no longer reported: the agent knows all of their ranks."""
        wait_for(lambda: self.joined() > ENOUGH, "collectives")
        assert {part["group_size"] for part in self.parts()} == {self.ranks}

    def verdicts(self) -> list[Any]:
        """What the agents themselves say is wrong."""
        return [verdict for each in self.agents for verdict in each.get("/api/v1/verdicts")]

    def by_rank(self, record: str) -> dict[int, float]:
        """What the rules record of each rank; empty until all ranks are there."""
        return {int(labels["rank"]): value for labels, value in self.prom.query(f"{SHARE}{record}")}


@contextmanager
def nodes(hosts: list[Host], directory: Path, per_node: int, *arguments: int) -> Iterator[Nodes]:
    """The job ``nodes.py`` with so many ranks a host, watched; killed at the end."""
    ranks: list[subprocess.Popen[bytes]] = []
    with cluster(hosts, directory, every_s=0.5) as running:
        try:
            for rank in range(per_node * len(hosts)):
                host = hosts[rank // per_node]
                where = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29700", "GLOO_SOCKET_IFNAME": host.device}
                local = {"LOCAL_RANK": str(rank % per_node), "LOCAL_WORLD_SIZE": str(per_node)}
                who = {"RANK": str(rank), "WORLD_SIZE": str(per_node * len(hosts)), "PER_NODE": str(per_node), **local}
                watched = {"COMMWATCH": "1", "COMMWATCH_DIR": str(directory / host.address), "COMMWATCH_JOB": "nodes"}
                command = [*host.there, *prefork.command(JOBS / "nodes.py", *map(str, arguments))]
                quiet = subprocess.DEVNULL
                env = clean_env(**where, **who, **watched)
                ranks.append(subprocess.Popen(command, env=env, stdout=quiet, stderr=quiet))
            yield Nodes(hosts, running.agents, running.prom, ranks)
        finally:
            stop(ranks)


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """End them at once."""
    for process in processes:
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.wait()


def check_named(running: Nodes, culprit: int) -> None:
    """`diagnose` over both agents and the rules of Prometheus name the late rank, for which the others wait most of the time; no agent names another."""
    (verdict,) = wait_for(running.diagnose, "the verdict")
    assert (verdict["kind"], verdict["cause"], verdict["group"]) == ("straggler", "late", "default_pg")
    assert (verdict["ranks"], len(verdict["waiting"])) == ([culprit], running.ranks - 1)
    # The first seconds, in which connections are made, leave what is compared.
    wait_for(lambda: any(0.7 < each["cost_share"] < 1 for each in running.diagnose()), "most of the time")
    wait_for(lambda: running.shows(f"Late rank: rank {culprit} (nodes)\n"), "the incident from each agent alone")
    named = wait_for(lambda: running.by_rank("straggler"), "the straggler in Prometheus")
    assert list(named) == [culprit]
    wait_for(lambda: 0.7 < running.by_rank("straggler").get(culprit, 0) < 1, "most of the time")
    assert all(each["ranks"] == [culprit] for each in running.verdicts())


@pytest.mark.long
def test_late_rank_on_another_node(hosts: list[Host], tmp_path: Path) -> None:
    """With one rank a node, the late one is named by those who see both nodes, and by no agent alone."""
    with nodes(hosts, tmp_path, 1, 1, 1000) as running:
        running.wait_until_joined()
        check_named(running, 1)


def test_whole_job(hosts: list[Host], tmp_path: Path) -> None:
    """With two ranks a node, too; agents find each other through the job; each one names the late rank, and its sums over all nodes are
    those of Prometheus."""
    culprit = 2
    with nodes(hosts, tmp_path, 2, culprit, 1000) as running:
        running.wait_until_joined()
        check_named(running, culprit)

        def of_job(each: RunningAgent, question: str) -> Any:
            answer = each.get(f"/api/v1/{question}job=nodes&scope=job")
            return answer["data"] if answer["nodes"] == {"answered": 2, "silent": {}} else None

        wait_for(lambda: all(len(of_job(each, "ranks?") or ()) == 4 for each in running.agents), "all ranks")
        wait_for(lambda: all(of_job(each, "verdicts?") for each in running.agents), "the verdict")
        for each in running.agents:
            (verdict,) = wait_for(partial(of_job, each, "verdicts?"), "the verdict")
            assert (verdict["kind"], verdict["ranks"]) == ("straggler", [culprit])
        stop(running.processes)
        names = {"collectives_total": "count", "collective_bytes_total": "bytes", "collective_seconds_total": "seconds"}

        def sums() -> list[dict[tuple[str, str], float]]:
            scraped = {
                name: running.prom.query(f"sum by (rank, op) (commwatch_{name}{{job_id='nodes'}})") for name in names
            }
            return [{(of["rank"], of["op"]): value for of, value in scraped[name]} for name in names]

        def told(each: RunningAgent) -> list[dict[tuple[str, str], float]]:
            rows = wait_for(partial(of_job, each, "summary?by=rank,op&"), "both nodes to answer")["rows"]
            return [{(str(row["by"]["rank"]), row["by"]["op"]): row[key] for row in rows} for key in names.values()]

        # Nothing is recorded any more, so after some scrapes both know the same.
        def agree() -> bool:
            return all(sums() == [pytest.approx(one) for one in told(each)] for each in running.agents)

        wait_for(agree, "Prometheus to agree")


def test_slow_link(hosts: list[Host], tmp_path: Path) -> None:
    """On a slow link all ranks are equally slow: no agent, no combination of agents and no rule names a late rank."""
    for host in hosts:
        host.shape("100mbit")
    with nodes(hosts, tmp_path, 2, NOBODY, 250_000) as running:  # 1 MB: 120 ms and more
        running.wait_until_joined()
        wait_for(lambda: running.prom.value("min(commwatch_periods_total) > 20"), "periods in Prometheus")
        shares = running.by_rank("rate")
        assert len(shares) == running.ranks
        assert min(shares.values()) > 0.8
        assert (running.verdicts(), running.diagnose(), running.by_rank("straggler")) == ([], [], {})


@pytest.mark.long
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("jobs", [SHORT, WHOLE], ids=["short", "whole"])
def test_scenarios(hosts: list[Host], tmp_path: Path, jobs: dict[str, tuple[str, ...]]) -> None:
    """Over two hosts the rules name the stragglers of jobs of the fault matrix within 30 s, and none of an uneven one."""
    chosen = [replace(each, options=(*each.options, *jobs[each.name])) for each in SCENARIOS if each.name in jobs]
    with cluster(hosts, tmp_path) as running, ThreadPoolExecutor(len(chosen)) as pool:
        outcomes = list(pool.map(partial(running.watch, watched_s=WITHIN_S), chosen))
    assert len(outcomes) == len(jobs)
    assert all(outcome.right for outcome in outcomes), "\n".join(line([each]) for each in outcomes)
