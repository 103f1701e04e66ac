"""The live page in Chromium over a real agent: what it shows of jobs whose records are written by hand."""

from __future__ import annotations

import csv
import gzip
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Dialog, expect

from commwatch.wire import events as ev
from tests.agent.report.test_svg import HOSTILE
from tests.agent.test_nccl_operations import RING_SIMPLE_4, TREE_LL_1
from tests.helpers import MS, RunningAgent, agent, end_rank, operation, wait_for
from tests.live import HandMade, going_on, hear, number, table

if TYPE_CHECKING:
    from tests.browser import Chromium, Visit

#: Windows and whether they are dark: both widths and both colours, and the other pairs of them.
WINDOWS = pytest.mark.parametrize(
    "windows",
    [
        pytest.param([(1280, False), (400, True)], id="both"),
        pytest.param([(1280, True), (400, False)], id="others", marks=pytest.mark.long),
    ],
)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent for the jobs of all tests here, each selected by its name."""
    with agent(tmp_path_factory.mktemp("live") / "run") as running:
        yield running


def page_of(running: RunningAgent, job: str) -> str:
    """Where a job is shown."""
    return f"{running.url}/?job={quote(job)}"


def drawn(visit: Visit, canvas: str) -> int:
    """How many colours a canvas has that are no shade of grey."""
    return int(
        visit.page.locator(canvas).first.evaluate(
            """canvas => { const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
              const colours = new Set();
              for (let i = 0; i < data.length; i += 4) {
                const [r, g, b, a] = data.slice(i, i + 4);
                if (a > 128 && Math.max(r, g, b) - Math.min(r, g, b) > 60) colours.add(`${r} ${g} ${b}`);
              }
              return colours.size }"""
        )
    )


def test_empty_agent_then_a_job(chromium: Chromium, node: RunningAgent) -> None:
    """An agent without a job shows that and how to start one; a job that begins appears by itself."""
    with chromium.visit(node.url, width=400) as visit:
        expect(visit.page.get_by_role("heading", name="No job here yet")).to_be_visible()
        expect(visit.page.locator("#about")).to_have_text(re.compile(r"Agent \d.* on "))
        expect(visit.page.locator("#choice")).to_be_hidden()
        visit.assert_readable()
        visit.picture("live-empty-400")
        with HandMade(node.directory, "first") as job:
            job.run(20)
            expect(visit.page.locator("#about")).to_contain_text("first, running, since 20")
            expect(visit.page.get_by_role("heading", name="No job here yet")).to_be_hidden()
            expect(visit.page.locator("#wrong")).to_have_text("Nothing found.")
            expect(visit.page).to_have_title("first · commwatch")
            job.end()


@WINDOWS
def test_straggler(chromium: Chromium, node: RunningAgent, windows: list[tuple[int, bool]]) -> None:
    """A late rank is named and comes first among the ranks, the share is beyond the line, and everything is drawn."""
    with HandMade(node.directory, f"late {windows}", 4, late=2, ago_s=30) as job:
        job.run(200)
        with going_on(job), chromium.visit(page_of(node, job.job)) as visit:
            for window in windows:
                visit.resize(*window)
                _shows_straggler(visit)
                visit.assert_readable()
                visit.picture(f"live-straggler-{visit.window}")


@WINDOWS
def test_choices_of_nccl(chromium: Chromium, node: RunningAgent, windows: list[tuple[int, bool]]) -> None:
    """What NCCL chose is shown only where its plugin reports it, and a choice with a remark is marked."""
    name = f"chosen {windows}"
    with HandMade(node.directory, name) as job, chromium.visit(page_of(node, name)) as visit:
        job.run(20)
        expect(visit.page.locator("#operations tbody tr")).to_have_count(2)
        expect(visit.page.locator("#chosen-section")).to_be_hidden()
        now_ns = time.monotonic_ns()
        for n, (choice, size) in enumerate(((RING_SIMPLE_4, 1 << 20), (TREE_LL_1, 64 << 20))):
            ends_ns = now_ns + (n + 1) * MS
            fields = operation(
                launch_ns=ends_ns - 3 * MS,
                start_ns=ends_ns - 2 * MS,
                end_ns=ends_ns,
                seq=20 + n,
                size=size,
                tag=300 << ev.CHANNEL_BITS | 2 if n == 0 else 0,
                timing=ev.BY_NCCL,
            )
            job.writers[0].write(*fields[:-1], choice)
        expect(visit.page.locator("#chosen tbody tr")).to_have_count(2)
        expect(visit.page.locator("#chosen tbody tr.warn")).to_have_count(1)
        large, small = sorted(table(visit, "chosen"), key=lambda row: row["protocol"])
        for window in windows:
            visit.resize(*window)
            visit.assert_readable()
            visit.picture(f"live-chosen-{visit.window}")
    assert list(large.values()) == [
        "dp", "all_reduce", "64 MiB", "Tree", "LL", "1", "1", "2 ms", "1 ms", "33.6 GB/s", "–",
    ]  # fmt: skip
    assert (small["size"], small["algorithm"], small["protocol"], small["channels"]) == ("1 MiB", "Ring", "Simple", "4")
    assert small["last channel"] == "1 (100%, +300 µs)"


def _shows_straggler(visit: Visit) -> None:
    expect(visit.page.locator("#wrong li.warn")).to_contain_text("Late rank: rank 2 rank 2 is late by 40 ms a step")
    expect(visit.page.locator("#ranks tbody tr").first).to_have_class("warn")
    expect(visit.page.locator("#ranks tbody tr").first).to_contain_text("2running, straggler")
    # Three ranks communicate for 55 ms of 120, the late one for 15; exposed are 30, and no more than it communicates.
    meter = visit.page.get_by_role("meter", name="Communication share")
    expect(meter).to_have_attribute("aria-valuenow", re.compile("37|38"))
    expect(meter).to_have_attribute("aria-valuetext", re.compile("3[78]% of the step; the line is at 30%"))
    expect(visit.page.locator("#comm")).to_have_class("number bad")
    expect(visit.page.locator("#exposed")).to_have_text("22%")
    expect(visit.page.locator("#step")).to_have_text("120 ms")
    filled, line, whole = (
        visit.page.locator(part).bounding_box() for part in ("#comm-meter span", "#comm-meter i", "#comm-meter")
    )
    assert filled
    assert line
    assert whole
    assert filled["width"] == pytest.approx(0.375 * whole["width"], abs=2)
    assert line["x"] - whole["x"] == pytest.approx(0.3 * whole["width"], abs=2)
    expect(visit.page.locator("#shares-said")).to_contain_text(re.compile("Latest: communication 3[78]%, exposed 22%"))
    expect(visit.page.locator("#busbw-said")).to_contain_text("all_gather 600 MB/s")
    expect(visit.page.locator("#timeline-legend")).to_contain_text("waiting for the last rank")
    expect(visit.page.locator("#operations tbody tr")).to_have_count(2)
    for canvas in ("#shares canvas", "#busbw canvas", "#timeline canvas"):
        assert drawn(visit, canvas) >= 2, canvas


def test_timeline_is_told(chromium: Chromium, node: RunningAgent) -> None:
    """By mouse and by arrow keys: who entered first and last, and who waited how long; meanwhile the picture does not move."""
    told = (
        "all_reduce 19 of dp, 7.63 MiB: rank 0 entered first, rank 2 last, 40 ms later. "
        "Rank 0 waited 40 ms of its 50 ms; the transfer took 10 ms."
    )
    with HandMade(node.directory, "told", 4, late=2) as job, chromium.visit(page_of(node, "told")) as visit:
        job.run(20)
        said, place = visit.page.locator("#timeline-said"), visit.page.locator("#timeline")
        # All of them: until the timeline has the focus, it shows what the agent has read so far.
        expect(said).to_contain_text(re.compile(r"^The latest 160 operations of 4 ranks, in \d.* s, 0 not ended"))
        place.focus()
        for key, text in (
            ("ArrowLeft", told),
            ("ArrowLeft", "all_gather 19 of tp, 3.81 MiB: 4 ranks entered at once. Rank 0 waited 0 s of its 5 ms"),
            ("ArrowRight", told),
            ("ArrowRight", told),  # there is no later one
        ):
            place.press(key)
            expect(said).to_contain_text(text)
        assert said.get_attribute("aria-live") == "polite"
        job.run(5)
        hear(visit, "timeline")
        expect(visit.page.locator("#ranks tbody tr").first).to_contain_text("25120 ms")  # 25 steps, of 120 ms each
        expect(said).to_have_text(told)
        place.press("Escape")
        expect(said).to_contain_text("The latest")
        box = place.bounding_box()
        assert box
        rows = box["y"] + 12, box["y"] + 33  # of the two groups of rank 0
        found = []
        for y in rows:
            visit.page.mouse.move(box["x"] + box["width"] - 4, y)
            found.append(said.text_content())
        assert [text for text in found if text and text.startswith("all_reduce")] == [told.replace("19", "24")]
        visit.page.mouse.move(0, 0)
        expect(said).to_contain_text("The latest")


def test_downloads(chromium: Chromium, node: RunningAgent, tmp_path: Path) -> None:
    """The links below the timeline give a trace and a table with the job's operations."""
    with HandMade(node.directory, "a job & more", ago_s=30) as job:
        job.run(20)
        job.read_by(node)
        with chromium.visit(page_of(node, "a job & more")) as visit:
            for link, name in (
                ("the last 30 s for Perfetto", "trace.json.gz"),
                ("the latest operations as CSV", "operations.csv"),
            ):
                with visit.page.expect_download() as download:
                    visit.page.get_by_role("link", name=link).click()
                download.value.save_as(tmp_path / name)
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert {event["name"] for event in trace["traceEvents"] if event.get("ph") == "X"} >= {"all_reduce", "all_gather"}
    with (tmp_path / "operations.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 20  # two operations a step and rank
    assert {row["job_id"] for row in rows} == {"a job & more"}


def test_tables_say_what_the_api_says(chromium: Chromium, node: RunningAgent) -> None:
    """Each cell has the value of the REST API, within rounding."""
    with HandMade(node.directory, "api", 3, late=1) as job:
        job.run(100)
        job.hang(0, age_ms=3000)
        job.read_by(node)
        with chromium.visit(page_of(node, "api")) as visit:
            _says_what_the_api_says(visit, node)


def _says_what_the_api_says(visit: Visit, node: RunningAgent) -> None:
    expect(visit.page.locator("#operations tbody tr")).to_have_count(2)
    expect(visit.page.locator("#flight tbody tr")).to_contain_text("all_reduce")
    rows = node.get("/api/v1/summary?job=api&by=group,op")["rows"]
    for row, shown in zip(rows, table(visit, "operations"), strict=True):
        assert (shown["group"], shown["op"], shown["group size"]) == (row["by"]["group"], row["by"]["op"], "3")
        for cell, value in (("p50", "p50_s"), ("p99", "p99_s"), ("algbw", "algbw"), ("busbw", "busbw")):
            assert number(shown[cell]) == pytest.approx(row[value], rel=0.006), (cell, shown)
        waited = row["wait_s"] / row["seconds"]
        assert number(shown["waits"]) == pytest.approx(waited * number(shown["time"]), abs=0.01)
    ranks = {str(rank["rank"]): rank for rank in node.get("/api/v1/ranks?job=api")}
    steps: dict[str, list[dict[str, Any]]] = {}
    for step in node.get("/api/v1/steps?job=api"):
        steps.setdefault(str(step["rank"]), []).append(step)
    for shown in table(visit, "ranks"):
        of_rank, rank = steps[shown["rank"]], ranks[shown["rank"]]
        assert shown["step"] == str(max(step["seq"] for step in of_rank))
        assert number(shown["step time"]) == pytest.approx(of_rank[0]["duration_s"], rel=0.006)
        assert number(shown["comm"]) == pytest.approx(of_rank[0]["comm_share"], abs=0.006)
        assert number(shown["exposed"]) == pytest.approx(of_rank[0]["exposed_share"], abs=0.006)
        assert (shown["host"], shown["state"].split(",")[0]) == (rank["host"], rank["state"])
        assert (shown["in flight"] == "–") == (not rank["in_flight"])
    (flight,) = table(visit, "flight")
    (stands,) = ranks["0"]["in_flight"]
    assert (flight["op"], flight["group"], int(flight["number"])) == (stands["op"], stands["group"], stands["seq"])
    assert number(flight["usually"]) == pytest.approx(stands["usual_s"], rel=0.006)


def test_hang(chromium: Chromium, node: RunningAgent) -> None:
    """A rank that has died is named and comes first among the ranks; the page shows who waits for it, and for how long."""
    with HandMade(node.directory, "hang", 4) as job, chromium.visit(page_of(node, "hang"), dark=True) as visit:
        job.run(60, time.monotonic_ns() - 15 * 10**9)
        job.hang(0, 1, 3, age_ms=14_900)
        end_rank(job.writers[2])
        wrong = visit.page.locator("#wrong li.warn")
        expect(wrong).to_contain_text(
            "Hang: rank 2 rank 2 died (no clean end) (ranks 0-1, 3 in all_reduce 60 of group dp"
        )
        expect(visit.page).to_have_title("! hang · commwatch")
        expect(visit.page.locator("#figures-said")).to_have_text(
            re.compile(r"^No step for 1\d\.\d s: communication, exposed and step are of \d\d:\d\d:\d\d\.$")
        )
        expect(visit.page.locator("#about")).to_contain_text("No step for ")
        for tile in ("#comm", "#exposed", "#step"):
            expect(visit.page.locator(tile)).to_have_class("number quiet")
        expect(visit.page.locator("#pace")).to_have_text(re.compile(r"^of .*, at step 60$"))
        expect(visit.page.locator("#ranks tbody tr").first).to_contain_text("2died, hang")
        expect(visit.page.locator("#ranks-say")).to_have_text("3 running, 1 died")
        expect(visit.page.locator("#flight tbody tr")).to_have_count(3)
        expect(visit.page.locator("#flight tr.bad")).to_have_count(3)
        age = number(table(visit, "flight")[0]["for"])
        assert age >= 14.9
        wait_for(lambda: number(table(visit, "flight")[0]["for"]) > age + 1, "the age to grow")
        expect(visit.page.locator("#timeline-said")).to_contain_text("3 not ended")
        visit.page.locator("#timeline").press("ArrowLeft")
        expect(visit.page.locator("#timeline-said")).to_contain_text(
            re.compile(
                r"all_reduce 60 of dp: rank \d entered first, rank \d last, .* later. Not ended on 3 ranks, for \d\d\.\d s\."
            )
        )
        visit.page.locator("#timeline").press("Escape")
        for width, dark in ((1280, True), (400, False)):
            visit.resize(width, dark)
            visit.assert_readable()
            visit.picture(f"live-hang-{width}")


def test_many_ranks(chromium: Chromium, node: RunningAgent) -> None:
    """Of 64 ranks the late one comes first, all can be read on a telephone, and the page answers at once."""
    with HandMade(node.directory, "wide", 64, late=47, slots=256, ago_s=20) as job:
        job.run(70)
        with chromium.visit(page_of(node, "wide")) as visit:
            expect(visit.page.locator("#wrong li.warn")).to_contain_text("Late rank: rank 47")
            expect(visit.page.locator("#ranks tbody tr").first).to_contain_text("47running, straggler")
            expect(visit.page.locator("#ranks tbody tr")).to_have_count(64)
            expect(visit.page.locator("#ranks-here")).to_have_text("64 of 64")
            expect(visit.page.locator("#timeline-said")).to_contain_text("of 64 ranks")
            visit.page.evaluate(
                """() => { window.longest = 0; new PerformanceObserver((seen) => {
                   for (const task of seen.getEntries()) window.longest = Math.max(window.longest, task.duration);
                }).observe({ type: "longtask" }) }"""
            )
            for width, dark in ((1280, False), (400, True)):
                visit.resize(width, dark)
                hear(visit, "timeline", 1)
                assert visit.page.evaluate("window.longest") < 1000  # an update a second leaves room for its reader
                region = visit.page.get_by_role("group", name="Ranks")
                wide = region.evaluate("region => region.scrollWidth > region.clientWidth")
                assert wide == (width == 400)
                visit.assert_readable()
                visit.picture(f"live-64-{width}")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("<img src=x onerror=alert(1)>?&#/%", id="image", marks=pytest.mark.long),
        pytest.param(HOSTILE.encode(errors="ignore").decode(), id="script"),
        pytest.param("\u202egnp.exe\u2066\nnext \"line\" & 'more' \U0001f600", id="turned", marks=pytest.mark.long),
        pytest.param("a_name_that_does_not_end" * 12, id="long"),
    ],
)
def test_hostile_names(chromium: Chromium, node: RunningAgent, name: str) -> None:
    """Whatever jobs, groups, hosts and operations are called is text, and does nothing; such a job can be chosen, too."""
    with HandMade(node.directory, f"beside {len(name)}"):
        _is_text(chromium, node, name)


def _is_text(chromium: Chromium, node: RunningAgent, name: str) -> None:
    odd = ({"op": 32, "name": f"c10d::{name}"},)
    with HandMade(
        node.directory, name[:300], group=(name, f"<script>alert('{name}')</script>"), names=odd, host=name[:200]
    ) as job:
        job.run(10)
        now_ns = time.monotonic_ns()
        job.writers[0].write(32, 0, 1, -1, 0, 64, now_ns - 5000, 99, 0, now_ns - 5000, now_ns - 10, 0, ev.BY_FUTURE, 0)
        job.hang(0, age_ms=100)
        job.written += 1
        job.read_by(node)
        with chromium.visit(node.url) as visit:
            dialogs: list[str] = []

            def opened(dialog: Dialog) -> None:
                dialogs.append(dialog.message)
                dialog.dismiss()

            visit.page.on("dialog", opened)
            visit.page.get_by_label("Job").select_option(value=name[:300])
            visit.page.wait_for_url(re.compile(r"\?job="))
            expect(visit.page.locator("#operations tbody tr")).to_have_count(3)
            expect(visit.page.locator("#flight tbody tr")).to_contain_text("all_reduce")
            assert visit.page.get_by_label("Job").input_value() == name[:300]
            expect(visit.page.locator("#about")).to_contain_text(", running, since")
            expect(visit.page.locator("#timeline-said")).to_contain_text("The latest")
            visit.page.locator("#timeline").press("ArrowLeft")
            expect(visit.page.locator("#timeline-said")).to_contain_text(" of ")
            for width in (1280, 400):
                visit.page.set_viewport_size({"width": width, "height": 900})
                visit.assert_readable()
                visit.picture(f"live-hostile-{len(name)}-{width}")
            assert visit.page.locator("main img, main script, body > script").count() == 0
            assert not set("\x1b\u202e\u2066") & set(visit.page.locator("body").inner_text())
            assert dialogs == []
        job.end()


def test_what_is_not_known_is_not_zero(chromium: Chromium, node: RunningAgent) -> None:
    """A job without steps, and one without times, have dashes and words where there is no number."""
    with HandMade(node.directory, "stepless") as stepless, HandMade(node.directory, "untimed") as untimed:
        stepless.run(30, marks=False)
        untimed.run(30, flags=ev.UNTIMED, exposed_ms=None)
        stepless.read_by(node)
        untimed.read_by(node)
        with chromium.visit(page_of(node, "stepless")) as visit:
            _without_steps(visit)
            visit.page.goto(page_of(node, "untimed"), wait_until="domcontentloaded")
            _without_times(visit)


def _without_steps(visit: Visit) -> None:
    expect(visit.page.locator("#operations tbody tr")).to_have_count(2)
    for tile in ("#comm", "#exposed", "#step"):
        expect(visit.page.locator(tile)).to_have_text("–")
    expect(visit.page.get_by_role("meter")).to_be_hidden()
    expect(visit.page.locator("#comm-says")).to_have_text("no steps lately")
    expect(visit.page.locator("#shares-said")).to_have_text("No share is known yet.")
    assert {
        row[column]
        for row in table(visit, "ranks")
        for column in ("step", "step time", "comm", "exposed", "GPU", "for")
    } == {"–"}
    visit.assert_readable()
    visit.picture("live-stepless-1280")


def _without_times(visit: Visit) -> None:
    expect(visit.page.locator("#operations tbody tr")).to_have_count(2)
    expect(visit.page.locator("#step")).to_have_text("120 ms")
    expect(visit.page.locator("#exposed")).to_have_text("–")
    expect(visit.page.locator("#timeline-said")).to_have_text("No operation whose time is known yet.")
    expect(visit.page.locator("#busbw-said")).to_have_text("No operation whose bandwidth is known yet.")
    for row in table(visit, "operations"):
        assert [row[cell] for cell in ("p50", "p99", "algbw", "busbw", "time", "waits")] == ["–"] * 6, row
    expect(visit.page.locator("#comm")).to_have_text("–")
    expect(visit.page.locator("#comm-says")).to_have_text("operations have no times (COMMWATCH_TIMING)")
    expect(visit.page.locator("#shares-said")).to_have_text("No share is known yet.")
    visit.assert_readable()
    visit.picture("live-untimed-1280")


def test_the_job_ends(chromium: Chromium, node: RunningAgent) -> None:
    """A job that has ended is shown as ended, with its latest numbers."""
    with HandMade(node.directory, "ends") as job, chromium.visit(page_of(node, "ends")) as visit:
        job.run(30)
        expect(visit.page.locator("#about")).to_contain_text("ends, running")
        job.end()
        expect(visit.page.locator("#about")).to_have_text(re.compile(r"^ends, ended.*, began 20"))
        expect(visit.page.locator("#ranks-say")).to_have_text("2 ended")
        expect(visit.page.get_by_role("heading", name="The last steps")).to_be_visible()
        expect(visit.page.locator("#happened-section")).to_contain_text("Nothing was found.")
        expect(visit.page.get_by_role("option", name="ends (ended)")).to_be_attached()
        assert {row["state"] for row in table(visit, "ranks")} == {"ended"}
        visit.assert_readable()
        visit.picture("live-ended-1280")
