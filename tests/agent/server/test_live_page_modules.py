"""Modules of the live page in Chromium, without an event stream: a test calls them with data made by hand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import Page, expect

from tests.agent.server.test_live_page_interaction import clock
from tests.helpers import RunningAgent, agent
from tests.live import table

if TYPE_CHECKING:
    from tests.browser import Chromium, Visit

#: A job of two ranks without operations, steps or verdicts.
JOB: dict[str, Any] = {
    "job_id": "train", "state": "running", "world_size": 2, "steps_per_s": None, "step_s": None, "steps_unavailable": None, "comm": None,
    "exposed": None, "comm_of": "", "exposed_of": "", "split": "", "sheds": None, "says": "", "ranks": [], "states": {"running": 2},
    "step": None, "in_flight": [], "in_flight_more": 0, "verdicts": [],
}  # fmt: skip


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent that serves the modules."""
    with agent(tmp_path_factory.mktemp("modules") / "run") as running:
        yield running


@pytest.fixture
def visit(chromium: Chromium, node: RunningAgent) -> Iterator[Visit]:
    """The page without the module that fills it, so that only the test does."""
    with chromium.visit(f"{node.url}/healthz") as visit:
        visit.page.route("**/static/live.js", lambda route: route.fulfill(content_type="text/javascript", body=""))
        visit.page.goto(f"{node.url}/", wait_until="load")
        visit.page.evaluate("document.getElementById('job').hidden = false")
        yield visit


def line(rank: int, **known: Any) -> dict[str, Any]:
    """A rank of which nothing else is known."""
    absent = dict.fromkeys(("verdict", "step", "step_s", "comm", "exposed", "wait", "gpu", "gpu_utilization", "oldest"))
    return {"rank": rank, "host": "node", "state": "running", **absent, **known}


def show_job(page: Page, alerts: tuple[dict[str, Any], ...] = (), **job: Any) -> None:
    """Show a moment of a job."""
    moment = {"job": JOB | job, "alerts": alerts, "trouble": None, "nodes": {"answered": 1, "silent": {}}}
    page.evaluate("async (moment) => (await import('/static/show.js')).showJob(moment)", moment)


def test_operation_of_each_rank(visit: Visit) -> None:
    """A rank in an operation shows it, even if the list of operations in flight leaves it out; one in none has a dash."""
    inside = {"op": "all_reduce", "group": "dp", "age_s": 31.0}
    show_job(visit.page, ranks=[line(0, oldest=inside), line(1)], in_flight=[], in_flight_more=1)
    assert [(row["in flight"], row["for"]) for row in table(visit, "ranks")] == [
        ("all_reduce dp", "31.0 s"),
        ("–", "–"),
    ]


def test_age_of_a_hang_alone_changes(visit: Visit) -> None:
    """While the age of a hang grows, all else of what is wrong is left alone: links keep the focus, and nothing is read aloud again."""
    page = visit.page
    alert = {
        "id": "a", "name": "CollectiveHang", "severity": "critical", "state": "firing", "annotations": {"summary": "Job train hangs"},
    }  # fmt: skip

    def show(*ages: str) -> None:
        says = [f"hang: process dead: rank 1 crashed (rank 0 in all_reduce 6 of group dp{age})" for age in ages]
        show_job(page, (alert,), verdicts=[{"kind": "hang", "ranks": [1], "says": text} for text in says])

    show(" for 30 s")
    page.get_by_role("link", name="what to do").focus()
    page.evaluate(
        """() => {
          window.changed = [];
          const region = (node) => (node.closest ? node : node.parentElement).closest("[aria-live]");
          const seen = (records) => window.changed.push(...records.map(({ target }) => region(target).ariaLive));
          new MutationObserver(seen).observe(document.getElementById("wrong"), { subtree: true, childList: true, characterData: true });
        }"""
    )
    for second in range(31, 35):
        show(f" for {second} s")
    expect(page.get_by_role("link", name="what to do")).to_be_focused()
    expect(page.locator("#wrong li").first).to_have_text(
        "HANG, rank 1 process dead: rank 1 crashed (rank 0 in all_reduce 6 of group dp for 34 s)"
    )
    assert set(page.evaluate("window.changed")) == {"off"}
    show(", 35 s ago", " for 36 s")
    expect(page.locator("#wrong li")).to_have_count(3)
    expect(page.locator("#wrong li").first).to_have_text(
        "HANG, rank 1 process dead: rank 1 crashed (rank 0 in all_reduce 6 of group dp, 35 s ago)"
    )


def test_plots_end_at_the_present(visit: Visit) -> None:
    """While a job runs, its plots end at the present, however old the last point is, which is then named by its time; after an hour it is gone."""
    last = int(time.time()) // 10 * 10 - 3000
    slots = [
        {"at": last - ago, "comm": 0.22, "exposed": 0.05, "waiting": 0.02, "busbw": {"all_reduce": 4e9}}
        for ago in range(600, -1, -10)
    ]
    shown = visit.page.evaluate_handle(
        """async (slots) => {
          const plots = new (await import("/static/plots.js")).Plots();
          plots.begin(slots);
          return plots;
        }""",
        slots,
    )

    said = [visit.page.locator(f"#{plot}-said") for plot in ("shares", "busbw")]

    def end_at(now: float | None) -> float:
        """The end of the axis at a time; ``None``: the job has ended."""
        show = """async (plots, now) => {
          plots.add([]);
          plots.range(null, null, now);
          await new Promise(requestAnimationFrame); // the axis changes after that
          return plots.plots.shares.scales.x.max;
        }"""
        return float(shown.evaluate(show, now))

    for now, end, word in (
        (last + 20, last + 20, "Latest"), (last + 3000, last + 3000, f"At {clock(last)}"), (None, last, "Latest"),
    ):  # fmt: skip
        assert end_at(now) == end
        expect(said[0]).to_contain_text(f"{word}: communication 22%, exposed 5%.")
        expect(said[1]).to_have_text(f"{word}: all_reduce 4 GB/s.")
    assert end_at(last + 3610) == end_at(last + 3611) - 1
    assert [each.text_content() for each in said] == [
        "No share is known in the last hour.",
        "No operation whose bandwidth is known in the last hour.",
    ]


def test_operations_of_another_selection(visit: Visit) -> None:
    """After a change of the filter or the range the rows of the previous selection are gone, also if the agent refuses the next ones."""
    page = visit.page
    full = {"status": 503, "content_type": "application/problem+json", "body": '{"detail": "busy"}'}
    page.route("**/api/v1/summary*", lambda route: route.fulfill(**full))
    row = dict.fromkeys(("group_size", "p50_s", "p99_s", "algbw", "busbw", "wait_s", "p2p_wait_s"))
    event = {"covered_s": 60, "rows": [row | {"by": {"group": "dp", "op": "all_reduce"}, "ranks": 8, "count": 480}]}
    shown = page.evaluate_handle(
        """async (event) => {
          window.set = (await import("/static/state.js")).set;
          const operations = new (await import("/static/operations.js")).OperationsTable();
          operations.hear(event);
          return operations;
        }""",
        event,
    )
    said, rows = page.locator("#operations-said"), page.locator("#operations tbody tr")
    expect(rows).to_contain_text("all_reduce")
    page.evaluate("set({ rank: 3 })")
    expect(page.locator("#operations-title")).to_have_text("Operations")
    expect(rows).to_have_text("not known yet")
    shown.evaluate("(operations) => operations.tick({ at: 1000, job: { job_id: 'train', state: 'running' } }, null)")
    expect(said).to_have_text("The operations cannot be shown: busy. Trying again.")
    expect(rows).to_have_text("not known yet")
    page.evaluate("set({ rank: null, op: 'broadcast' })")
    expect(page.locator("#operations-title")).to_have_text("Operations of the last minute")
    expect(rows).to_have_text("no operation passes the filter")
    visit.errors.clear()  # the refusal, which the test has provoked


def test_focus_stays_with_its_rank(visit: Visit) -> None:
    """In a table whose order changes, a link that has the focus keeps it and its rank, wherever its row goes."""
    page = visit.page
    page.evaluate("async () => (await import('/static/state.js')).set({ 'sort-ranks': '-waits' })")
    link = page.get_by_role("link", name="Rank 1")
    for waits, order in (
        ((0.3, 0.2, 0.1), "012"), ((0.1, 0.2, 0.3), "210"), ((0.2, 0.3, 0.1), "102"), ((0.3, 0.1, 0.2), "021"),
    ):  # fmt: skip
        show_job(page, ranks=[line(rank, wait=wait) for rank, wait in enumerate(waits)])
        if order == "012":
            link.focus()
        assert "".join(row["rank"] for row in table(visit, "ranks")) == order
        expect(link).to_be_focused()
        expect(link).to_have_text("1")
    show_job(page, ranks=[])
    expect(page.locator("#ranks tbody tr")).to_have_text("no rank is known")
    show_job(page, ranks=[line(1), line(0)])
    assert [row["rank"] for row in table(visit, "ranks")] == ["1", "0"]
