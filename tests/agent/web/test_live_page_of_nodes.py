"""The live page of a job on several nodes, in Chromium: it shows all ranks from any agent, and names the agents that do not answer."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import Route, expect

from tests.helpers import SOON_MET, RunningAgent, agent, clean_env, commwatch, wait_for
from tests.live import HandMade, going_on, hear, number, table

if TYPE_CHECKING:
    from tests.browser import Chromium

NODES = ((0, 1), (2, 3))
#: For an agent that keeps no answers of others for a second, in which a page of a dead node would be loaded again and again.
ASKS_ANEW: dict[str, float | str] = {**SOON_MET, "commwatch_agent.runtime.peers._FRESH_S": 0.05}


@contextmanager
def site(directory: Path, **job: Any) -> Iterator[tuple[list[RunningAgent], list[HandMade]]]:
    """Two agents that know each other, and a job of four ranks on both; its steps end at the same moment everywhere."""
    peers = directory / "peers.json"
    peers.write_text("[]")
    env = clean_env(COMMWATCH_PEERS=str(peers))
    with ExitStack() as stack:
        parts = [
            stack.enter_context(HandMade(directory / f"node{number}", "train", 4, here=here, ago_s=30, **job))
            for number, here in enumerate(NODES)
        ]
        places = [directory / f"node{number}" for number in range(len(NODES))]
        agents = [stack.enter_context(agent(place, env=env, constants=ASKS_ANEW)) for place in places]
        peers.write_text(json.dumps([{"targets": [running.url for running in agents]}]))
        wait_for(lambda: all("answers" in states(running) for running in agents), "the agents to know each other")
        yield agents, parts


def states(running: RunningAgent) -> list[str]:
    """Of an agent's peers."""
    return [peer["state"] for peer in running.get("/api/v1/peers")]


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningAgent]]:
    """The agents of a job whose rank 2 is late; they have read all of it."""
    with site(tmp_path_factory.mktemp("nodes"), late=2) as (agents, parts):
        until_ns = time.monotonic_ns()
        for part in parts:
            part.run(200, until_ns)
        for running, part in zip(agents, parts, strict=True):
            part.read_by(running)
        with going_on(*parts):
            yield agents


def test_straggler_on_another_node(chromium: Chromium, late: list[RunningAgent]) -> None:
    """Each agent's page names the late rank, wherever it is, and has the ranks, shares, operations and advice of the whole job, as ``top`` has."""
    for running in late:
        with chromium.visit(f"{running.url}/?job=train") as visit:
            expect(visit.page.locator("#wrong li.warn")).to_contain_text("Late rank: rank 2")
            expect(visit.page.locator("#about")).to_contain_text("on 2 nodes.")
            expect(visit.page.locator("#ranks tbody tr")).to_have_count(4)
            expect(visit.page.locator("#ranks tbody tr").first).to_contain_text("2running, straggler")
            expect(visit.page.locator("#ranks-here")).to_have_text("4 of 4")
            expect(visit.page.locator("#comm")).to_have_text(re.compile("3[78]%"))
            expect(visit.page.locator("#comm-says")).to_contain_text("rank 2 is the bottleneck, not the network")
            expect(visit.page.locator("#timeline-said")).to_contain_text("of 4 ranks")
            hear(visit, "operations", 1)
            shown = table(visit, "operations")
            told = running.get("/api/v1/summary?job=train&scope=job&since=60s&by=group,op")["data"]["rows"]
            assert [(row["group"], row["op"]) for row in shown] == [(r["by"]["group"], r["by"]["op"]) for r in told]
            for row, one in zip(shown, told, strict=True):
                assert number(row["busbw"]) == pytest.approx(one["busbw"], rel=0.02)
            visit.assert_readable()
            expect(visit.page.locator("#advice")).to_contain_text("rank 2 is late")
            visit.picture("live-nodes")
        shown = json.loads(commwatch("top", "--json", "--dir", running.directory).stdout)["shown"]
        expected = running.get("/api/v1/advice?job=train&scope=job")["data"]
        assert [each["title"] for each in shown["advice"]] == [each["title"] for each in expected]
        assert "rank 2 is late" in expected[0]["title"]


def around(running: RunningAgent) -> str:
    """The range from 60 s before the end of the job's last step to 30 s after it, as the page's address has it."""
    end = int(running.get("/api/v1/steps?job=train&limit=1")[0]["end_at"])
    return f"from={end - 60}&to={end + 30}"


def asks_soon(route: Route) -> None:
    """Answer with a script that asks again after two seconds, not after twenty or more."""
    text = route.fetch().text()
    for before, after in (("const AGAIN_S = 20;", "const AGAIN_S = 2;"), ("const SELDOM = 400;", "const SELDOM = 4;")):
        assert before in text
        text = text.replace(before, after)
    route.fulfill(body=text, content_type="text/javascript")


def test_answer_of_some_nodes(chromium: Chromium, late: list[RunningAgent]) -> None:
    """Where nodes do not answer, the page of a fixed time range names what is missing, and asks again until it has all."""
    of_job = re.compile(r"/api/v1/(past|(steps|summary)\?.*scope=job)")

    def alone(route: Route) -> None:
        """Answer without what the other node has of rank 3."""
        data = route.fetch().json()["data"]
        if "rank=3" in route.request.url:
            data = [] if "/steps" in route.request.url else {**data, "rows": []}
        route.fulfill(json={"nodes": {"answered": 1, "silent": {late[1].url: "TimeoutError"}}, "data": data})

    with chromium.visit(f"{late[0].url}/?job=train") as visit:
        page = visit.page
        page.route("**/static/ask.js", asks_soon)
        page.route(of_job, alone)
        page.goto(f"{late[0].url}/?job=train&{around(late[0])}&open=3")
        for place in ("range", "rank"):
            expect(page.locator(f"#{place}-said")).to_contain_text("Only 1 of 2 nodes answered.")
        expect(page.locator("#operations-said")).to_have_text("Of 1 of 2 nodes: the others did not answer.")
        for table_of in ("steps", "operations"):
            expect(page.locator(f"#rank-{table_of} tbody tr")).to_have_text("not known")
        page.unroute(of_job)
        for place in ("range", "rank", "operations"):
            expect(page.locator(f"#{place}-said")).not_to_contain_text("answer")
        expect(page.locator("#rank-steps tbody tr")).to_have_count(20)
        expect(page.locator("#rank-operations tbody tr")).to_have_count(2)


def test_range_and_rank_of_another_node(chromium: Chromium, late: list[RunningAgent]) -> None:
    """A time range covers the ranks of all nodes; a rank of another node has its steps, and the page says where its GPU and its node are."""
    with chromium.visit(f"{late[0].url}/?job=train&{around(late[0])}&open=3") as visit:
        expect(visit.page.locator("#range-said")).to_contain_text("a point for each 10 s.")
        expect(visit.page.locator("#range-said")).not_to_contain_text("answered")
        expect(visit.page.locator("#timeline-said")).to_contain_text("of 4 ranks")
        expect(visit.page.locator("#shares-said")).to_contain_text(re.compile("communication 3[78]%"))
        expect(visit.page.locator("#rank-steps tbody tr")).to_have_count(20)
        expect(visit.page.locator("#rank-said")).to_contain_text("on the page of that node's agent")
        expect(visit.page.locator("#rank-facts")).not_to_contain_text("CPU")
        late[1].kill()
        expect(visit.page.locator("#about")).to_contain_text("on 1 of 2 nodes.")
        range_said = visit.page.locator("#range-said")

        def is_partial() -> bool:
            visit.page.reload()
            expect(range_said).not_to_contain_text("Loading")
            return "Only 1 of 2 nodes answered." in (range_said.text_content() or "")

        wait_for(is_partial, "the answers from before its end to be too old")
        expect(visit.page.locator("#rank-said")).to_have_text("The agent does not know this rank.")


def test_agent_of_a_node_dies(chromium: Chromium, tmp_path: Path) -> None:
    """A page goes on with the ranks that are left, names the agent that does not answer, and has all again once it does."""
    with site(tmp_path) as (agents, parts):
        for part in parts:
            part.run(50)
        port = agents[1].url.rpartition(":")[2]
        with chromium.visit(f"{agents[0].url}/?job=train") as visit:
            expect(visit.page.locator("#ranks-here")).to_have_text("4 of 4")
            agents[1].kill()
            expect(visit.page.locator("#wrong li.bad").first).to_contain_text(f"No answer from {agents[1].url}")
            expect(visit.page.locator("#ranks-here")).to_have_text("2 of 4")
            expect(visit.page.locator("#about")).to_contain_text("on 1 of 2 nodes.")
            visit.picture("live-node-lost")
            with agent(tmp_path / "node1", "--port", port):
                expect(visit.page.locator("#ranks-here")).to_have_text("4 of 4")
                expect(visit.page.locator("#wrong")).not_to_contain_text("No answer")
