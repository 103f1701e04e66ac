"""The time range of the live page in Chromium: buttons, fields, zoom by dragging, addresses, and what is stored."""

from __future__ import annotations

import csv
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import expect

from tests.agent.server.test_live_page import WINDOWS, drawn
from tests.chrome_trace import read
from tests.helpers import RunningAgent, agent
from tests.live import HandMade, hear, opened, table

if TYPE_CHECKING:
    from tests.browser import Chromium, Visit


class Node(NamedTuple):
    """An agent, its job, and a minute of the job in Unix seconds, in whole slots."""

    agent: RunningAgent
    job: HandMade
    minute: tuple[int, int]

    @property
    def zoomed(self) -> str:
        """Parameters of that minute."""
        return f"&from={self.minute[0]}&to={self.minute[1]}"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A job that has run for three minutes; rank 2 is late."""
    directory = tmp_path_factory.mktemp("range") / "run"
    with HandMade(directory, "late", 4, late=2, ago_s=200, slots=16_384) as job:
        job.run(1500)
        begin = int(time.time()) // 10 * 10 - 120
        with agent(directory) as running:
            job.read_by(running)
            yield Node(running, job, (begin, begin + 60))


def drag(visit: Visit, plot: str, begin: float, end: float) -> None:
    """Drag over a part of a plot, in fractions of its width."""
    visit.page.locator(f"#{plot}").scroll_into_view_if_needed()
    box = visit.page.locator(f"#{plot} .u-over").bounding_box()
    assert box
    visit.page.mouse.move(box["x"] + begin * box["width"], box["y"] + 40)
    visit.page.mouse.down()
    visit.page.mouse.move(box["x"] + end * box["width"], box["y"] + 50, steps=4)
    visit.page.mouse.up()


def test_zoom(chromium: Chromium, node: Node) -> None:
    """Dragging over a plot zooms both plots, the timeline and the operations; Back undoes it, and so does a double-click."""
    with opened(chromium, node.agent, node.job) as visit:
        page = visit.page
        expect(page.locator("#busbw-said")).to_contain_text("all_gather 600 MB/s")
        expect(page.locator("#range-said")).to_contain_text("Live.")
        drag(visit, "shares", 0.2, 0.5)
        page.wait_for_url(re.compile("from="))
        given = parse_qs(urlsplit(page.url).query)
        begin, end = int(given["from"][0]), int(given["to"][0])
        assert begin % 10 == end % 10 == 0
        assert 20 <= end - begin <= 100
        clock = [time.strftime("%H:%M:%S", time.localtime(at)) for at in (begin, end)]
        expect(page.locator("#range-said")).to_contain_text(f"{clock[0]} to {clock[1]}, a point for each 10 s.")
        expect(page.locator("#timeline-said")).to_contain_text(f"until {clock[1]} of 4 ranks")
        expect(page.locator("#operations-title")).to_have_text(f"Operations from {clock[0]} to {clock[1]}")
        expect(page.locator("#shares-said")).to_contain_text(f"Since {clock[0]}. Latest: communication 3")
        counts = [row["count"] for row in table(visit, "operations")]
        assert counts == ["8.33/s", "8.33/s"]
        hear(visit, "timeline")
        expect(page.locator("#timeline-said")).to_contain_text(f"until {clock[1]}")
        first = page.url
        drag(visit, "busbw", 0.1, 0.6)
        page.wait_for_url(lambda url: url != first)
        page.go_back()
        expect(page).to_have_url(first)
        expect(page.locator("#operations-title")).to_have_text(f"Operations from {clock[0]} to {clock[1]}")
        visit.page.locator("#busbw .u-over").dblclick()
        expect(page).to_have_url(re.compile(r"\?job=late$"))
        expect(page.locator("#operations-title")).to_have_text("Operations of the last minute")
        expect(page.locator("#timeline-said")).not_to_contain_text("until")


def test_zoomed_address(chromium: Chromium, node: Node) -> None:
    """An address with a range shows it in each window; its figures are those of the API, and the fields have its times."""
    since, until = node.minute
    told = node.agent.get(f"/api/v1/summary?job=late&by=group,op&since={since}&until={until}")["rows"]
    for width, dark in WINDOWS:
        with opened(chromium, node.agent, node.job, node.zoomed, width, dark) as visit:
            expect(visit.page.locator("#operations-title")).to_contain_text("Operations from")
            assert [(row["group"], row["op"]) for row in table(visit, "operations")] == [
                (row["by"]["group"], row["by"]["op"]) for row in told
            ]
            expect(visit.page.locator("#timeline-said")).to_contain_text("of 4 ranks")
            for canvas in ("#shares canvas", "#busbw canvas", "#timeline canvas"):
                assert drawn(visit, canvas) >= 2, canvas
            local = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since))
            value = visit.page.get_by_role("textbox", name="From").input_value()
            assert value in (local, local.removesuffix(":00"))
            visit.assert_readable()
            visit.picture(f"live-zoom-{width}-{'dark' if dark else 'light'}")


def test_buttons(chromium: Chromium, node: Node) -> None:
    """Each button shows the end of the job, by mouse and keyboard; the pressed one is marked, also after a reload."""
    with opened(chromium, node.agent, node.job) as visit:
        page, buttons = visit.page, visit.page.get_by_role("group", name="Time range")
        expect(buttons.get_by_role("button", name="Live")).to_have_attribute("aria-pressed", "true")
        for name, last, text in (
            ("30 s", "30s", "The last 30 s of the job"),
            ("5 min", "5m", "The last 5 min of the job"),
            ("30 min", "30m", "The last 30 min of the job"),
            ("All", "all", ", a point for each 10 s."),
        ):
            buttons.get_by_role("button", name=name, exact=True).press("Enter")
            expect(page).to_have_url(re.compile(rf"\?job=late&last={last}$"))
            expect(page.locator("#range-said")).to_contain_text(text)
            expect(page.locator("#operations-title")).to_contain_text("Operations from")
        page.reload()
        expect(buttons.get_by_role("button", name="All")).to_have_attribute("aria-pressed", "true")
        expect(page.locator("#range-said")).to_contain_text("are those of the present")
        expect(page.locator("#shares-said")).to_contain_text("Latest: communication 3")
        buttons.get_by_role("button", name="Live").click()
        expect(page).to_have_url(re.compile(r"\?job=late$"))


def test_fields(chromium: Chromium, node: Node) -> None:
    """Times can be entered; a range that ends before it begins is refused in words."""
    with opened(chromium, node.agent, node.job) as visit:
        page = visit.page
        expect(page.locator("#range-said")).to_contain_text("Live.")
        begin, end = (time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at)) for at in node.minute)
        page.get_by_role("textbox", name="From").fill(begin)
        page.wait_for_url(re.compile("from="))
        page.get_by_role("textbox", name="To", exact=True).fill(end)
        expect(page).to_have_url(re.compile(f"from={node.minute[0]}&to={node.minute[1]}$"))
        page.get_by_role("textbox", name="From").fill(
            time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(node.minute[1] + 600))
        )
        expect(page.locator("#range-said")).to_contain_text("must begin before it ends")


def test_downloads(chromium: Chromium, node: Node, tmp_path: Path) -> None:
    """Links download the operations of the range that pass the filters, the end of the job for Perfetto, and the report as a page."""
    with opened(chromium, node.agent, node.job, f"{node.zoomed}&rank=2&op=all_gather") as visit:
        for link, name in (
            ("the latest operations of the range as CSV, filtered", "operations.csv"),
            ("the report on the job", "report.html"),
            ("the range for Perfetto", "trace.json.gz"),
        ):
            with visit.page.expect_download() as download:
                visit.page.get_by_role("link", name=link).click()
            download.value.save_as(tmp_path / name)
    with (tmp_path / "operations.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["rank"], row["op"]) for row in rows} == {("2", "all_gather")}
    assert all(node.minute[0] <= float(row["end_at"]) < node.minute[1] for row in rows)
    assert len(rows) == 60 / 0.12
    trace = read(tmp_path / "trace.json.gz")
    ends = [each.end_ns + trace.about["Unix time of 0, in ns"] for each in trace.of("operation")]
    assert len(ends) == 4 * 2 * 60 / 0.12
    assert all(node.minute[0] * 10**9 <= end_ns < node.minute[1] * 10**9 for end_ns in ends)
    assert "commwatch report: late" in (tmp_path / "report.html").read_text(encoding="utf-8")
    with opened(chromium, node.agent, node.job, "&last=5m") as visit:
        expect(visit.page.locator("#get-timeline")).to_have_text("the last 5 min for Perfetto")
        assert "last=5m" in str(visit.page.locator("#get-timeline").get_attribute("href"))


def test_nothing_stored(chromium: Chromium, node: Node) -> None:
    """Of a time before the job the page shows that nothing is known; an address that is not valid is as if it had no range."""
    with opened(chromium, node.agent, node.job, "&from=1000000000&to=1000000100") as visit:
        expect(visit.page.locator("#shares-said")).to_have_text("No share is known in this range.")
        expect(visit.page.locator("#busbw-said")).to_have_text("No operation whose bandwidth is known in this range.")
        expect(visit.page.locator("#timeline-said")).to_have_text("No operation of this time is stored.")
        expect(visit.page.locator("#operations tbody tr")).to_have_text("no operation has ended in this range")
        visit.assert_readable()
    for query in ("&from=5", "&from=9&to=3", "&last=x", "&from=a&to=b"):
        with opened(chromium, node.agent, node.job, query) as visit:
            expect(visit.page.locator("#range-said")).to_contain_text("Live.")


def test_refused(chromium: Chromium, node: Node) -> None:
    """The page shows why the agent refuses a range, and asks again by itself."""
    with chromium.visit(f"{node.agent.url}/?job=late", forgiven="503") as visit:
        page = visit.page
        expect(page.locator("#ranks tbody tr")).to_have_count(4)
        full = {"status": 503, "content_type": "application/problem+json", "body": '{"detail": "too many requests"}'}
        page.route("**/api/v1/past*", lambda route: route.fulfill(**full))
        page.get_by_role("button", name="All", exact=True).click()
        expect(page.locator("#range-said")).to_have_text("The range cannot be shown: too many requests. Trying again.")
        page.unroute("**/api/v1/past*")
        expect(page.locator("#range-said")).to_contain_text(", a point for each 10 s.", timeout=30_000)


def test_ended_job(chromium: Chromium, node: Node) -> None:
    """The last five minutes of a job that has ended are those before its end."""
    node.job.end()
    with opened(chromium, node.agent, node.job, "&last=5m") as visit:
        expect(visit.page.locator("#about")).to_contain_text("ended")
        expect(visit.page.locator("#range-said")).to_contain_text(", a point for each 10 s.")
        expect(visit.page.locator("#operations tbody tr")).to_have_count(2)
        expect(visit.page.locator("#timeline-said")).to_contain_text("of 4 ranks")
        visit.assert_readable()
