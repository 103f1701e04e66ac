"""The live page in Chromium and the agent it listens to: one that dies and comes back, that refuses, that has several jobs; and its reader."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from playwright.sync_api import expect

from commwatch_agent.web.gate import MOST_STREAMS_OF_ONE
from tests.helpers import RunningAgent, agent, wait_for
from tests.live import PERIOD_MS, HandMade, hear

if TYPE_CHECKING:
    from tests.browser import Chromium

REFUSED = "ERR_CONNECTION_REFUSED|ERR_INCOMPLETE_CHUNKED|ERR_CONNECTION_RESET"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent for the jobs of most tests here."""
    with agent(tmp_path_factory.mktemp("stream") / "run") as running:
        yield running


def test_agent_dies_and_comes_back(chromium: Chromium, tmp_path: Path) -> None:
    """Without an agent the page says at once that its data is old; with the next agent it continues, including the past."""
    directory = tmp_path / "run"
    with ExitStack() as open_until_the_end:
        with agent(directory) as running:
            job = open_until_the_end.enter_context(HandMade(directory, "train", ago_s=300, slots=8192))
            job.run(1500)
            job.read_by(running)
            wait_for(lambda: running.get("/api/v1/steps?job=train&limit=2"), "the steps")
            visit = open_until_the_end.enter_context(chromium.visit(running.url, dark=True, forgiven=REFUSED))
            page, port = visit.page, str(urlsplit(running.url).port)
            expect(page.locator("#comm")).to_have_text("13%")
            since = page.locator("#shares-said").text_content()
            assert since
            assert since.startswith("Since ")
            expect(page.get_by_role("alert")).to_be_hidden()
            # The only other answer that the page waits for is not cut off.
            expect(page.get_by_role("combobox", name="Message size").get_by_role("option")).to_have_count(3)
            running.kill()
        expect(page.get_by_role("alert")).to_contain_text("OLD: no data from the agent since ")
        expect(page.get_by_role("alert")).to_contain_text("The values below are from that time. Trying again.")
        assert page.locator("#job").evaluate("job => getComputedStyle(job).filter") == "grayscale(1)"
        expect(page.locator("#comm")).to_have_text("13%")
        visit.assert_readable()
        visit.picture("live-old-1280")
        with agent(directory, "--port", port) as running:
            expect(page.get_by_role("alert")).to_be_hidden()
            assert page.locator("#job").evaluate("job => getComputedStyle(job).filter") == "none"
            job.run(100)
            expect(page.locator("#pace")).to_contain_text("now at step 1600")
            # As much of the past as there was: the agent has kept it.
            expect(page.locator("#shares-said")).to_contain_text(since.split(". ")[0])
            visit.assert_clean()
            page.goto("about:blank")


def test_job_that_the_agent_reads_later(chromium: Chromium, tmp_path: Path) -> None:
    """A page that was there before the agent had read the job shows the past of the job, too."""
    with agent(tmp_path) as running, chromium.visit(running.url) as visit:
        expect(visit.page.locator("#empty-title")).to_have_text("No job here yet")
        with HandMade(tmp_path, "train", ago_s=300, slots=8192) as job:
            began = time.time() - 1500 * PERIOD_MS / 1e3
            job.run(1500)
            expect(visit.page.locator("#pace")).to_contain_text("now at step 1500")
            slots = {f"Since {datetime.fromtimestamp(at):%H:%M:%S}" for at in (began // 10 * 10, began // 10 * 10 + 10)}
            expect(visit.page.locator("#shares-said")).to_contain_text(re.compile("|".join(slots)))


def test_sizes_of_a_job_that_the_agent_reads_later(chromium: Chromium, node: RunningAgent) -> None:
    """A page that asked for the sizes of a job before the agent had read anything of it asks again once there are operations."""
    with HandMade(node.directory, "later") as job, chromium.visit(f"{node.url}/?job=none") as visit:
        page, sizes = visit.page, "**/api/v1/summary?*by=group%2Cop%2Csize*"
        page.route(sizes, lambda route: route.fulfill(json={"rows": []}), times=1)
        with page.expect_response(sizes):
            page.goto(f"{node.url}/?job=later", wait_until="domcontentloaded")
        expect(page.locator("#filter-size option")).to_have_text(["all"])
        job.run(20)
        expect(page.locator("#filter-size option")).to_have_text(["all", "≤ 4 MiB", "≤ 8 MiB"])


#: What Tab reaches until the timeline.
TABS = [
    "Skip to the measurements", "jobs", "pause", "keys", "Runbook", "API", "Metrics", "evidence", "Live", "30 s", "5 min", "30 min", "All",
    "from", "to", "filter-rank", "filter-group", "filter-op", "filter-size", "timeline",
]  # fmt: skip


def test_pause(chromium: Chromium, node: RunningAgent) -> None:
    """A key pauses the page, which shows that; afterwards it continues with the present of the job."""
    with HandMade(node.directory, "pause") as job, chromium.visit(f"{node.url}/?job=pause", width=400) as visit:
        job.run(50)
        page = visit.page
        expect(page.locator("#pace")).to_contain_text("now at step 50")
        expect(page.locator("#timeline-said")).to_contain_text("The latest")
        expect(page.locator("#filter-size option")).to_have_text(["all", "≤ 4 MiB", "≤ 8 MiB"])
        button = page.get_by_role("button", name="Pause")
        button.focus()
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Tab")
        expect(button).to_be_focused()
        assert button.evaluate("button => getComputedStyle(button).outlineStyle") == "solid"
        page.keyboard.press("Enter")
        expect(button).to_have_attribute("aria-pressed", "true")
        expect(page.get_by_role("alert")).to_contain_text("Paused at ")
        before = page.locator("main").inner_text()
        job.run(50)
        job.read_by(node)
        hear(visit, "moment")
        hear(visit, "timeline", 1)
        assert page.locator("main").inner_text() == before
        visit.assert_readable()
        visit.picture("live-paused-400")
        page.keyboard.press("Space")
        expect(button).to_have_attribute("aria-pressed", "false")
        expect(page.get_by_role("alert")).to_be_hidden()
        expect(page.locator("#pace")).to_contain_text("now at step 100")


def test_two_jobs(chromium: Chromium, tmp_path: Path) -> None:
    """The latest job is followed when it begins; another can be chosen, and the latest again; an unknown name is reported."""
    with agent(tmp_path / "run") as running, HandMade(running.directory, "old job", late=1, ago_s=50) as old:
        old.run(10)
        old.read_by(running)
        with chromium.visit(running.url) as visit:
            page, choice = visit.page, visit.page.get_by_label("Job")
            expect(page.locator("#about")).to_contain_text("old job, running")
            expect(choice).to_be_hidden()
            with HandMade(running.directory, "new job", 3, ago_s=10) as new:
                new.run(20)
                expect(page.locator("#about")).to_contain_text("new job, running")
                expect(page.locator("#ranks tbody tr")).to_have_count(3)
                expect(choice).to_have_value("")
                choice.select_option(label="old job")
                page.wait_for_url("**/?job=old%20job")
                expect(page.locator("#about")).to_contain_text("old job, running")
                expect(choice).to_have_value("old job")
                choice.select_option(label="the latest")
                page.wait_for_url(lambda url: "old" not in url)
                expect(page.locator("#about")).to_contain_text("new job, running")
                new.end()
            expect(page.locator("#about")).to_contain_text("old job, running")  # the latest that runs
        with chromium.visit(f"{running.url}/?job=nosuch%26", width=400) as visit:
            expect(visit.page.get_by_role("heading", name="No job nosuch& here")).to_be_visible()
            expect(visit.page.get_by_label("Job")).to_have_value("nosuch&")
            visit.assert_readable()
            visit.picture("live-unknown-400")
            visit.page.get_by_role("link", name="The latest job").click()
            expect(visit.page.locator("#about")).to_contain_text("old job, running")


def test_refused(chromium: Chromium, tmp_path: Path) -> None:
    """If too many are watching already, the page shows the agent's message, and is served as soon as one has gone."""
    with agent(tmp_path / "run") as running, HandMade(running.directory) as job, ExitStack() as watching:
        job.run(20)
        where = urlsplit(running.url)
        others = []
        for _ in range(MOST_STREAMS_OF_ONE):
            other = watching.enter_context(socket.create_connection((where.hostname, where.port), 30))
            other.sendall(b"GET /api/v1/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert b" 200 " in other.recv(64)
            others.append(other)
        with chromium.visit(running.url, forgiven="429") as visit:
            expect(visit.page.get_by_role("alert")).to_contain_text(
                f"The agent's answer: {MOST_STREAMS_OF_ONE} streams of this client (user {os.getuid()}) are open"
            )
            visit.assert_readable()
            visit.picture("live-refused-1280")
            others[0].close()
            expect(visit.page.locator("#about")).to_contain_text("train, running")
            expect(visit.page.get_by_role("alert")).to_be_hidden()


def test_focus_and_selection_stay(chromium: Chromium, node: RunningAgent) -> None:
    """Through updates each second the reader keeps the focus, what is selected, and what is open; Tab leads through all in order."""
    with HandMade(node.directory, "read", 3, late=1, ago_s=30) as job:
        job.run(200)
        job.read_by(node)
        wait_for(lambda: node.get("/api/v1/advice?job=read"), "the advice")
        with chromium.visit(f"{node.url}/?job=read") as visit:
            page = visit.page
            advice = page.locator("#advice summary").first
            expect(advice).to_contain_text("would save")
            expect(page.locator("#operations tbody tr")).to_have_count(2)
            advice.press("Enter")
            expect(page.locator("#advice details p").first).to_be_visible()
            page.locator("#ranks tbody td").first.evaluate("cell => getSelection().selectAllChildren(cell)")
            selected = page.evaluate("String(getSelection())")
            assert selected.startswith("running")
            job.run(10)
            expect(page.locator("#pace")).to_contain_text("now at step 210")
            hear(visit, "operations", 1)
            assert page.evaluate("String(getSelection())") == selected
            expect(advice).to_be_focused()
            expect(page.locator("#advice details p").first).to_be_visible()
            page.evaluate("document.activeElement.blur(), getSelection().removeAllRanges()")
            page.goto(f"{node.url}/?job=read")
            expect(page.locator("#advice summary").first).to_be_visible()
            expect(page.get_by_label("Job")).to_be_visible()
            order: list[str] = []
            while "timeline" not in order and len(order) < len(TABS):
                page.keyboard.press("Tab")
                at = page.evaluate("(e => e.id || e.textContent.trim())(document.activeElement)")
                order += [at] if order[-1:] != [at] else []  # a field of a time has several places
            assert order == TABS
            focused = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert focused in {"solid", "auto"}
            assert page.locator("#comm-meter span").evaluate("bar => getComputedStyle(bar).transitionDuration") == "0s"
            page.emulate_media(reduced_motion="no-preference")
            assert (
                page.locator("#comm-meter span").evaluate("bar => getComputedStyle(bar).transitionDuration") == "0.4s"
            )


def test_nothing_else_runs(chromium: Chromium, node: RunningAgent) -> None:
    """The page's policy allows only its own files: no inline script, no inline style, no other host."""
    with urlopen(node.url + "/", timeout=30) as answer:
        policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    with chromium.visit(node.url, forgiven="Content Security Policy") as visit:
        visit.page.evaluate(
            """() => {
              const script = document.createElement("script");
              script.textContent = "window.ran = true";
              document.body.append(script);
              document.body.insertAdjacentHTML("beforeend", "<img src=/static/icon.svg alt=x onload='window.ran = true'>");
            }"""
        )
        visit.page.evaluate("document.body.lastElementChild.decode()")
        assert visit.page.evaluate("window.ran") is None
        assert visit.page.evaluate("fetch('http://192.0.2.1/').then(() => 'went out', () => 'stayed')") == "stayed"
    assert len([error for error in visit.errors if "Content Security Policy" in error]) >= 3
