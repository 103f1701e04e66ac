"""A job of eight ranks on four hosts, and how its agents are asked."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests import prefork
from tests.e2e.hosts import Host, joined_hosts
from tests.e2e.torchjob import JOBS, kill_ranks
from tests.helpers import PATIENCE_S, SOON_MET, RunningAgent, agent, clean_env, commwatch, wait_for

HOSTS, PER_HOST, CULPRIT = 4, 2, 5
RANKS = HOSTS * PER_HOST
_ALL_NODES = {"answered": HOSTS, "silent": {}}


class Site:
    """The hosts, their agents, and the ranks of the job."""

    def __init__(self, hosts: list[Host], directory: Path, stack: ExitStack) -> None:
        self.hosts, self._directory, self._stack = hosts, directory, stack
        for host in hosts:
            self.directory(host).mkdir(mode=0o700)
        self.agents = [self.start(host) for host in hosts]
        self.ranks = [self._rank(rank) for rank in range(RANKS)]
        stack.callback(self.end)

    def directory(self, host: Host) -> Path:
        """The run directory of a host."""
        return self._directory / host.address

    def start(self, host: Host) -> RunningAgent:
        """Start an agent there, on all of the host's addresses and on the port that it had before."""
        flags = ("--host", "0.0.0.0", "--port", "9477", "--insecure", "--quiet")
        return self._stack.enter_context(
            agent(self.directory(host), *flags, beside=host.process, fetch=host.fetch, constants=SOON_MET)
        )

    def _rank(self, rank: int) -> subprocess.Popen[bytes]:
        host = self.hosts[rank // PER_HOST]
        env = clean_env(
            MASTER_ADDR=self.hosts[0].address, MASTER_PORT="29700", GLOO_SOCKET_IFNAME=host.device,
            RANK=str(rank), WORLD_SIZE=str(RANKS), PER_NODE=str(PER_HOST),
            LOCAL_RANK=str(rank % PER_HOST), LOCAL_WORLD_SIZE=str(PER_HOST),
            COMMWATCH="1", COMMWATCH_DIR=str(self.directory(host)), COMMWATCH_JOB="four",
        )  # fmt: skip
        command = [*host.there, *prefork.command(JOBS / "nodes.py", str(CULPRIT), "1000", "steps")]
        return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def end(self) -> None:
        """End all ranks at once."""
        kill_ranks(map(self.directory, self.hosts), "four")
        for process in self.ranks:
            process.kill()
            process.wait()

    def keep_rings(self, kept: Path) -> Path:
        """Link the rings of all hosts into one run directory, as agents delete the rings of ranks that ended."""
        wait_for(lambda: len(self._files("*.ring")) == RANKS, "the rings")
        (kept / "rings").mkdir(parents=True, mode=0o700)
        for file in (*self._files("*.ring"), *self._files("*.names")):
            os.link(file, kept / "rings" / file.name)
        return kept

    def _files(self, pattern: str) -> list[Path]:
        return [file for host in self.hosts for file in (self.directory(host) / "rings").glob(pattern)]

    def of_job(self, one: RunningAgent, question: str, answered: int = HOSTS) -> Any:
        """What an agent answers for the job on so many nodes."""
        joint = "&" if "?" in question else "?"

        def answer() -> Any:
            found = one.get(f"/api/v1/{question}{joint}job=four&scope=job")
            return found["nodes"]["answered"] == answered and found

        found = wait_for(answer, f"{answered} nodes to answer")
        assert len(found["nodes"]["silent"]) == HOSTS - answered
        return found["data"]


@contextmanager
def site(directory: Path, ahead_s: tuple[int, ...] = ()) -> Iterator[Site]:
    """A running job whose agents know one another from the job itself."""
    with joined_hosts(HOSTS, ahead_s) as hosts, ExitStack() as stack:
        made = Site(hosts, directory, stack)
        for one in made.agents:
            wait_for(lambda: len(made.of_job(one, "ranks")) == RANKS, "all ranks")  # noqa: B023
        yield made


def shown(job: Site, one: RunningAgent, *command: str) -> Any:
    """What a command prints on the host of an agent."""
    beside = job.hosts[job.agents.index(one)].process
    done = commwatch(*command, "--dir", one.directory, beside=beside)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def shown_whole(job: Site, one: RunningAgent, *command: str) -> Any:
    """What a command prints as JSON on the host of an agent once all agents have answered it in time, which a busy machine may prevent."""

    return wait_for(lambda: of_all(shown(job, one, *command, "--json")), f"all nodes to answer {command[0]}")


def of_all(found: Any) -> Any:
    """What was answered if it is about all nodes; ``None`` if an agent did not answer in time."""
    return found if found.get("shown", found)["nodes"] == _ALL_NODES else None


def moment(host: Host, one: RunningAgent) -> Any:
    """What an agent sends to its live page of the job once all nodes have answered it."""
    address = f"{one.url}/api/v1/stream?job=four"
    return wait_for(lambda: of_all(host.call(partial(latest, "moment"), address)), "all nodes in the page")


def latest(topic: str, url: str) -> Any:
    """The first event of a topic that an agent sends to its pages."""
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as stream:
        for line in stream:
            if line == f"event: {topic}\n".encode():
                return json.loads(next(stream).removeprefix(b"data: "))
    return None
