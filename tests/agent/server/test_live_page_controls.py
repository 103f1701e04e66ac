"""What people can do on the live page, in Chromium: sort, pause, filter; each state of the page has an address."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

import pytest
from playwright.sync_api import expect

from tests.agent.server.test_live_page import WINDOWS
from tests.helpers import RunningAgent, agent
from tests.live import HandMade, hear, table

if TYPE_CHECKING:
    from tests.browser import Chromium, Visit

JOB = "late"


class Node(NamedTuple):
    """An agent, and its job."""

    agent: RunningAgent
    job: HandMade


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A job in which rank 2 is late; rank 1 is in an operation that has not ended."""
    directory = tmp_path_factory.mktemp("controls") / "run"
    with agent(directory) as running, HandMade(directory, JOB, 4, late=2, ago_s=60) as job:
        job.run(300)
        job.hang(1, age_ms=200)
        job.read_by(running)
        yield Node(running, job)


@contextmanager
def opened(chromium: Chromium, node: Node, query: str = "", width: int = 1280, dark: bool = False) -> Iterator[Visit]:
    """The page of the job, with further parameters of its address; its tables are filled."""
    node.job.run(10)
    with chromium.visit(f"{node.agent.url}/?job={quote(JOB)}{query}", width=width, dark=dark) as visit:
        expect(visit.page.locator("#ranks tbody tr")).to_have_count(4)
        expect(visit.page.locator("#operations tbody tr").first).to_contain_text("all_")
        yield visit


def column(visit: Visit, name: str, of: str) -> list[str]:
    """The cells of one column of a table."""
    return [row[of] for row in table(visit, name)]


def test_sort(chromium: Chromium, node: Node) -> None:
    """A heading sorts by mouse and keyboard: largest first, smallest first, the page's own order; unknown values come last."""
    with opened(chromium, node) as visit:
        assert column(visit, "ranks", "rank") == ["2", "0", "1", "3"]
        head = visit.page.locator("#ranks").get_by_role("button", name="rank", exact=True)
        cell = head.locator("..")
        assert cell.get_attribute("aria-sort") is None
        for order, ranks in (("descending", ["3", "2", "1", "0"]), ("ascending", ["0", "1", "2", "3"])):
            head.click()
            expect(cell).to_have_attribute("aria-sort", order)
            assert column(visit, "ranks", "rank") == ranks
        hear(visit, "moment")
        assert column(visit, "ranks", "rank") == ["0", "1", "2", "3"]
        head.press("Enter")
        expect(cell).not_to_have_attribute("aria-sort", re.compile("."))
        assert column(visit, "ranks", "rank") == ["2", "0", "1", "3"]
        visit.page.locator("#ranks").get_by_role("button", name="for", exact=True).press("Space")
        assert column(visit, "ranks", "rank")[0] == "1"
        assert column(visit, "ranks", "for")[1:] == ["–"] * 3
        visit.page.locator("#operations").get_by_role("button", name="op", exact=True).click()
        assert column(visit, "operations", "op") == ["all_gather", "all_reduce"]


def test_sorted_address(chromium: Chromium, node: Node) -> None:
    """The order of each table is in the address and is restored from it; an order that does not exist is ignored."""
    with opened(chromium, node) as visit:
        visit.page.locator("#ranks").get_by_role("button", name="rank", exact=True).click()
        visit.page.locator("#operations").get_by_role("button", name="busbw", exact=True).click()
        expect(visit.page).to_have_url(re.compile(r"\?job=late&sort-ranks=-rank&sort-operations=-busbw$"))
        visit.page.reload()
        expect(visit.page.locator("#ranks tbody tr")).to_have_count(4)
        assert column(visit, "ranks", "rank") == ["3", "2", "1", "0"]
        expect(visit.page.locator("#operations tbody tr")).to_have_count(2)
        assert column(visit, "operations", "op") == ["all_gather", "all_reduce"]
    with opened(chromium, node, "&sort-ranks=-nothing&sort-flight=%3Cb%3E&unknown=1") as visit:
        assert column(visit, "ranks", "rank") == ["2", "0", "1", "3"]


def test_paused_address(chromium: Chromium, node: Node) -> None:
    """A page is paused by its address, too: it shows the present once and then stays; sorting works meanwhile."""
    with opened(chromium, node) as visit:
        visit.page.get_by_role("button", name="Pause").click()
        expect(visit.page).to_have_url(re.compile("paused=1"))
    with opened(chromium, node, "&paused=1") as visit:
        expect(visit.page.get_by_role("button", name="Pause")).to_have_attribute("aria-pressed", "true")
        expect(visit.page.get_by_role("alert")).to_contain_text("Paused at")
        before = column(visit, "flight", "for")
        hear(visit, "moment")
        assert column(visit, "flight", "for") == before
        visit.page.locator("#ranks").get_by_role("button", name="rank", exact=True).click()
        assert column(visit, "ranks", "rank") == ["3", "2", "1", "0"]
        visit.page.get_by_role("button", name="Pause").click()
        expect(visit.page.get_by_role("alert")).to_be_hidden()
        expect(visit.page).not_to_have_url(re.compile("paused"))


def test_looks(chromium: Chromium, node: Node) -> None:
    """With a sorted table the page is readable in each window."""
    for width, dark in WINDOWS:
        with opened(chromium, node, "&sort-ranks=-waits&sort-operations=op", width, dark) as visit:
            visit.assert_readable()
            visit.picture(f"live-controls-{width}-{'dark' if dark else 'light'}")
