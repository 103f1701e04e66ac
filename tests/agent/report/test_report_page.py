"""The report of a finished job as people open it: from disk, in Chromium, wide and narrow, in the dark and in the light."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from commwatch.wire import events as ev
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.model.nccl_views import NcclOperations
from commwatch_agent.model.views import WaitView
from commwatch_agent.report import charts, html_frame, report, report_page
from commwatch_agent.report.recorded_steps import known_steps, study_of
from commwatch_agent.report.svg import STYLE
from tests.agent.commands.test_top import row
from tests.agent.report.test_svg import HOSTILE
from tests.helpers import MS, Watch, group_entry, mark, operation, write_ring

if TYPE_CHECKING:
    from tests.browser import Chromium

MIB = 1 << 20
#: Operations of a step: when they are launched, in which group, what, of how many bytes, and for how long they run.
STEP = (
    (100, 1, "all_gather", 24 * MIB, 9),
    (220, 1, "all_gather", 96 * MIB, 31),
    (340, 1, "all_gather", 24 * MIB, 10),
    (450, 1, "reduce_scatter", 96 * MIB, 33),
    (560, 0, "all_reduce", 8 * MIB, 5),
    (600, 0, "all_reduce", 64 * MIB, 36),
    (680, 0, "all_reduce", 256 * MIB, 130),
    (830, 0, "barrier", 0, 1),
)
#: The first operation in which all take part.
FIRST_OF_ALL = 4
LATE_MS, PERIOD_MS = 220, 900


def step_of(rank: int, ranks: int, n: int, begin_ms: int, slow_ms: int) -> Iterator[tuple[int, ...]]:
    """The operations of one step of one rank; the last rank but two comes ``slow_ms`` late, its half waits for it, the others for them."""
    late, mates = rank == ranks - 3, rank >= ranks // 2
    for k, (at_ms, group, op, size, takes_ms) in enumerate(STEP):
        behind_ms = slow_ms if late or (mates and k > 0) or k > FIRST_OF_ALL else 0
        began_ms = at_ms + behind_ms + (3 * rank + 5 * n + k) % 4
        ended_ms = at_ms + 4 + (slow_ms if mates or group == 0 else 0) + takes_ms * (30 + (13 * n + 7 * k) % 10) // 30
        begin_ns, end_ns = ((begin_ms + ms) * MS for ms in (began_ms, ended_ms))
        flags, seq = 0 if size else ev.NO_SIZE, n * len(STEP) + k
        yield operation(op, start_ns=begin_ns, end_ns=end_ns, seq=seq, size=size, group=group, flags=flags)


def job_of(
    directory: Path, ranks: int, steps: int, late: range, names: tuple[str, str] = ("dp", "tp"), **who: Any
) -> QueryService:
    """The history of a job of two tensor-parallel halves, in which one rank is late in the steps ``late``."""
    begins_ms = list(accumulate((PERIOD_MS + 7 * n % 23 + LATE_MS * (n in late) for n in range(steps)), initial=0))
    watch, half = Watch(directory), ranks // 2
    writers = []
    for rank in range(ranks):
        mine = range(half) if rank < half else range(half, ranks)
        groups = [
            group_entry(0, tuple(range(ranks)), names[0], group_id="all", backend="nccl"),
            group_entry(1, tuple(mine), names[1], group_id=f"half-{mine[0]}", backend="nccl"),
        ]
        writers.append(write_ring(watch.rings, [], groups, rank=rank, world_size=ranks, **who))
    # As it went: what is joined is counted when its last rank is read.
    for first in range(0, steps, 2):
        for rank, writer in enumerate(writers):
            for n in range(first, min(first + 2, steps)):
                slow_ms = LATE_MS * (n in late)
                for fields in step_of(rank, ranks, n, begins_ms[n], slow_ms):
                    writer.write(*fields)
                writer.write(*mark(n, begins_ms[n + 1] * MS, exposed_ns=(110 + n % 7 * 10 + slow_ms) * MS))
        watch.tick(begins_ms[min(first + 2, steps)] * MS)
    for writer in writers:
        writer.close(1)
        writer.release()
    watch.tick((begins_ms[-1] + 20_000) * MS)
    return QueryService(watch.path)


def choices(group: str = "dp") -> list[NcclOperations]:
    """What NCCL chose in such a job."""
    about: dict[str, Any] = {
        "job_id": "job",
        "group_id": "all",
        "group": group,
        "ranks": [0, 1],
        "bytes": 1 << 30,
        "queued_s": 0.0004,
    }
    return [
        NcclOperations(
            **about, op="all_reduce", size_log2=26, algorithm="Tree", protocol="LL", channels=2, count=400, mean_s=0.036,
            busbw=3.2e9, last_channel=1, last_share=0.55, apart_s=2e-5, remark="slow",
        ),
        NcclOperations(
            **about, op="all_gather", size_log2=-1, algorithm=None, protocol=None, channels=None, count=7, mean_s=0.001,
            busbw=None, last_channel=None, last_share=None, apart_s=None, remark="",
        ),
    ]  # fmt: skip


def written(agent: QueryService, to: Path, job: str, **otherwise: Any) -> str:
    """The address of the page of a job's report."""
    built = report.build(agent, job, Path("/var/lib/commwatch/history-node1.sqlite"), f"commwatch report {job}")
    assert built is not None
    groups = [str(row.by["group"]) for row in built.operations]
    material = replace(charts.gather(agent, job), choices=choices(groups[0]) if groups else [])
    study = study_of(job, known_steps(agent.path, built.job, None), built.core_wait_share)
    to.write_text(report_page.html(replace(built, **otherwise), material, study=study), encoding="utf-8")
    return to.as_uri()


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of eight ranks over six minutes; in the third rank 5 is late."""
    directory = tmp_path_factory.mktemp("usual")
    agent = job_of(directory, 8, 400, range(130, 200), job="pretrain-8b", host="node1", hook="native")
    return written(agent, directory / "report.html", "pretrain-8b")


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        pytest.param(1280, False, id="wide-light"),
        pytest.param(400, True, id="narrow-dark"),
        pytest.param(1280, True, id="wide-dark", marks=pytest.mark.long),
        pytest.param(400, False, id="narrow-light", marks=pytest.mark.long),
    ],
)
def test_readable(chromium: Chromium, usual: str, width: int, dark: bool) -> None:
    """Everything can be read, its tables open or not; every plot lies within the window, and is as large as a plot has to be."""
    with chromium.visit(usual, width=width, dark=dark) as visit:
        visit.picture(f"report-{width}-{'dark' if dark else 'light'}")
        visit.assert_readable()
        boxes = [plot.bounding_box() for plot in visit.page.get_by_role("img").all()]
        assert len(boxes) == 6
        for box in boxes:
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width
            assert box["width"] >= 300
            assert box["height"] >= 50
        for numbers in visit.page.get_by_text("the numbers").all():
            numbers.click()
        visit.assert_readable()
    assert visit.requests == [usual]


def test_choices(chromium: Chromium, usual: str) -> None:
    """The report has a table of what NCCL chose, with NCCL's own times; an unknown value is a dash."""
    with chromium.visit(usual) as visit:
        title = visit.page.get_by_role("heading", name="What NCCL chose")
        expect(title).to_be_visible()
        rows = visit.page.locator("h2:text('What NCCL chose') + div tbody tr")
        assert [row.locator("td").all_inner_texts() for row in rows.all()] == [
            ["dp", "all_reduce", "64 MiB", "Tree", "LL", "2", "400", "36 ms", "400 µs", "3.2 GB/s", "1 (55%, +20 µs)"],
            ["dp", "all_gather", "–", "–", "–", "–", "7", "1 ms", "400 µs", "–", "–"],
        ]
        expect(visit.page.get_by_text("Mean time in the queue by group: dp 400 µs.")).to_be_visible()


def test_who_is_late_is_seen(chromium: Chromium, usual: str) -> None:
    """The matrix of ranks and time shows by colour, and in its text, which rank the others wait for, and when."""
    with chromium.visit(usual) as visit:
        matrix = visit.page.get_by_role("img", name="Waiting by rank and time")
        opacity = "cells => cells.map(cell => [cell.textContent.split(':')[0].split(', '), getComputedStyle(cell).fillOpacity])"
        strong = {
            (rank, at) for (rank, at), strength in matrix.locator("rect").evaluate_all(opacity) if float(strength) > 0.4
        }
    assert {rank for rank, _ in strong} == {f"rank {rank}" for rank in (0, 1, 2, 3, 4, 6, 7)}


def test_many_ranks(chromium: Chromium, tmp_path: Path) -> None:
    """On a telephone, too, each row of a node with 64 ranks can be distinguished from its neighbours."""
    waits = [row({"rank": rank, "group": group}, wait_s=rank % 9) for rank in range(64) for group in ("dp", "tp", "pp")]
    at = [WaitView(rank, 10 * i, 10, abs(rank - i)) for rank in range(64) for i in range(30)]
    body = charts.figures(charts.Material([], [], waits, at, {}, [], []))
    (tmp_path / "report.html").write_text(html_frame.page("64 ranks", body, STYLE), encoding="utf-8")
    with chromium.visit((tmp_path / "report.html").as_uri()) as visit:
        for width in (1280, 400):
            visit.resize(width, dark=False)
            visit.picture(f"report-64-ranks-{width}")
            visit.assert_readable()
            assert visit.page.get_by_role("img").count() == 2


def test_hostile_names(chromium: Chromium, tmp_path: Path) -> None:
    """Names of jobs, hosts, groups and operations that are markup, or longer than a window, are text, and break nothing."""
    long = "a_name_that_is_far_too_long_to_be_shown" * 20
    markup = HOSTILE.encode(errors="ignore").decode()
    for name in (markup, "<img src=x onerror=alert(1)>", long):
        agent = job_of(tmp_path / str(len(name)), 4, 20, range(0), (name, name[::-1]), job="job", host=name)
        url = written(agent, tmp_path / "report.html", "job", command=name, history=name, hooks=[name])
        with chromium.visit(url) as visit:
            for width in (1280, 400):
                visit.resize(width, dark=False)
                visit.picture(f"report-hostile-{len(name)}-{width}")
                visit.assert_readable()
                assert visit.page.locator("script, img").count() == 0
                assert not set("\x1b\u202e") & set(visit.page.content())


def test_key_figures_on_a_telephone(chromium: Chromium, tmp_path: Path) -> None:
    """In a narrow window the tables of ranks, operations and changes are as wide as the page, whatever groups are called; that columns are hidden is stated."""
    names = ("data_parallel_group_of_the_first_stage", "tensor_parallel_group_of_the_first_stage")
    agent = job_of(tmp_path, 4, 60, range(10, 40), names, job="job", host="node1")
    with chromium.visit(written(agent, tmp_path / "report.html", "job"), width=400) as visit:
        for kind in ("ranks", "operations", "changes"):
            table = visit.page.locator(f"div:has(> .{kind})")
            assert table.evaluate("each => each.scrollWidth - each.clientWidth") <= 1, kind
            assert "A wider window" in table.evaluate("each => getComputedStyle(each, '::after').content")
        visit.picture("report-long-names-400")


def test_little_known(chromium: Chromium, tmp_path: Path) -> None:
    """The report of a job of which next to nothing was seen is a page like any other."""
    agent = job_of(tmp_path, 2, 0, range(0))
    with chromium.visit(written(agent, tmp_path / "report.html", "job"), width=400) as visit:
        visit.picture("report-empty")
        visit.assert_readable()
        expect(visit.page.get_by_role("img")).to_have_count(0)
        expect(visit.page.get_by_role("heading", name="What NCCL chose")).to_have_count(0)


def test_waits_over_time_are_all_waits(tmp_path: Path) -> None:
    """Who waited when adds up to what the summary has of each rank, from roll-ups and from what is in none yet."""
    agent = job_of(tmp_path, 4, 40, range(10, 20))
    _, rows = agent.summary(0, 1 << 62, ["rank"], {"job_id": "job"})
    sums: dict[object, float] = {}
    for each in agent.totals("job", []).waits:
        sums[each.rank] = sums.get(each.rank, 0.0) + each.wait_s
    assert sums == pytest.approx({row.by["rank"]: row.wait_s for row in rows})
    assert {each.length_s for each in agent.totals("job", []).waits} == {10.0}
    assert len({each.start_at for each in agent.totals("job", []).waits}) == 4
    assert agent.totals("another", []).waits == []
