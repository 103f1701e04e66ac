"""What people do on the live page, in Chromium: each interaction in a wide and a narrow window, each state light and dark, and from its address.

Both widths and both colours are shown in a wide window's test, too, one of each pair; the narrow window's test has the other two.
"""

from __future__ import annotations

import csv
import re
import time
from collections.abc import Iterator
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Page, expect

from tests.agent.web.test_live_page import drawn
from tests.chrome_trace import read
from tests.gpus import UUIDS, Script, build
from tests.helpers import RunningAgent, agent, clean_env, wait_for
from tests.live import HandMade, hear, number, table

if TYPE_CHECKING:
    from tests.browser import Chromium, Visit

WARNING = "Cuda failure 'out of memory'"
JOB = r"\?job=late"
#: Of a window's width the other one.
OTHER = {1280: 400, 400: 1280}


class Node(NamedTuple):
    """An agent, its job, and a minute of the job in Unix seconds, in whole slots."""

    agent: RunningAgent
    job: HandMade
    minute: tuple[int, int]

    @property
    def zoomed(self) -> str:
        """Parameters of that minute."""
        return f"&from={self.minute[0]}&to={self.minute[1]}"


#: What the all_reduces of the job carry.
BUCKET = "bucket 0: head.weight … body.bias (3 parameters)"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A job that has run for a hundred seconds. Rank 2 is late; rank 1 has a GPU that has had an error, and a warning of NCCL."""
    directory = tmp_path_factory.mktemp("interaction")
    script, log = Script(directory / "script.txt"), directory / "nccl.log"
    script.say("event 1 0 79")
    # On a busy machine the operation that a test begins gets old, and its incident would change the order of the ranks.
    settings = directory / "commwatch.toml"
    settings.write_text("".join(f"[kinds.{kind}]\nenabled = false\n" for kind in ("hang", "stalled", "waiting")))
    env = clean_env(LD_LIBRARY_PATH=str(build(directory).parent), FAKE_NVML=str(script.path))
    parts = {"parts": 1, "since": 0, "names": [BUCKET], "order": [[0, "all_reduce", 2_000_000, [0]]]}
    names = {"dtype": 0, "name": "float32"}, parts
    with HandMade(directory / "run", "late", 4, late=2, ago_s=120, names=names, slots=8192, host=gethostname()) as job:
        job.writers[1].name({"gpu": {"uuid": UUIDS[0].removeprefix("GPU-"), "bus_id": "", "index": 0}})
        job.writers[1].name({"nccl_log": str(log)})
        job.run(850)
        begin = int(time.time()) // 10 * 10 - 80
        with agent(directory / "run", "--config", str(settings), env=env) as running:
            job.read_by(running)
            log.write_text(f"{gethostname()}:{job.pid(1)}:900 [1] misc/x.cc:3 NCCL WARN {WARNING}\n")
            wait_for(lambda: running.get("/api/v1/nccl/messages?job=late"), "NCCL's warning")
            wait_for(lambda: gpu_of(running)["xids"], "the GPU's error")
            yield Node(running, job, (begin, begin + 60))


def gpu_of(running: RunningAgent) -> Any:
    """The GPU of rank 1."""
    (found,) = [each for each in running.get("/api/v1/gpus?job=late")["gpus"] if each["ranks"]] or [{"xids": []}]
    return found


@pytest.fixture(scope="module")
def tab(chromium: Chromium, node: Node) -> Iterator[Visit]:
    """A tab, for all tests here."""
    with chromium.visit(f"{node.agent.url}/?job=late") as visit:
        expect(visit.page.locator("#ranks tbody tr").first).to_contain_text("2running, straggler")
        yield visit


@pytest.fixture(params=[1280, pytest.param(400, marks=pytest.mark.long)])
def visit(tab: Visit, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """The tab in a window of this width; no test may leave an error on its console."""
    tab.resize(request.param, dark=False)
    yield tab
    tab.assert_clean()


def show(visit: Visit, node: Node, query: str = "") -> Page:
    """Open the page of the job, with further parameters of its address; rank 1 has just begun an operation."""
    node.job.go_on()
    node.job.hang(1, age_ms=200)
    node.job.read_by(node.agent)
    visit.page.goto(f"{node.agent.url}/?job=late{query}", wait_until="domcontentloaded")
    expect(visit.page.locator("#ranks tbody tr")).to_have_count(4)
    return visit.page


def look(visit: Visit, name: str) -> None:
    """The page is readable, light in this window and dark in the other; keep its pictures."""
    width = visit.width
    for window in ((OTHER[width], True), (width, False)):
        visit.resize(*window)
        visit.assert_readable()
        visit.picture(f"live-{name}-{visit.window}")


def column(visit: Visit, name: str, of: str) -> list[str]:
    """The cells of one column of a table."""
    return [row[of] for row in table(visit, name)]


def clock(at: float, form: str = "%H:%M:%S") -> str:
    """A Unix time as the page has it."""
    return time.strftime(form, time.localtime(at))


def drag(visit: Visit, plot: str, begin: float, end: float) -> None:
    """Drag over a part of a plot, in fractions of its width."""
    visit.page.locator(f"#{plot}").scroll_into_view_if_needed()
    box = visit.page.locator(f"#{plot} .u-over").bounding_box()
    assert box
    visit.page.mouse.move(box["x"] + begin * box["width"], box["y"] + 40)
    visit.page.mouse.down()
    visit.page.mouse.move(box["x"] + end * box["width"], box["y"] + 50, steps=4)
    visit.page.mouse.up()


# -- time range ---------------------------------------------------------------------------------


def test_buttons(visit: Visit, node: Node) -> None:
    """Each button shows the end of the job, by mouse and keyboard; the pressed one is marked, also after a reload."""
    page, buttons = show(visit, node), visit.page.get_by_role("group", name="Time range")
    expect(buttons.get_by_role("button", name="Live")).to_have_attribute("aria-pressed", "true")
    for name, last, text in (
        ("30 s", "30s", "The last 30 s of the job"),
        ("5 min", "5m", "The last 5 min of the job"),
        ("30 min", "30m", "The last 30 min of the job"),
        ("All", "all", ", a point for each 10 s."),
    ):
        buttons.get_by_role("button", name=name, exact=True).press("Enter")
        expect(page).to_have_url(re.compile(rf"{JOB}&last={last}$"))
        expect(page.locator("#range-said")).to_contain_text(text)
        expect(page.locator("#operations-title")).to_contain_text("Operations from")
    page.reload()
    expect(buttons.get_by_role("button", name="All")).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#range-said")).to_contain_text("are those of the present")
    expect(page.locator("#shares-said")).to_contain_text("Latest: communication 3")
    buttons.get_by_role("button", name="Live").click()
    expect(page).to_have_url(re.compile(rf"{JOB}$"))


def test_fields(visit: Visit, node: Node) -> None:
    """Times can be entered; a range that ends before it begins is refused in words."""
    page, form = show(visit, node), "%Y-%m-%dT%H:%M:%S"
    expect(page.locator("#range-said")).to_contain_text("Live.")
    page.get_by_role("textbox", name="From").fill(clock(node.minute[0], form))
    page.wait_for_url(re.compile("from="))
    page.get_by_role("textbox", name="To", exact=True).fill(clock(node.minute[1], form))
    expect(page).to_have_url(re.compile(f"from={node.minute[0]}&to={node.minute[1]}$"))
    page.get_by_role("textbox", name="From").fill(clock(node.minute[1] + 600, form))
    expect(page.locator("#range-said")).to_contain_text("must begin before it ends")


def test_zoom(visit: Visit, node: Node) -> None:
    """Dragging over a plot zooms both plots, the timeline and the operations; Back undoes it, Forward repeats it, and a double-click ends it."""
    page = show(visit, node)
    expect(page.locator("#busbw-said")).to_contain_text("all_gather 600 MB/s")
    drag(visit, "shares", 0.2, 0.5)
    page.wait_for_url(re.compile("from="))
    first, given = page.url, parse_qs(urlsplit(page.url).query)
    begin, end = int(given["from"][0]), int(given["to"][0])
    assert begin % 10 == end % 10 == 0
    (job,) = node.agent.get("/api/v1/jobs")
    assert end - begin == pytest.approx(0.3 * (time.time() - job["started_at"]), abs=30)  # outwards to whole slots
    zoomed(page, begin, end)
    # One each 120 ms; one more may end at an edge.
    assert all(re.fullmatch(r"8\.3\d/s", count) for count in column(visit, "operations", "count"))
    for canvas in ("#shares canvas", "#busbw canvas", "#timeline canvas"):
        assert drawn(visit, canvas) >= 2, canvas
    look(visit, "zoom")
    drag(visit, "busbw", 0.1, 0.6)
    page.wait_for_url(lambda url: url != first)
    page.go_back()
    expect(page).to_have_url(first)
    zoomed(page, begin, end)
    page.go_back()
    expect(page.locator("#operations-title")).to_have_text("Operations of the last minute")
    page.go_forward()
    zoomed(page, begin, end)
    page.locator("#busbw .u-over").dblclick()
    expect(page).to_have_url(re.compile(rf"{JOB}$"))
    expect(page.locator("#operations-title")).to_have_text("Operations of the last minute")
    expect(page.locator("#timeline-said")).not_to_contain_text("until")


def zoomed(page: Page, begin: int, end: int) -> None:
    """The page shows this range, in each of its parts that has one."""
    expect(page.locator("#range-said")).to_contain_text(f"{clock(begin)} to {clock(end)}, a point for each 10 s.")
    expect(page.locator("#timeline-said")).to_contain_text(f"until {clock(end)} of 4 ranks")
    expect(page.locator("#operations-title")).to_have_text(f"Operations from {clock(begin)} to {clock(end)}")
    expect(page.locator("#shares-said")).to_contain_text(f"Since {clock(begin)}. Latest: communication 3")


def test_downloads(visit: Visit, node: Node, tmp_path: Path) -> None:
    """Links download the operations of the range for Perfetto, as a table those that pass the filters, and the report as a page."""
    since, until = node.minute[0], node.minute[0] + 20
    page = show(visit, node, f"&from={since}&to={until}&rank=2&op=all_gather")
    expect(page.locator("#operations-title")).to_contain_text("Operations from")  # what comes later moves no link
    for link, name in (
        ("the latest operations of the range as CSV, filtered", "operations.csv"),
        ("the report on the job", "report.html"),
        ("the range for Perfetto", "trace.json.gz"),
    ):
        with page.expect_download() as download:
            page.get_by_role("link", name=link).click()
        download.value.save_as(tmp_path / name)
    with (tmp_path / "operations.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["rank"], row["op"]) for row in rows} == {("2", "all_gather")}
    assert all(since <= float(row["end_at"]) < until for row in rows)
    assert len(rows) == pytest.approx(20 / 0.12, abs=1)
    trace = read(tmp_path / "trace.json.gz")
    ends = [each.end_ns + trace.about["Unix time of 0, in ns"] for each in trace.of("operation")]
    assert len(ends) == pytest.approx(4 * 2 * 20 / 0.12, abs=8)
    assert all(since * 10**9 <= end_ns < until * 10**9 for end_ns in ends)
    assert "commwatch report: late" in (tmp_path / "report.html").read_text(encoding="utf-8")
    page.get_by_role("button", name="5 min").click()
    expect(page.locator("#get-timeline")).to_have_text("the last 5 min for Perfetto")
    assert "last=5m" in str(page.locator("#get-timeline").get_attribute("href"))


# -- filters and order --------------------------------------------------------------------------


def test_filters(visit: Visit, node: Node) -> None:
    """Filters by rank, group, operation and size apply to operations, timeline and operations in flight; the page says what they do not apply to."""
    page = show(visit, node)
    expect(page.get_by_role("combobox", name="Size").get_by_role("option")).to_have_text(["all", "≤ 4 MiB", "≤ 8 MiB"])
    expect(page.get_by_role("combobox", name="Rank").get_by_role("option")).to_have_text(["all", "0", "1", "2", "3"])
    expect(page.get_by_role("button", name="Clear the filter")).to_be_hidden()
    for name, value, other in (("Operation", "all_gather", "all_reduce"), ("Group", "tp", "dp")):
        page.get_by_role("combobox", name=name).select_option(value)
        expect(page.locator("#operations tbody tr")).to_have_count(1)
        expect(page.locator("#operations tbody tr")).to_contain_text(value)
        expect(page.locator("#flight tbody tr")).to_have_text("nothing that passes the filter")
        expect(page.locator("#shares-said")).to_contain_text("shares cannot be filtered.")
        expect(page.locator("#filter-said")).to_contain_text("Everything else covers all operations of all ranks.")
        if name == "Operation":
            expect(page.locator("#busbw-said")).to_have_text("Latest: all_gather 600 MB/s.")
            expect(page.locator("#timeline-legend")).not_to_contain_text(other)
        page.get_by_role("combobox", name=name).select_option("")
    page.get_by_role("combobox", name="Rank").select_option("2")
    expect(page.locator("#timeline-said")).to_contain_text("of 1 rank, in")
    expect(page.locator("#busbw-said")).to_contain_text("Of all ranks, groups and sizes")
    # It is late in dp, so that its operations are short: their busbw is that of the transfer.
    expect(page.locator("#operations tbody tr").first).to_contain_text("1.2 GB/s")
    page.get_by_role("combobox", name="Size").select_option(str(4 << 20))
    expect(page.locator("#operations tbody tr")).to_have_count(1)
    expect(page).to_have_url(re.compile(rf"{JOB}&rank=2&size={4 << 20}$"))
    look(visit, "filters")
    page.go_back()
    expect(page).to_have_url(re.compile(rf"{JOB}&rank=2$"))
    expect(page.locator("#operations tbody tr")).to_have_count(2)
    expect(page.get_by_role("combobox", name="Size")).to_have_value("")
    page.get_by_role("button", name="Clear the filter").click()
    expect(page).to_have_url(re.compile(rf"{JOB}$"))
    expect(page.get_by_role("combobox", name="Rank")).to_be_focused()
    expect(page.locator("#timeline-said")).to_contain_text("of 4 ranks")
    expect(page.locator("#flight tbody tr")).to_contain_text("all_reduce")


def test_sort(visit: Visit, node: Node) -> None:
    """A heading sorts by mouse and keyboard: largest first, smallest first, the page's own order; unknown values come last."""
    page = show(visit, node)
    assert column(visit, "ranks", "rank") == ["2", "0", "1", "3"]
    head = page.locator("#ranks").get_by_role("button", name="rank", exact=True)
    cell = head.locator("..")
    assert cell.get_attribute("aria-sort") is None
    for order, ranks in (("descending", ["3", "2", "1", "0"]), ("ascending", ["0", "1", "2", "3"])):
        head.click()
        expect(cell).to_have_attribute("aria-sort", order)
        assert column(visit, "ranks", "rank") == ranks
    head.press("Enter")
    expect(cell).not_to_have_attribute("aria-sort", re.compile("."))
    assert column(visit, "ranks", "rank") == ["2", "0", "1", "3"]
    expect(page.locator("#flight tbody tr")).to_contain_text("all_reduce")
    page.locator("#ranks").get_by_role("button", name="for", exact=True).press("Space")
    assert column(visit, "ranks", "rank")[0] == "1"
    assert column(visit, "ranks", "for")[1:] == ["–"] * 3
    expect(page.locator("#operations tbody tr")).to_have_count(2)
    page.locator("#operations").get_by_role("button", name="op", exact=True).click()
    assert column(visit, "operations", "op") == ["all_gather", "all_reduce"]
    look(visit, "sorted")


# -- one rank -----------------------------------------------------------------------------------


def test_rank(visit: Visit, node: Node) -> None:
    """A rank opens by mouse and keyboard with its steps, operations, waits, GPU, node and NCCL's messages; Close, Escape and Back close it."""
    page = show(visit, node)
    expect(page.locator("#rank")).to_be_hidden()
    page.get_by_role("link", name="Rank 1").click()
    expect(page).to_have_url(re.compile(rf"{JOB}&open=1$"))
    expect(page.get_by_role("heading", name="Rank 1")).to_be_focused()
    expect(page.locator("#rank-steps tbody tr")).to_have_count(20)
    gpu, facts = gpu_of(node.agent)["gpu"], page.locator("#rank-facts")
    for fact in (
        "Staterunning",
        f" on {gethostname()}",
        "cores",
        "available",
        "Xid 79, the GPU has fallen off the bus",
    ):
        expect(facts).to_contain_text(fact)
    measured = gpu["measured"]
    busy, warm = measured["utilization"], measured["temperature_celsius"]
    expect(facts).to_contain_text(f"GPU0: {busy * 100:.0f}% busy")
    expect(facts).to_contain_text(f"{warm:.0f} °C, {measured['power_watts']:.0f} W")
    expect(page.locator("#rank-flight tbody tr")).to_contain_text(f"all_reducedp{node.job.steps}7.63 MiB")
    expect(page.locator("#rank-messages li")).to_have_text(re.compile(rf"\d\d:\d\d:\d\d {re.escape(WARNING)}$"))
    # By now the agent may have stored later steps.
    told = {str(step["seq"]): step for step in node.agent.get("/api/v1/steps?job=late&rank=1&limit=100")}
    shown = table(visit, "rank-steps")
    latest = int(shown[0]["step"])
    assert column(visit, "rank-steps", "step") == [str(latest - n) for n in range(20)]
    for row in shown:
        assert number(row["time"]) == pytest.approx(told[row["step"]]["duration_s"], rel=0.006)
        assert number(row["comm"]) == pytest.approx(told[row["step"]]["comm_share"], abs=0.006)
    assert column(visit, "rank-operations", "op") == ["all_reduce", "all_gather"]
    look(visit, "rank")
    page.keyboard.press("Escape")
    expect(page.locator("#rank")).to_be_hidden()
    expect(page.get_by_role("link", name="Rank 1")).to_be_focused()
    page.get_by_role("link", name="Rank 2").press("Enter")
    expect(page.locator("#rank-messages-said")).to_have_text("None.")
    expect(page.locator("#rank-flight tbody tr")).to_have_text("nothing right now")
    expect(facts).to_contain_text("GPU–")
    assert {row["comm"] for row in table(visit, "rank-steps")} == {"13%"}
    page.locator("#rank-close").click()
    expect(page).to_have_url(re.compile(rf"{JOB}$"))
    page.go_back()
    expect(page.get_by_role("heading", name="Rank 2")).to_be_visible()


def test_rank_in_a_range(visit: Visit, node: Node) -> None:
    """In a time range a rank has the steps and operations of that time; the log's finding and the advice can be opened."""
    since, until = node.minute
    page = show(visit, node, f"{node.zoomed}&open=3")
    expect(page.locator("#rank-steps tbody tr")).to_have_count(20)
    window = f"job=late&rank=3&since={since}&until={until}"
    told = node.agent.get(f"/api/v1/steps?{window}&limit=20")
    assert column(visit, "rank-steps", "step") == [str(step["seq"]) for step in told]
    rows = node.agent.get(f"/api/v1/summary?{window}&by=group,op")["rows"]
    for row, shown in zip(rows, table(visit, "rank-operations"), strict=True):
        assert (shown["group"], shown["op"]) == (row["by"]["group"], row["by"]["op"])
        for cell, value in (("p50", row["p50_s"]), ("busbw", row["busbw"]), ("count", row["count"] / (until - since))):
            assert number(shown[cell]) == pytest.approx(value, rel=0.006), (cell, shown)
        for cell, took_s in (("time", row["seconds"]), ("waits", row["wait_s"])):
            assert number(shown[cell]) == pytest.approx(took_s / (until - since), abs=0.006), (cell, shown)
    for place in ("findings", "advice"):
        entry = page.locator(f"#{place} summary").first
        entry.press("Enter")
        expect(page.locator(f"#{place} details p").first).to_be_visible()
    expect(page.locator("#findings")).to_contain_text(WARNING)
    expect(page.locator("#findings")).to_contain_text("nccl.log:1: ")
    look(visit, "findings")


# -- address and keys ---------------------------------------------------------------------------


def test_address(visit: Visit, node: Node) -> None:
    """A fresh load of an address restores all of it: range, filters, order, the open rank and the pause."""
    since, until = node.minute
    told = node.agent.get(f"/api/v1/summary?job=late&by=group,op&group=dp&since={since}&until={until}")["rows"]
    order = "&sort-ranks=-rank&sort-operations=-busbw&sort-rank-steps=step"
    page = show(visit, node, f"{node.zoomed}&group=dp&open=3{order}")
    expect(page.locator("#operations-title")).to_have_text(f"Operations from {clock(since)} to {clock(until)}")
    assert [(row["group"], row["op"]) for row in table(visit, "operations")] == [
        (row["by"]["group"], row["by"]["op"]) for row in told
    ]
    assert column(visit, "ranks", "rank") == ["3", "2", "1", "0"]
    expect(page.get_by_role("combobox", name="Group")).to_have_value("dp")
    local = clock(since, "%Y-%m-%dT%H:%M:%S")
    assert page.get_by_role("textbox", name="From").input_value() in (local, local.removesuffix(":00"))
    expect(page.get_by_role("heading", name="Rank 3")).to_be_visible()
    expect(page.locator("#rank-steps tbody tr")).to_have_count(20)
    steps = list(map(int, column(visit, "rank-steps", "step")))
    assert steps == sorted(steps)
    page.get_by_role("button", name="Pause").click()
    expect(page).to_have_url(re.compile(rf"&open=3&paused=1{order}$"))
    page.reload()
    expect(page.get_by_role("button", name="Pause")).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_role("alert")).to_contain_text("Paused at")
    expect(page.locator("#operations-title")).to_contain_text("Operations from")
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(page).not_to_have_url(re.compile("paused"))


def test_keys(visit: Visit, node: Node) -> None:
    """? lists the keys, Escape closes the list; p pauses, l returns to the present, / goes to the filter; none of them acts in a field."""
    page = show(visit, node, "&last=5m")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    look(visit, "keys")
    page.keyboard.press("p")
    expect(page).not_to_have_url(re.compile("paused"))
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.keyboard.press("p")
    expect(page).to_have_url(re.compile("paused=1"))
    page.keyboard.press("p")
    page.keyboard.press("l")
    expect(page).to_have_url(re.compile(rf"{JOB}$"))
    page.keyboard.press("/")
    expect(page.locator("#filter-rank")).to_be_focused()
    page.keyboard.press("p")
    page.get_by_role("textbox", name="From").press("p")
    expect(page).not_to_have_url(re.compile("paused"))
    page.get_by_role("button", name="Keys").click()
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    expect(page.get_by_role("button", name="Keys")).to_be_focused()


# -- in one window, as the width and the colours do not matter ------------------------------------


def test_choices_stay(tab: Visit, node: Node) -> None:
    """Through updates the order, the range and a pause stay as they were chosen."""
    page = show(tab, node, f"{node.zoomed}&sort-ranks=rank")
    said = page.locator("#timeline-said")
    expect(said).to_contain_text(f"until {clock(node.minute[1])}")
    hear(tab, "timeline", 1)
    expect(said).to_contain_text(f"until {clock(node.minute[1])}")
    assert column(tab, "ranks", "rank") == ["0", "1", "2", "3"]
    page = show(tab, node, "&paused=1")
    expect(page.locator("#flight tbody tr")).to_contain_text("all_reduce")
    before = column(tab, "flight", "for")
    hear(tab, "moment", 1)
    assert column(tab, "flight", "for") == before
    page.locator("#ranks").get_by_role("button", name="rank", exact=True).click()
    assert column(tab, "ranks", "rank") == ["3", "2", "1", "0"]
    tab.assert_clean()


def test_what_an_operation_carries(tab: Visit, node: Node) -> None:
    """The timeline names the bucket that the operation at the pointer carries."""
    page = show(tab, node, node.zoomed)
    said = page.locator("#timeline-said")
    expect(said).to_contain_text("of 4 ranks")
    page.locator("#timeline").focus()
    for key in ["ArrowRight"] * 8:
        page.keyboard.press(key)
        if "all_reduce" in (said.text_content() or ""):
            break
    expect(said).to_contain_text(re.compile(rf"^all_reduce \d+ of dp, {re.escape(BUCKET)}, "))
    tab.assert_clean()


def test_long_answers_are_asked_for_seldom(tab: Visit, node: Node) -> None:
    """What takes the agent long is repeated less often: after 400 times the time of the answer, but at least every 5 min."""
    page = show(tab, node)
    found = page.evaluate(
        """async () => {
          const { pause } = await import("/static/ask.js");
          return [0, 0.01, 0.1, 0.5, 9].map((took) => pause(20, took));
        }"""
    )
    assert found == [20, 20, 40, 200, 300]


def test_what_does_not_exist(tab: Visit, node: Node) -> None:
    """A filter that nothing passes, an unknown rank and a time before the job have no figures; values that are not valid are ignored."""
    page = show(tab, node, "&group=no%20such&rank=x&size=-1&open=77&sort-ranks=-nothing&sort-flight=%3Cb%3E&unknown=1")
    expect(page.get_by_role("combobox", name="Group")).to_have_value("no such")
    expect(page.get_by_role("combobox", name="Rank")).to_have_value("")
    expect(page.locator("#operations tbody tr")).to_have_text("no operation passes the filter")
    expect(page.locator("#flight tbody tr")).to_have_text("nothing that passes the filter")
    expect(page.locator("#rank-said")).to_have_text("The agent does not know this rank.")
    expect(page.locator("#rank-steps tbody tr")).to_have_text("no step has ended in the time range")
    assert column(tab, "ranks", "rank") == ["2", "0", "1", "3"]
    tab.assert_readable()
    page = show(tab, node, "&from=1000000000&to=1000000100")
    expect(page.locator("#shares-said")).to_have_text("No share is known in this range.")
    expect(page.locator("#busbw-said")).to_have_text("No operation whose bandwidth is known in this range.")
    expect(page.locator("#timeline-said")).to_have_text("No operation of this time is stored.")
    expect(page.locator("#operations tbody tr")).to_have_text("no operation has ended in this range")
    tab.assert_readable()
    for query in ("&from=5&last=x", "&from=9&to=3", "&from=a&to=b"):
        page = show(tab, node, query)
        expect(page.locator("#range-said")).to_contain_text("Live.")
    tab.assert_clean()


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


def test_ended_job(tab: Visit, node: Node) -> None:
    """The last five minutes of a job that has ended are those before its end."""
    page = show(tab, node, "&last=5m")
    node.job.end()
    expect(page.locator("#about")).to_contain_text("ended")
    expect(page.locator("#range-said")).to_contain_text(", a point for each 10 s.")
    expect(page.locator("#operations tbody tr")).to_have_count(2)
    expect(page.locator("#timeline-said")).to_contain_text("of 4 ranks")
    tab.assert_readable()
