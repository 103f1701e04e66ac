"""The fault matrix over two hosts: whom the agents name, and the rules of a Prometheus that scrapes both (``make faults-nodes``).

Arguments and ``AT_ONCE``: as of ``run``.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tests.alerts.promtool import exported
from tests.e2e.hosts import Host, joined_hosts
from tests.faults.judging import Outcome, Poll, judge
from tests.faults.run import Place, began_at, job, run
from tests.faults.scenarios import HEALTHY, SLOW_LINKS, STRAGGLERS, Scenario
from tests.helpers import RunningAgent, agent
from tests.prometheus import Prometheus, prometheus

#: Seconds between scrapes and between looks; how soon a straggler must be named, and how long a job is watched from the fault on.
EVERY_S, WITHIN_S, WATCHED_S = 5, 30.0, 60.0
#: Of the agents.
PORT = 9477
STRAGGLER = "job_rank:commwatch_period_comm_share:straggler"


class Cluster(NamedTuple):
    """Two hosts with an agent each, and a Prometheus that scrapes both."""

    hosts: list[Host]
    directory: Path
    agents: list[RunningAgent]
    prom: Prometheus

    def place(self, rank: int, size: int) -> Place:
        """The first half of the ranks is on the first host."""
        host = self.hosts[2 * rank // size]
        return Place(self.directory / host.address, host.there, host.device)

    @contextmanager
    def link_of(self, rate: str) -> Iterator[None]:
        """Both hosts send at this rate; empty: as fast as they can."""
        held = self.hosts if rate else []
        for host in held:
            host.shape(rate)
        try:
            yield
        finally:
            for host in held:
                host.free()

    def watch(self, scenario: Scenario, watched_s: float = WATCHED_S) -> Outcome:
        """Run a scenario and query its stragglers from Prometheus, from the fault on; at the end, the incidents of the agents, too."""
        name = scenario.name.replace(" ", "-")
        places = [self.place(rank, scenario.size) for rank in range(scenario.size)]
        with self.link_of(scenario.link), job(scenario, places, name) as told:
            began, polls = began_at(told), list[Poll]()
            while time.time() < began + watched_s:
                found = self.prom.query(f'{STRAGGLER}{{job_id="{name}"}}')
                polls.append(
                    (time.time() - began, [("straggler", "late", (int(labels["rank"]),)) for labels, _ in found])
                )
                time.sleep(1)
            seen = self.prom.query(f'commwatch_periods_total{{job_id="{name}"}} > 0')
            late = self.late(name)
        judged = judge(scenario, polls)
        # A job of which nothing was recorded has no straggler either.
        silent = [] if len(seen) == scenario.size else [f"Prometheus has periods of {len(seen)} ranks"]
        expected = scenario.named if scenario.kinds else frozenset()
        named = [] if late == expected else [f"the agents name {sorted(late)}"]
        return judged._replace(wrong=(*judged.wrong, *silent, *named))

    def late(self, name: str) -> frozenset[int]:
        """The ranks that the agents of a job have named as late."""
        found = self.agents[0].get(f"/api/v1/incidents?job={name}&scope=job&state=open&state=ended")["data"]
        return frozenset(rank for each in found if each["kind"] == "straggler" for rank in each["ranks"])


@contextmanager
def cluster(hosts: list[Host], directory: Path, every_s: float = EVERY_S) -> Iterator[Cluster]:
    """Agents, and a Prometheus on the first host that scrapes them each ``every_s`` seconds."""
    with ExitStack() as stack:
        agents = []
        for host in hosts:
            (directory / host.address).mkdir(mode=0o700)
            config = directory / f"{host.address}.toml"
            config.write_text(f"peers = {[f'{other.address}:{PORT}' for other in hosts if other is not host]}\n")
            # A job that meets by a file does not show agents the addresses of its nodes.
            reached = ("--host", host.address, "--port", str(PORT), "--insecure")
            flags = (directory / host.address, *reached, "--config", str(config), "--quiet")
            agents.append(stack.enter_context(agent(*flags, beside=host.process, fetch=host.fetch)))
        urls, first = [each.url for each in agents], hosts[0]
        scraping = prometheus(
            directory, urls, (exported(directory),), there=first.there, fetch=first.fetch, every_s=every_s
        )
        yield Cluster(hosts, directory, agents, stack.enter_context(scraping))


if __name__ == "__main__":
    with joined_hosts(2) as made, tempfile.TemporaryDirectory() as folder, cluster(made, Path(folder)) as running:
        # The means of the rules are too long for a fault that ends.
        chosen = [*(each for each in STRAGGLERS if each.lasts_s is None), *HEALTHY, *SLOW_LINKS]
        run([replace(each, within_s=WITHIN_S) for each in chosen], running.watch, "nodes")
