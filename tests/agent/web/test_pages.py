"""Pages for people that links of messages lead to, in Chromium over a real agent: of one incident, and the runbook."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from playwright.sync_api import expect

from tests.helpers import PATIENCE_S, SOON_MET, RunningAgent, agent, clean_env, end_rank, wait_for
from tests.live import HandMade
from tests.receivers import Server

if TYPE_CHECKING:
    from tests.browser import Chromium


def incidents(running: RunningAgent, job: str, kind: str) -> list[dict[str, Any]]:
    """The open incidents of a kind of a job."""
    if job not in {each["job_id"] for each in running.get("/api/v1/jobs")}:
        return []
    return [each for each in running.get(f"/api/v1/incidents?job={job}&state=open") if each["kind"] == kind]


def hang(job: HandMade, running: RunningAgent) -> None:
    """Rank 0 waits; the other rank, which the agent has seen alive, dies."""
    job.run(20, time.monotonic_ns() - 15 * 10**9)
    job.read_by(running)
    job.hang(0, age_ms=14_900)
    end_rank(job.writers[1])


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent that knows a job with a hang."""
    directory = tmp_path_factory.mktemp("pages") / "run"
    with agent(directory) as running, HandMade(directory, "stuck & <b>") as job:
        hang(job, running)
        wait_for(lambda: len(running.get("/api/v1/incidents")) == 2, "the loss and the hang")
        yield running


def test_page_of_an_incident(chromium: Chromium, node: RunningAgent) -> None:
    """Each incident of the API has a page, which leads to its cause, to the section of the runbook, and to the live page of its job."""
    every = {each["kind"]: each for each in node.get("/api/v1/incidents")}
    wait_for(lambda: node.get(f"/api/v1/incidents/{every['hang']['id']}")["consequence_of"], "the cause")
    with chromium.visit(f"{node.url}/incidents/{every['hang']['id']}") as visit:
        page = visit.page
        expect(page.get_by_role("heading", level=1)).to_have_text(every["hang"]["title"])
        expect(page.locator("main")).to_contain_text("rank 1 died (no clean end)")
        expect(page.get_by_role("heading", name="Evidence")).to_be_visible()
        for width in (1280, 400):
            visit.resize(width, width == 400)
            visit.assert_readable()
            visit.picture(f"incident-{width}")
        page.get_by_role("link", name="Rank died: rank 1").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Rank died: rank 1")
        expect(page.get_by_role("heading", name="Consequences")).to_be_visible()
        page.get_by_role("link", name="runbook").click()
        expect(page.get_by_role("heading", name="RankLost")).to_be_in_viewport()
        page.go_back()
        page.get_by_role("link", name="live page").click()
        expect(page.locator("#about")).to_contain_text("stuck & <b>, running")


def test_runbook(chromium: Chromium, node: RunningAgent) -> None:
    """A link into the runbook shows its section, which can be read at any width."""
    with chromium.visit(f"{node.url}/runbook#collectivehang") as visit:
        expect(visit.page.get_by_role("heading", name="CollectiveHang")).to_be_in_viewport()
        for width in (1280, 400):
            visit.resize(width, width == 400)
            visit.assert_readable()
            visit.picture(f"runbook-{width}")


@pytest.mark.parametrize("name", ["0123456789abcdef", "no", "%3Cscript%3E", "%00", "%ff", "a" * 5000, "..%2f..%2fetc"])
def test_no_such_incident(chromium: Chromium, node: RunningAgent, name: str) -> None:
    """An unknown incident has a page that people can read, with status 404."""
    with chromium.visit(f"{node.url}/healthz", forgiven="404") as visit:
        answer = visit.page.goto(f"{node.url}/incidents/{name}")
        assert answer
        assert (answer.status, answer.headers["content-type"].split(";")[0]) == (404, "text/html")
        expect(visit.page.get_by_role("heading", name="No such incident")).to_be_visible()
        visit.assert_readable()


def test_links_of_a_message(tmp_path: Path) -> None:
    """Each link of a message from an agent on all addresses has the name of its machine, which the agent answers to, and leads to a page."""
    settings, run = tmp_path / "commwatch.toml", tmp_path / "run"
    with Server() as server:
        hook = f'[[receivers]]\nname = "hook"\nkind = "webhook"\nurl = "{server.url}"\n'
        settings.write_text(f'insecure = true\n[kinds.hang]\nfor = "0s"\n{hook}')
        with agent(run, "--config", str(settings), "--host", "0.0.0.0") as running, HandMade(run, "stuck") as job:
            job.run(20, time.monotonic_ns() - 60 * 10**9)
            job.hang(0, age_ms=55_000)
            end_rank(job.writers[1])
            (asked,) = wait_for(lambda: list(server.asked), "the message")[:1]
            (told,) = asked.json["alerts"]
            texts = told["annotations"]
            urls = [told["generatorURL"], texts["runbook_url"], asked.json["externalURL"]]
            for url in urls:
                parts = urlsplit(url)
                assert parts.hostname == gethostname().lower()
                request = Request(f"{running.url}{parts.path}", headers={"Host": parts.netloc})
                with urlopen(request, timeout=PATIENCE_S) as answer:
                    page = answer.read().decode()
                assert f'id="{parts.fragment}"' in page or not parts.fragment
            assert urls[0].endswith(f"/incidents/{texts['incident']}")


def test_incident_of_another_node(chromium: Chromium, tmp_path: Path) -> None:
    """Each agent has the page of an incident that only the agent of another node knows, with the evidence of all that know it."""
    peers = tmp_path / "peers.json"
    peers.write_text("[]")
    env = clean_env(COMMWATCH_PEERS=str(peers))
    with ExitStack() as stack:
        job = stack.enter_context(HandMade(tmp_path / "node0", "stuck"))
        agents = [stack.enter_context(agent(tmp_path / f"node{n}", env=env, constants=SOON_MET)) for n in range(2)]
        peers.write_text(json.dumps([{"targets": [running.url for running in agents]}]))
        hang(job, agents[0])
        wait_for(lambda: incidents(agents[0], "stuck", "rank_lost"), "the loss")
        (lost,) = incidents(agents[0], "stuck", "rank_lost")
        with chromium.visit(f"{agents[1].url}/healthz", forgiven="404") as visit:

            def known() -> bool:
                visit.page.goto(f"{agents[1].url}/incidents/{lost['id']}")
                return bool(visit.page.get_by_role("heading", level=1).text_content() == lost["title"])

            wait_for(known, "the agents to know each other")
            expect(visit.page.get_by_role("heading", name="Evidence")).to_be_visible()
