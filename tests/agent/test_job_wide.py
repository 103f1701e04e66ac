"""Answers about a job on several nodes: each agent returns what one agent over all rings returns, and lists the silent agents."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.agent.cli.test_fan_out import hanging, strange, trickling
from tests.agent.web.routes.test_jobs import BASE, one_rank, populate, rings_of
from tests.helpers import ANY_CLOCK, SOON_MET, RunningAgent, agent, clean_env, commwatch, end_rank, free_port, wait_for

#: Which ranks of the job each node has.
NODES = ((0, 1), (2,), (3,))
#: Which node answers: any of them gives the same.
ANY_NODE = pytest.mark.parametrize(
    "number", [pytest.param(0, marks=pytest.mark.long), 1, pytest.param(2, marks=pytest.mark.long)]
)
RECORDS = 40
#: The operation in flight of `populate` is as old as a machine can be when its tests begin, and overdue for these agents.
OVERDUE: dict[str, float | str] = {**ANY_CLOCK, "commwatch_agent.analysis.waits.patience.WORKING_S": 90.0}
JOB = "job=train&scope=job"
#: The key of a row, and what is defined only where all ranks of a group are on one node.
NOT_COMPARED = ("by", "wait_s", "efficiency", "reference")


class Site:
    """Agents that are each other's peers, and one that has all rings."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.peers = directory / "peers.json"
        self.peers.write_text("[]")
        whole = rings_of(directory / "whole")
        self.writers = populate(whole)
        nodes = [rings_of(directory / f"node{number}") for number in range(len(NODES))]
        self.writers += [one_rank(node, rank) for node, ranks in zip(nodes, NODES, strict=True) for rank in ranks]
        self.whole = stack.enter_context(agent(whole.parent, constants=OVERDUE))
        env = clean_env(COMMWATCH_PEERS=str(self.peers))
        self.nodes = [stack.enter_context(agent(node.parent, env=env, constants=SOON_MET | OVERDUE)) for node in nodes]
        wait_for(lambda: records(self.whole) == sum(map(records, self.nodes)) == RECORDS, "the records")

    def meet(self, *more: str) -> None:
        """Make every agent know every agent, and the addresses ``more``, and wait until the first one has tried them."""
        urls = [*(node.url for node in self.nodes), *more]
        self.peers.write_text(json.dumps([{"targets": urls}]))
        wait_for(lambda: states(self.nodes[0]).keys() == set(urls), "the peers")
        wait_for(
            lambda: all(peer["reason"] != "not asked yet" for peer in states(self.nodes[0]).values()),
            "them to be tried",
        )


def records(running: RunningAgent) -> int:
    """How many records of the job an agent has read."""
    return sum(rank["records"] for rank in running.get("/api/v1/ranks") if rank["job_id"] == "train")


def states(running: RunningAgent) -> dict[str, dict[str, Any]]:
    """An agent's peers by URL."""
    return {peer["url"]: peer for peer in running.get("/api/v1/peers")}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """All agents know one another."""
    with ExitStack() as stack:
        made = Site(tmp_path_factory.mktemp("site"), stack)
        made.meet()
        yield made
    for writer in made.writers:
        end_rank(writer)


def of_all(running: RunningAgent, path: str) -> Any:
    """An answer for the whole job that all nodes have given; on a busy machine one may take too long."""
    full = {"answered": len(NODES), "silent": {}}
    return wait_for(
        lambda: (answer := running.get(f"/api/v1/{path}"))["nodes"] == full and answer, "all nodes to answer"
    )


def whole(running: RunningAgent, path: str) -> Any:
    """The data of such an answer."""
    return of_all(running, path)["data"]


def command_of_all(*arguments: str | Path, out: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command for the whole job, on a wide terminal, until no node took too long; ``out``: the file that it writes, if any."""

    def done() -> subprocess.CompletedProcess[str] | None:
        ended = commwatch(*arguments, env=clean_env(COLUMNS="250"))
        said = ended.stdout + ended.stderr + (out.read_text() if out else "")
        return None if re.search("no answer within|timed out", said) else ended

    found: subprocess.CompletedProcess[str] = wait_for(done, "all nodes to answer")
    return found


def test_own_address(site: Site) -> None:
    """An agent recognises its own address among its peers, so that its ranks count once."""
    found = states(site.nodes[0])
    assert [found[node.url]["state"] for node in site.nodes] == ["this agent", "answers", "answers"]
    assert len({peer["host"] for peer in found.values()}) == 1


@pytest.mark.parametrize("by", ["group,op", "rank", "op,size", "group_id,rank", "job_id"])
def test_summary(site: Site, by: str) -> None:
    """Counts, bytes, times, percentiles and bandwidths are those of one agent over all rings, from whichever agent."""
    expected = site.whole.get(f"/api/v1/summary?job=train&by={by}")
    assert expected["rows"]
    for node in site.nodes:
        found = whole(node, f"summary?{JOB}&by={by}")
        assert (found["since"], found["until"], found["by"]) == (expected["since"], expected["until"], expected["by"])
        assert len(found["rows"]) == len(expected["rows"])
        by_key = {json.dumps(row["by"], sort_keys=True): row for row in found["rows"]}
        for row in expected["rows"]:
            mine = by_key[json.dumps(row["by"], sort_keys=True)]
            assert {name: mine[name] for name in mine if name not in NOT_COMPARED} == pytest.approx(
                {name: row[name] for name in row if name not in NOT_COMPARED}
            )


def test_filters(site: Site) -> None:
    """A filter leaves the same rows, and a window the same time, as in one agent."""
    for query in ("op=all_gather&by=rank", "rank=3&by=op", "since=1h&by=op", "until=2001-01-01T00:00:00Z&by=op"):
        found, expected = (
            whole(site.nodes[1], f"summary?{JOB}&{query}"),
            site.whole.get(f"/api/v1/summary?job=train&{query}"),
        )
        assert [(row["by"], row["count"], row["bytes"]) for row in found["rows"]] == [
            (row["by"], row["count"], row["bytes"]) for row in expected["rows"]
        ]


def test_ranks_groups_steps(site: Site) -> None:
    """Ranks, groups and steps are those of all nodes, each once, in the usual order."""
    for node in site.nodes:
        ranks, expected = whole(node, f"ranks?{JOB}"), site.whole.get("/api/v1/ranks?job=train")
        assert [(rank["rank"], rank["records"]) for rank in ranks] == [
            (rank["rank"], rank["records"]) for rank in expected
        ]
        assert [op["seq"] for op in ranks[3]["in_flight"]] == [8]
        groups, expected = whole(node, f"groups?{JOB}"), site.whole.get("/api/v1/groups?job=train")
        assert {group["group_id"]: group["ranks"] for group in groups} == {
            group["group_id"]: group["ranks"] for group in expected
        }
        steps, expected = whole(node, f"steps?{JOB}"), site.whole.get("/api/v1/steps?job=train")
        assert sorted(steps, key=str) == sorted(expected, key=str)
        assert len(whole(node, f"steps?{JOB}&limit=3")) == 3


def test_past(site: Site) -> None:
    """Shares and bandwidths of a time range are those of one agent over all rings, from whichever agent."""
    window = f"job=train&since={BASE}&until={BASE + 3000}"
    expected = site.whole.get(f"/api/v1/past?{window}")["data"]
    assert expected["slots"]
    for node in site.nodes:
        found = whole(node, f"past?{window}")
        assert [(slot["at"], slot["comm"], slot["exposed"], slot["busbw"]) for slot in found["slots"]] == [
            (slot["at"], *(pytest.approx(slot[name]) for name in ("comm", "exposed", "busbw")))
            for slot in expected["slots"]
        ]


def test_jobs(site: Site) -> None:
    """A job of several nodes is one job, with the ranks and records of all."""
    for node in site.nodes:
        found = {job["job_id"]: job for job in whole(node, "jobs?scope=job")}
        expected = {job["job_id"]: job for job in site.whole.get("/api/v1/jobs")}
        assert found.keys() <= expected.keys()
        names = ("state", "world_size", "ranks", "restarts", "started_at", "records", "lost", "failed", "exit_code")
        for name in found:
            assert {key: found[name][key] for key in names} == {key: expected[name][key] for key in names}


def test_all_ask_one_another(site: Site) -> None:
    """Agents that ask one another at the same time all get the answers of all, so none waits for one that waits for it."""
    paths = [(node, f"summary?{JOB}&since={number + 1}000d&by=rank") for number in range(4) for node in site.nodes]
    with ThreadPoolExecutor(len(paths)) as pool:
        answers = list(pool.map(lambda at: whole(*at), paths))
    assert {len(answer["rows"]) for answer in answers} == {4}


def test_job_that_is_elsewhere(site: Site) -> None:
    """Without the name of a job, and for a job that the node does not have, the error names the remedy."""
    for path, status, detail in (
        ("ranks?scope=job", 400, "name the job, as job=NAME"),
        ("summary?scope=job", 400, "name the job"),
        ("ranks?scope=job&job=none", 404, "no job 'none'"),
        ("ranks?scope=site&job=train", 422, "scope"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            site.nodes[0].get(f"/api/v1/{path}")
        with refused.value as error:
            assert (error.code, detail in json.load(error)["detail"]) == (status, True)


def test_pipelines_and_alerts(site: Site) -> None:
    """A pipeline has the stages of all nodes; alerts are those of all agents."""
    expected = site.whole.get("/api/v1/pipelines?job=train")
    assert expected
    assert whole(site.nodes[0], f"pipelines?{JOB}") == expected
    assert set(whole(site.nodes[0], "alerts?scope=job")) == {"active", "past"}


def test_efficiency(site: Site) -> None:
    """The operations of the job's groups are compared with the curve of all ranks."""
    found = whole(site.nodes[0], f"efficiency?{JOB}")
    expected = site.whole.get("/api/v1/efficiency?job=train")
    assert set(found) == set(expected) == {"operations", "fits"}


def test_verdict_over_nodes(site: Site) -> None:
    """An operation of a group on several nodes hangs: the missing ranks are named from the ranks of all nodes, as by one agent."""
    verdicts = wait_for(lambda: site.whole.get("/api/v1/verdicts?job=train"), "a verdict")
    expected = [(v["kind"], v["ranks"], v["waiting"]) for v in verdicts]
    for node in site.nodes:
        # One of them asks the others every other second.
        wait_for(
            lambda: [(v["kind"], v["ranks"], v["waiting"]) for v in whole(node, f"verdicts?{JOB}")] == expected,  # noqa: B023
            "the same verdict",
        )


@ANY_NODE
def test_commands(site: Site, number: int) -> None:
    """``commwatch top`` and ``commwatch diagnose`` show the whole job by default, from any node."""
    wait_for(lambda: site.whole.get("/api/v1/verdicts?job=train"), "the ranks to be silent for long enough")
    where = ("--dir", site.nodes[number].directory)
    of_train = ("--job", "train", *where)
    shown = json.loads(command_of_all("top", "--json", *of_train).stdout)["shown"]
    assert [rank["rank"] for rank in shown["ranks"]] == [0, 1, 2, 3]
    assert shown["nodes"] == {"answered": len(NODES), "silent": {}}
    frame = command_of_all("top", "--once", *of_train).stdout
    assert "train, running, 4 of 4 ranks, 3 nodes" in frame
    done = command_of_all("diagnose", "--json", *where)
    assert done.returncode == 1
    found, expected = (json.loads(text.stdout) for text in (done, commwatch("diagnose", "--json", site.whole.url)))
    assert [v["ranks"] for v in found["verdicts"]] == [v["ranks"] for v in expected["verdicts"]]
    assert found["silent"] == {}


def test_silent_agents(tmp_path: Path) -> None:
    """Agents that refuse, hang, trickle, answer nonsense or are killed are listed with their reason; all others count, in time."""
    with ExitStack() as stack:
        site = Site(tmp_path, stack)
        dead = f"http://127.0.0.1:{free_port()}"
        mute, slow = stack.enter_context(strange(hanging)), stack.enter_context(strange(trickling))
        site.meet(dead, mute, slow)
        answer = site.nodes[0].get(f"/api/v1/ranks?{JOB}")
        assert [rank["rank"] for rank in answer["data"]] == [0, 1, 2, 3]
        assert answer["nodes"]["answered"] == 3
        assert answer["nodes"]["silent"].keys() == {dead, mute, slow}
        assert "refused" in answer["nodes"]["silent"][dead]
        checks = commwatch("doctor", "--json", "--dir", str(site.nodes[0].directory)).stdout
        said = [check["says"] for check in json.loads(checks) if check["what"] == "peers"]
        assert said[0] == "2 of 5 agents of other nodes answer"
        assert {text.partition(": ")[0] for text in said[1:]} == {dead, mute, slow}
        site.nodes[2].kill()
        answer = wait_for(
            lambda: (found := site.nodes[0].get(f"/api/v1/ranks?{JOB}"))["nodes"]["answered"] == 2 and found, "its end"
        )
        assert [rank["rank"] for rank in answer["data"]] == [0, 1, 2]
        assert site.nodes[2].url in answer["nodes"]["silent"]
        site.nodes[1].process.send_signal(signal.SIGSTOP)
        try:
            answer = site.nodes[0].get(f"/api/v1/summary?{JOB}&by=rank")
            assert [row["by"]["rank"] for row in answer["data"]["rows"]] == [0, 1]
            assert answer["nodes"]["silent"][site.nodes[1].url] in ("no answer within 2 s", "timed out")
        finally:
            site.nodes[1].process.send_signal(signal.SIGCONT)
        wait_for(lambda: states(site.nodes[0])[site.nodes[1].url]["state"] == "answers", "it to answer again")
        for writer in site.writers:
            end_rank(writer)


def test_wrong_token(tmp_path: Path) -> None:
    """An agent that requires another token is silent, with the remedy; with the right one it answers."""
    site_token, other = tmp_path / "site", tmp_path / "other"
    for file in (site_token, other):
        file.write_text(f"{file.name}-token-of-many-characters")
        file.chmod(0o600)
    closed, peers = tmp_path / "closed", tmp_path / "peers.json"
    rings_of(closed)
    rings_of(tmp_path / "asking")
    peers.write_text("[]")
    with agent(closed, "--require-token", "--token-file", str(site_token)) as first:
        peers.write_text(json.dumps([{"targets": [first.url]}]))
        for file, state, reason in ((other, "silent", "token"), (site_token, "answers", "")):
            with agent(
                tmp_path / "asking", "--token-file", str(file), env=clean_env(COMMWATCH_PEERS=str(peers))
            ) as second:
                wait_for(
                    lambda: states(second).get(first.url, {}).get("reason", "not asked yet") != "not asked yet", "it"
                )
                found = states(second)[first.url]
                assert found["state"] == state
                assert reason in found["reason"]


def test_wrong_settings() -> None:
    """An address that no agent can have, and a list that is none, are refused with the name of the setting."""
    done = commwatch("config", "check", env=clean_env(COMMWATCH_PEERS="ftp://node1"))
    assert done.returncode == 2
    assert "COMMWATCH_PEERS: entry 1: ftp://node1: not an agent's address" in done.stderr
    shown = commwatch("config", "show", env=clean_env(COMMWATCH_PEERS="node1, dns+agents:9477")).stdout
    assert "node1, dns+agents:9477" in shown
