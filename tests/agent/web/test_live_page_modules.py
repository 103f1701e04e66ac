"""Modules of the live page in Chromium, without an event stream: a test calls them with data made by hand."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import Page, expect

from commwatch_agent.text.units import percent, rate, seconds, size
from tests.agent.web.test_live_page_interaction import clock
from tests.helpers import RunningAgent, agent
from tests.live import table

if TYPE_CHECKING:
    from tests.browser import Chromium, Visit

#: A job of two ranks without operations, steps or verdicts.
JOB: dict[str, Any] = {
    "job_id": "train", "state": "running", "world_size": 2, "steps_per_s": None, "step_s": None, "steps_unavailable": None, "comm": None,
    "exposed": None, "comm_of": "", "exposed_of": "", "split": "", "sheds": None, "says": "", "ranks": [], "states": {"running": 2},
    "step": None, "in_flight": [], "in_flight_more": 0, "verdicts": [], "figures_at": None,
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


def test_numbers(visit: Visit) -> None:
    """The page formats durations, shares, rates and sizes as all other texts do."""
    values = [
        0,
        1e-6,
        0.00012,
        0.0042,
        0.0096,
        0.01,
        0.125,
        0.285,
        0.405,
        0.9994,
        0.9996,
        1.005,
        1.125,
        9.996,
        12.25,
        99.96,
        119.6,
        120,
        179.7,
        3599.7,
        3661,
        7199,
        999_600,
        2.26e7,
        1.125e9,
    ]
    formats = {"percent": percent, "seconds": seconds, "rate": rate, "bytes": size}
    script = (
        "async ([name, values]) => { const words = await import('/static/words.js'); return values.map(words[name]); }"
    )
    for name, of_python in formats.items():
        values = [value for value in values if value == 0 or value >= 0.01 or name in ("percent", "seconds")]
        assert visit.page.evaluate(script, [name, values]) == [of_python(value) for value in values], name


def line(rank: int, **known: Any) -> dict[str, Any]:
    """A rank of which nothing else is known."""
    absent = dict.fromkeys(("verdict", "step", "step_s", "comm", "exposed", "wait", "gpu", "gpu_utilization", "oldest"))
    return {"rank": rank, "host": "node", "state": "running", **absent, **known}


def incident(id_: str, title: str, **known: Any) -> dict[str, Any]:
    """An open incident of which nothing else is known."""
    absent: dict[str, Any] = {
        "place": "",
        "remedy": "",
        "says": "",
        "ranks": [],
        "ended_at": None,
        "outcome": None,
        "cost_rank_s": None,
    }
    more = {
        "consequence_of": None,
        "began_at": 1000,
        "last_at": 1060,
        "kind": "hang",
        "severity": "warning",
        "state": "open",
    }
    return {"id": id_, "title": title, **absent, **more, **known}


def show_job(
    page: Page, incidents: Sequence[dict[str, Any]] = (), alerts: Sequence[dict[str, Any]] = (), **job: Any
) -> None:
    """Show a moment of a job."""
    about = {"at": 1060, "trouble": None, "nodes": {"answered": 1, "silent": {}}}
    moment = {**about, "job": JOB | job, "incidents": incidents, "alerts": alerts}
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
    alert = {"name": "CollectiveHang", "state": "firing", "annotations": {"incident": "a"}}
    says = "process dead: rank 1 crashed (rank 0 in all_reduce 6 of group dp for {} s)"

    def show(age: int) -> None:
        show_job(
            page, [incident("a", "Hang: rank 1", says=says.format(age), last_at=1000 + age, cost_rank_s=age)], [alert]
        )

    show(30)
    page.get_by_role("link", name="alert CollectiveHang").focus()
    page.evaluate(
        """() => {
          window.changed = [];
          const region = (node) => (node.closest ? node : node.parentElement).closest("[aria-live]");
          const seen = (records) => window.changed.push(...records.map(({ target }) => region(target).ariaLive));
          new MutationObserver(seen).observe(document.getElementById("wrong"), { subtree: true, childList: true, characterData: true });
        }"""
    )
    for second in range(31, 35):
        show(second)
    link = page.get_by_role("link", name="alert CollectiveHang")
    expect(link).to_be_focused()
    expect(link).to_have_attribute("href", "/runbook#collectivehang")
    expect(page.locator("#wrong li")).to_contain_text(
        ["Hang: rank 1 process dead: rank 1 crashed (rank 0 in all_reduce 6 of group dp for 34 s)"]
    )
    expect(page.locator("#wrong li .when")).to_have_text(re.compile("for 34.0 s so far; cost 34.0 s of rank time$"))
    assert set(page.evaluate("window.changed")) == {"off"}


def listed(page: Page, place: str) -> list[tuple[str, int]]:
    """The titles of a list of incidents, and how far each is indented."""
    items = page.locator(f"#{place} li").evaluate_all(
        "items => items.map(item => [item.firstChild.textContent, Number(item.dataset.depth)])"
    )
    return [(title, depth) for title, depth in items]


ENDED = {"state": "ended", "ended_at": 1030, "outcome": "recovered"}


def test_consequences_are_below_their_causes(visit: Visit) -> None:
    """Each consequence is below its cause, wherever the agent lists it; what has ended is below what lasts, except a cause with a consequence that lasts."""
    page = visit.page
    lost, hang = incident("1", "Rank died: rank 1"), incident("2", "Hang: rank 1", consequence_of="1")
    bound = incident("3", "Bound", consequence_of="2", state="pending")
    other, past = incident("4", "Fault"), incident("5", "Past", **ENDED)
    show_job(page, [hang, lost, other, bound, past, incident("6", "Effect", consequence_of="5", **ENDED)])
    assert listed(page, "wrong") == [
        ("Rank died: rank 1", 0),
        ("Hang: rank 1", 1),
        ("Bound (pending)", 2),
        ("Fault", 0),
    ]
    assert listed(page, "happened") == [("Past", 0), ("Effect", 1)]
    show_job(page, [hang, lost | ENDED, past])
    assert (listed(page, "wrong"), listed(page, "happened")) == (
        [("Rank died: rank 1", 0), ("Hang: rank 1", 1)],
        [("Past", 0)],
    )
    show_job(page, [hang | {"consequence_of": "gone"}])
    assert listed(page, "wrong") == [("Hang: rank 1", 0)]
    show_job(page, [lost | {"consequence_of": "2"}, hang])  # as agents of two nodes might think
    assert listed(page, "wrong") == [("Rank died: rank 1", 0), ("Hang: rank 1", 1)]
    show_job(page)
    expect(page.locator("#wrong")).to_have_text("Nothing found.")
    expect(page.locator("#happened-section")).to_be_hidden()
    show_job(page, state="ended")
    expect(page.locator("#wrong-section")).to_be_hidden()
    expect(page.locator("#happened-section")).to_contain_text("Nothing was found.")


def test_incident_in_words(visit: Visit) -> None:
    """An incident has title and place in one line, what it is, when, at which cost, and what to do; names in it are text."""
    page, foreign = visit.page, "<img src=x onerror=alert(1)>\u202e"
    remedy = "Let it continue: `kill -CONT 77`."
    show_job(
        page,
        [
            incident(
                "a", f"Hang: {foreign}", place=f"load ({foreign}:8)", says=f"{foreign} waits", remedy=remedy, **ENDED
            )
        ],
    )
    item = page.locator("#happened li")
    for part in ("Hang: <img", "in load (<img", "waits", ", for 30.0 s", "Let it continue: kill -CONT 77."):
        expect(item).to_contain_text(part)
    expect(item.locator("code")).to_have_text("kill -CONT 77")
    expect(item.get_by_role("link", name="evidence")).to_have_attribute("href", "/incidents/a")
    assert item.locator("img").count() == 0
    assert "\u202e" not in (item.text_content() or "")
    show_job(page, [incident("a", "Hang", ranks=[1], severity="critical")], ranks=[line(0), line(1)])
    assert [row["state"] for row in table(visit, "ranks")] == ["running, hang", "running"]
    expect(page.locator("#ranks tbody tr").first).to_have_class("bad")


def test_figures_of_then(visit: Visit) -> None:
    """While no step ends, the tiles say since when, and that their figures are of then; else they do not."""
    page = visit.page
    figures: dict[str, Any] = {"comm": 0.4, "exposed": 0.2, "step_s": 0.1, "step": 7}
    show_job(page, figures_at=1015, **figures)
    expect(page.locator("#figures-said")).to_contain_text(
        f"No step for 45.0 s: communication, exposed and step are of {clock(1015)}."
    )
    for tile, note in (("comm", "comm-says"), ("exposed", "exposed-of"), ("step", "pace")):
        expect(page.locator(f"#{tile}")).to_have_class("number quiet")
        expect(page.locator(f"#{note}")).to_contain_text(f"of {clock(1015)}")
    expect(page.get_by_role("meter")).to_be_hidden()
    show_job(page, [incident("a", "Hang: rank 1")])  # a job without steps
    expect(page.locator("#figures-said")).to_have_text(re.compile(r"^Hang: rank 1, since .*:16:40\.$"))
    show_job(page, [incident("a", "Hang: rank 1")], step=7, steps_per_s=10)  # of one group; others go on
    expect(page.locator("#figures-said")).to_be_hidden()
    show_job(page, figures_at=1015, step=7)
    expect(page.locator("#figures-said")).to_have_text("No step for 45.0 s.")
    show_job(page, steps_per_s=10, **figures)
    expect(page.locator("#figures-said")).to_be_hidden()
    expect(page.locator("#comm")).to_have_class("number bad")
    expect(page.locator("#pace")).to_have_text("10/s, now at step 7")


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


def test_one_point(visit: Visit) -> None:
    """A plot with one point has the axis of its range, too."""
    axis = visit.page.evaluate(
        """async () => {
          const plots = new (await import("/static/plots.js")).Plots();
          plots.begin([{ at: 1000, comm: 0.2, exposed: null, waiting: null, busbw: {} }]);
          plots.range(null, null, 1010);
          await new Promise(requestAnimationFrame);
          const { min, max } = plots.plots.shares.scales.x;
          return [min, max];
        }"""
    )
    assert axis == [950, 1010]


#: Draws the plots of some slots of a job that began at a time; ``null``: it runs.
PLOTS = """async ([slots, began]) => {
  const plots = new (await import("/static/plots.js")).Plots();
  plots.begin(slots);
  plots.range(null, null, began === null ? slots.at(-1).at : null, began);
  await new Promise(requestAnimationFrame);
  const { shares } = plots.plots;
  shares.root.scrollIntoView();
  const { min, max } = shares.scales.x;
  const marks = shares.axes[0]._splits ?? [];
  return [min, max, shares.axes[0]._values ?? marks];
}"""


def slots_at(*ends: float) -> list[dict[str, Any]]:
    """Slots of a job with a share of 22%."""
    return [{"at": at, "comm": 0.22, "exposed": 0.05, "waiting": 0.1, "busbw": {"all_reduce": 4e9}} for at in ends]


def test_legend_without_a_pointer(visit: Visit) -> None:
    """A legend has time and values only while its plot is pointed at; otherwise it has the names."""
    visit.page.evaluate(PLOTS, [slots_at(1010, 1020, 1030), None])
    legend = visit.page.locator("#shares .u-legend")
    values = legend.locator(".u-value").all()
    time_of_pointer, communication = legend.locator(".u-series").nth(0), legend.locator(".u-series").nth(1)
    assert [value.is_visible() for value in values] == [False] * 5
    assert not time_of_pointer.is_visible()
    expect(communication).to_be_visible()
    visit.page.locator("#shares .u-over").hover()
    expect(time_of_pointer).to_be_visible()
    expect(communication).to_have_text("communication22%")
    visit.page.mouse.move(0, 0)
    expect(time_of_pointer).not_to_be_visible()


def test_an_ended_job_has_its_own_time(visit: Visit) -> None:
    """The axis of an ended job goes from its begin to its end, and counts from its begin, as the text below does."""
    began = 1_700_000_003.0
    begin, end, marks = visit.page.evaluate(PLOTS, [slots_at(*(began + 10 * n - 3 for n in range(1, 13))), began])
    assert (begin, end) == (began, began + 117)
    assert marks[0] == "0:00"
    assert all(re.fullmatch(r"[01]:[0-5][05]", mark) for mark in marks), marks
    expect(visit.page.locator("#shares-said")).to_contain_text(f"Times are since the job began, at {clock(began)}.")
    visit.page.locator("#shares .u-over").hover()
    expect(visit.page.locator("#shares .u-series").first).to_have_text(re.compile(r"^Time[01]:\d\d$"))


def test_narrow_rank_table(visit: Visit) -> None:
    """In a window of 400 pixels the table of ranks shows exposed and waits without scrolling, also beside the longest state."""
    visit.page.set_viewport_size({"width": 400, "height": 900})
    late = {"incidents": [incident("1", "Late rank: rank 1", kind="straggler", ranks=[1])]}
    show_job(
        visit.page,
        ranks=[
            line(0, comm=0.4, exposed=0.3, wait=0.2, step=1234, step_s=0.12),
            line(1, comm=0.1, exposed=0.1, wait=0.1, verdict="straggler"),
        ],
        **late,
    )
    fits(visit, "#ranks", ("comm", "exposed", "waits"))


def fits(visit: Visit, table_: str, columns: Sequence[str]) -> None:
    """Assert that a table shows these columns without scrolling."""
    frame = visit.page.locator(f".scroll:has({table_})").bounding_box()
    assert frame is not None
    for name in columns:
        box = visit.page.locator(f"{table_} thead").get_by_role("columnheader", name=name).bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= frame["x"] + frame["width"], name


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
