"""Who concludes for all nodes of a job, and what is known of those that do not answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from socket import gethostname

import pytest

from commwatch_agent.incidents.evidence import KnownJob
from commwatch_agent.job.merging import Heard
from commwatch_agent.questions.incidents import Parts, conditions
from commwatch_agent.runtime.peers import MOST_AGENTS, Peers
from tests.agent.incidents.test_job_rules import HANG, NOW
from tests.agent.runtime.test_peers import settings
from tests.helpers import Watch, write_ring


@pytest.mark.parametrize("silent", [{}, {"http://b:9477": "refused", "http://c:9477": "timed out"}])
def test_agents_that_do_not_answer(tmp_path: Path, silent: dict[str, str]) -> None:
    """What is concluded without some agents has them in its evidence, each with the reason."""
    watch = Watch(tmp_path)
    writer = write_ring(watch.rings, [], world_size=4)
    watch.tick(1)
    found = conditions(
        watch.agent,
        "job",
        own=Parts(1, [], reported=[replace(HANG, job_id="job", source="ras")]),
        heard=Heard({}, silent),
        known=KnownJob("key", 4, ended=False),
        now=NOW,
    )
    writer.release()
    (one,) = [each for each in found.conditions if each.kind == "hang"]
    missing = [item.text for item in one.evidence if item.source == "peers"]
    assert missing == (
        ["agents that do not answer: http://b:9477: refused; http://c:9477: timed out"] if silent else []
    )


@pytest.mark.parametrize(
    ("hosts", "leads"),
    [
        ([], True),
        (["zzz"], True),
        (["!", "zzz"], False),
        ([f"!{number}" for number in range(MOST_AGENTS)], False),
        ([f"!{number}" for number in range(MOST_AGENTS + 1)], True),
    ],
    ids=["alone", "first", "not the first", "as many as it may be", "one more"],
)
def test_who_concludes(tmp_path: Path, hosts: list[str], leads: bool) -> None:
    """The first agent by host name concludes for a run; of more than 128, each concludes for itself, and Prometheus for all."""
    assert all((host < gethostname()) == host.startswith("!") for host in hosts)
    peers = Peers(settings(tmp_path), "own")
    peers._runs = {host: {"run": "train", "other": "train#2"} for host in hosts}
    peers._whose = {host: (host, host) for host in hosts}
    assert peers.leads("run") == leads
    assert peers.leads("a run that no other agent has")
