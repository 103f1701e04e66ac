"""The live page in Chromium of jobs that the agent has in its history alone."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from commwatch_agent.history.history import History
from tests.helpers import RunningAgent, agent, end_rank, wait_for
from tests.live import HandMade

if TYPE_CHECKING:
    from tests.browser import Chromium

ODD = "first & <i>"


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent whose predecessor has seen two jobs: one that ended well, and later one in which a rank died and the other hung."""
    directory = tmp_path_factory.mktemp("past") / "run"
    with agent(directory) as running:
        with HandMade(directory, ODD, ago_s=60) as job:
            job.run(20)
            job.read_by(running)
            job.end()
        with HandMade(directory, "later", ago_s=20) as job:
            job.run(20, time.monotonic_ns() - 15 * 10**9)
            job.read_by(running)
            job.hang(0, age_ms=14_900)
            end_rank(job.writers[1])
            wait_for(lambda: len(running.get("/api/v1/incidents?job=later&state=open")) == 2, "the loss and the hang")
        wait_for(lambda: {job["state"] for job in running.get("/api/v1/jobs")} == {"ended"}, "the ends")
        wait_for(lambda: not running.get("/api/v1/incidents?job=later&state=open"), "the end of the incidents")
        wait_for(lambda: not [*(directory / "rings").iterdir()], "the history alone")
    with agent(directory) as running:
        yield running


def test_job_in_the_history(chromium: Chromium, again: RunningAgent) -> None:
    """The page of a job that only the history has shows when and how it ended, what happened, and the report; the list of jobs leads to the others."""
    with chromium.visit(f"{again.url}/?job=later") as visit:
        page = visit.page
        expect(page.locator("#about")).to_have_text(
            re.compile(r"^later, failed \(.*\), from 20.* to 20.*, 2 of 2 ranks here\.$")
        )
        items = page.locator("#happened li")
        expect(items).to_have_count(2)
        expect(items.first).to_contain_text("Rank died: rank 1")
        expect(items.last).to_contain_text("Hang: rank 1")
        expect(items.last).to_have_attribute("data-depth", "1")
        for hidden in ("#empty", "#present", "#wrong-section"):
            expect(page.locator(hidden)).to_be_hidden()
        expect(page).to_have_title("later · commwatch")
        for width in (1280, 400):
            visit.resize(width, width == 400)
            visit.assert_readable()
            visit.picture(f"live-past-{width}")
        choice = page.get_by_label("Job")
        expect(choice).to_have_value("later")
        expect(choice.get_by_role("option")).to_have_text(["the latest", "later (failed)", f"{ODD} (ended)"])
        choice.select_option(value=ODD)
        expect(page.locator("#about")).to_contain_text(f"{ODD}, ended, from 20")
        expect(page.locator("#happened-section")).to_contain_text("Nothing was found.")
        with page.expect_download() as download:
            page.get_by_role("link", name="The report").click()
        assert "first &amp; &lt;i&gt;" in Path(download.value.path()).read_text()


def test_latest_of_the_history_until_one_runs(chromium: Chromium, again: RunningAgent) -> None:
    """Without a job in memory the page shows the latest of the history, until one runs; a name that was never there is not known."""
    with chromium.visit(again.url) as visit:
        page = visit.page
        expect(page.locator("#about")).to_contain_text("later, failed")
        with HandMade(again.directory, "next", ago_s=10) as job:
            job.run(20)
            expect(page.locator("#about")).to_contain_text("next, running")
            expect(page.locator("#present")).to_be_visible()
            expect(page.locator("#past")).to_be_hidden()
            expect(page.locator("#happened-section")).to_be_hidden()
            expect(page.locator("#wrong")).to_have_text("Nothing found.")
            job.end()
        page.goto(f"{again.url}/?job=never")
        expect(page.get_by_role("heading", name="No job never here")).to_be_visible()
        expect(page.locator("#job")).to_be_hidden()


def test_job_whose_agent_was_killed(chromium: Chromium, tmp_path: Path) -> None:
    """What was wrong with a job when its agent was killed is what happened, once the next agent finds that the job has ended."""
    with ExitStack() as until_the_end:
        job = until_the_end.enter_context(HandMade(tmp_path, "stuck", ago_s=30))
        with agent(tmp_path) as running:
            job.run(20, time.monotonic_ns() - 15 * 10**9)
            job.read_by(running)
            job.hang(0, age_ms=14_900)
            wait_for(lambda: running.get("/api/v1/incidents?job=stuck&state=open"), "the hang")
            wait_for(lambda: _stored(running), "it in the history")
            running.kill()
        until_the_end.close()
        with agent(tmp_path) as running, chromium.visit(f"{running.url}/?job=stuck") as visit:
            expect(visit.page.locator("#about")).to_contain_text("stuck, ended")
            expect(visit.page.locator("#happened li").first).to_contain_text(", until the job ended")
            expect(visit.page.locator("#wrong-section")).to_be_hidden()


def _stored(running: RunningAgent) -> bool:
    (file,) = running.directory.glob("history-*.sqlite")
    with History(file) as history:
        return bool(history.incidents())
