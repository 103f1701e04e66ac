"""What people can do on the live page, in Chromium: sort, pause, filter; each state of the page has an address."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.agent.server.test_live_page import WINDOWS
from tests.helpers import agent
from tests.live import HandMade, Node, hear, opened, table

if TYPE_CHECKING:
    from tests.browser import Chromium, Visit


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A job in which rank 2 is late; rank 1 is in an operation that has not ended."""
    directory = tmp_path_factory.mktemp("controls") / "run"
    with agent(directory) as running, HandMade(directory, "late", 4, late=2, ago_s=60) as job:
        job.run(300)
        job.hang(1, age_ms=200)
        job.read_by(running)
        yield Node(running, job)


@contextmanager
def shown(chromium: Chromium, node: Node, query: str = "", width: int = 1280, dark: bool = False) -> Iterator[Visit]:
    """The page of the job, of which operations have just ended; its tables are filled."""
    node.job.run(10)
    with opened(chromium, node.agent, node.job, query, width, dark) as visit:
        expect(visit.page.locator("#operations tbody tr").first).to_contain_text("all_")
        yield visit


def column(visit: Visit, name: str, of: str) -> list[str]:
    """The cells of one column of a table."""
    return [row[of] for row in table(visit, name)]


def test_sort(chromium: Chromium, node: Node) -> None:
    """A heading sorts by mouse and keyboard: largest first, smallest first, the page's own order; unknown values come last."""
    with shown(chromium, node) as visit:
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
    with shown(chromium, node) as visit:
        visit.page.locator("#ranks").get_by_role("button", name="rank", exact=True).click()
        visit.page.locator("#operations").get_by_role("button", name="busbw", exact=True).click()
        expect(visit.page).to_have_url(re.compile(r"\?job=late&sort-ranks=-rank&sort-operations=-busbw$"))
        visit.page.reload()
        expect(visit.page.locator("#ranks tbody tr")).to_have_count(4)
        assert column(visit, "ranks", "rank") == ["3", "2", "1", "0"]
        expect(visit.page.locator("#operations tbody tr")).to_have_count(2)
        assert column(visit, "operations", "op") == ["all_gather", "all_reduce"]
    with shown(chromium, node, "&sort-ranks=-nothing&sort-flight=%3Cb%3E&unknown=1") as visit:
        assert column(visit, "ranks", "rank") == ["2", "0", "1", "3"]


def test_paused_address(chromium: Chromium, node: Node) -> None:
    """A page is paused by its address, too: it shows the present once and then stays; sorting works meanwhile."""
    with shown(chromium, node) as visit:
        visit.page.get_by_role("button", name="Pause").click()
        expect(visit.page).to_have_url(re.compile("paused=1"))
    with shown(chromium, node, "&paused=1") as visit:
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


def test_filters(chromium: Chromium, node: Node) -> None:
    """Filters by rank, group, operation and size apply to operations, timeline and operations in flight; the page says what they do not apply to."""
    with shown(chromium, node) as visit:
        page = visit.page
        expect(page.get_by_role("combobox", name="Size").get_by_role("option")).to_have_text(
            ["all", "≤ 4 MiB", "≤ 8 MiB"]
        )
        expect(page.get_by_role("combobox", name="Rank").get_by_role("option")).to_have_text(
            ["all", "0", "1", "2", "3"]
        )
        expect(page.get_by_role("button", name="Clear the filter")).to_be_hidden()
        page.get_by_role("combobox", name="Operation").select_option("all_gather")
        expect(page.locator("#operations tbody tr")).to_have_count(1)
        expect(page.locator("#operations tbody tr")).to_contain_text("all_gather")
        expect(page.locator("#flight tbody tr")).to_have_text("nothing that passes the filter")
        expect(page.locator("#busbw-said")).to_have_text("Latest: all_gather 600 MB/s.")
        expect(page.locator("#timeline-legend")).not_to_contain_text("all_reduce")
        expect(page.locator("#shares-said")).to_contain_text(
            "Of all operations of all ranks: shares cannot be filtered."
        )
        expect(page.locator("#filter-said")).to_contain_text("Everything else covers all operations of all ranks.")
        page.get_by_role("combobox", name="Operation").select_option("")
        page.get_by_role("combobox", name="Rank").select_option("2")
        expect(page.locator("#timeline-said")).to_contain_text("of 1 rank, in")
        expect(page.locator("#busbw-said")).to_contain_text("Of all ranks, groups and sizes")
        # It is late in dp, so that its operations are short: their busbw is that of the transfer.
        expect(page.locator("#operations tbody tr").first).to_contain_text("1.2 GB/s")
        page.get_by_role("combobox", name="Size").select_option(str(4 << 20))
        expect(page.locator("#operations tbody tr")).to_have_count(1)
        expect(page).to_have_url(re.compile(rf"\?job=late&rank=2&size={4 << 20}$"))
        page.reload()
        expect(page.locator("#operations tbody tr")).to_have_count(1)
        expect(page.get_by_role("combobox", name="Size")).to_have_value(str(4 << 20))
        page.go_back()
        expect(page).to_have_url(re.compile(r"\?job=late&rank=2$"))
        expect(page.locator("#operations tbody tr")).to_have_count(2)
        expect(page.get_by_role("combobox", name="Size")).to_have_value("")
        page.get_by_role("button", name="Clear the filter").click()
        expect(page).to_have_url(re.compile(r"\?job=late$"))
        expect(page.get_by_role("combobox", name="Rank")).to_be_focused()
        expect(page.locator("#timeline-said")).to_contain_text("of 4 ranks")
        expect(page.locator("#flight tbody tr")).to_contain_text("all_reduce")


def test_filter_of_nothing(chromium: Chromium, node: Node) -> None:
    """A filter from the address that nothing passes shows empty tables, not zeros; a value that is not valid is ignored."""
    with opened(chromium, node.agent, node.job, "&group=no%20such&rank=x&size=-1") as visit:
        expect(visit.page.get_by_role("combobox", name="Group")).to_have_value("no such")
        expect(visit.page.get_by_role("combobox", name="Rank")).to_have_value("")
        expect(visit.page.locator("#operations tbody tr")).to_have_text("no operation passes the filter")
        expect(visit.page.locator("#flight tbody tr")).to_have_text("nothing that passes the filter")
        visit.assert_readable()


def test_looks(chromium: Chromium, node: Node) -> None:
    """With a sorted table the page is readable in each window."""
    for width, dark in WINDOWS:
        with shown(chromium, node, "&sort-ranks=-waits&sort-operations=op&op=all_reduce", width, dark) as visit:
            visit.assert_readable()
            visit.picture(f"live-controls-{width}-{'dark' if dark else 'light'}")
