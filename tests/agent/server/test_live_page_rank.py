"""The part of the live page for one rank, and its keys, in Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from socket import gethostname
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.agent.server.test_live_page import WINDOWS
from tests.helpers import agent
from tests.live import HandMade, Node, hear, opened, table

if TYPE_CHECKING:
    from tests.browser import Chromium


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A job in which rank 2 is late, and rank 1 is in an operation that has not ended."""
    directory = tmp_path_factory.mktemp("rank") / "run"
    with HandMade(directory, "late", 4, late=2, ago_s=120, slots=16_384, host=gethostname()) as job:
        job.run(600)
        job.hang(1, age_ms=200)
        with agent(directory) as running:
            job.read_by(running)
            yield Node(running, job)


def test_open(chromium: Chromium, node: Node) -> None:
    """A rank opens by mouse and keyboard with its own figures; Back, Close and Escape close it, and the focus returns to it."""
    with opened(chromium, node.agent, node.job) as visit:
        page = visit.page
        expect(page.locator("#rank")).to_be_hidden()
        page.get_by_role("link", name="Rank 2").click()
        expect(page).to_have_url(re.compile(r"\?job=late&open=2$"))
        expect(page.get_by_role("heading", name="Rank 2")).to_be_focused()
        expect(page.locator("#rank-steps tbody tr")).to_have_count(20)
        expect(page.locator("#rank-facts")).to_contain_text("Staterunning")
        expect(page.locator("#rank-facts")).to_contain_text(f" on {gethostname()}")
        expect(page.locator("#rank-facts")).to_contain_text("GPU–")
        expect(page.locator("#rank-facts")).to_contain_text("cores")
        expect(page.locator("#rank-flight tbody tr")).to_have_text("nothing right now")
        expect(page.locator("#rank-messages-said")).to_have_text("None.")
        told = node.agent.get("/api/v1/steps?job=late&rank=2&limit=20")
        shown = table(visit, "rank-steps")
        assert [row["step"] for row in shown] == [str(step["seq"]) for step in told]
        assert {row["comm"] for row in shown} == {"13 %"}
        assert {row["messages"] for row in shown} == {"–"}
        operations = {row["op"]: row for row in table(visit, "rank-operations")}
        assert operations["all_reduce"]["p50"] == "10.1 ms"
        assert operations["all_reduce"]["waits"] == "0 %"
        page.keyboard.press("Escape")
        expect(page.locator("#rank")).to_be_hidden()
        expect(page.get_by_role("link", name="Rank 2")).to_be_focused()
        page.get_by_role("link", name="Rank 1").press("Enter")
        expect(page.locator("#rank-flight tbody tr")).to_contain_text("all_reducedp600")
        page.reload()
        expect(page.get_by_role("heading", name="Rank 1")).to_be_visible()
        expect(page.locator("#rank-flight tbody tr")).to_contain_text("all_reduce")
        hear(visit, "moment")
        page.locator("#rank-close").click()
        expect(page).to_have_url(re.compile(r"\?job=late$"))
        page.go_back()
        expect(page.get_by_role("heading", name="Rank 1")).to_be_visible()


def test_looks(chromium: Chromium, node: Node) -> None:
    """An open rank is readable in each window; a rank that does not exist has no figures."""
    for width, dark in WINDOWS:
        with opened(chromium, node.agent, node.job, "&open=1", width, dark) as visit:
            expect(visit.page.locator("#rank-steps tbody tr")).to_have_count(20)
            visit.assert_readable()
            visit.picture(f"live-rank-{width}-{'dark' if dark else 'light'}")
    with opened(chromium, node.agent, node.job, "&open=77") as visit:
        expect(visit.page.locator("#rank-said")).to_have_text("The agent does not know this rank.")
        expect(visit.page.locator("#rank-steps tbody tr")).to_have_text("no step has ended in the time range")


def test_keys(chromium: Chromium, node: Node) -> None:
    """? lists the keys, Escape closes the list; p pauses, l returns to the present, / goes to the filter; none of them acts in a field."""
    for width, dark in WINDOWS:
        with opened(chromium, node.agent, node.job, "&last=5m", width, dark) as visit:
            page = visit.page
            page.keyboard.press("?")
            expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
            visit.assert_readable()
            visit.picture(f"live-keys-{width}-{'dark' if dark else 'light'}")
            page.keyboard.press("p")
            expect(page).not_to_have_url(re.compile("paused"))
            page.keyboard.press("Escape")
            expect(page.get_by_role("dialog")).to_be_hidden()
            page.keyboard.press("p")
            expect(page).to_have_url(re.compile("paused=1"))
            page.keyboard.press("p")
            page.keyboard.press("l")
            expect(page).to_have_url(re.compile(r"\?job=late$"))
            page.keyboard.press("/")
            expect(page.locator("#filter-rank")).to_be_focused()
            page.keyboard.press("p")
            page.get_by_role("textbox", name="From").press("p")
            expect(page).not_to_have_url(re.compile("paused"))
            page.get_by_role("button", name="Keys").click()
            page.get_by_role("dialog").get_by_role("button", name="Close").click()
            expect(page.get_by_role("button", name="Keys")).to_be_focused()
