"""The slowest buckets and units of a job, in text and page of its report."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from commwatch_agent.model.alpha_beta import Curve
from commwatch_agent.reference.references import Measured, Modelled, References, save
from commwatch_agent.report import report_page, report_text, slowest_parts, timeline_export
from commwatch_agent.report.charts import NOTHING
from commwatch_agent.report.report import Report, build
from commwatch_agent.report.slowest_parts import PartFigures, slowest
from commwatch_agent.report.timeline_export import Window
from commwatch_agent.report.timeline_parts import Page, part_of, trace_of
from tests.agent.model.test_model_parts import DTYPES, ENTRY, FLOAT, PASS, reduced, step
from tests.helpers import MS, Watch, group_entry, mark, write_ring

if TYPE_CHECKING:
    from tests.browser import Chromium

STEPS = 5


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    """Two ranks with a pass of three parts in each step; the second one is late into the middle part."""
    watch = Watch(tmp_path)
    names = [group_entry(0, (0, 1)), ENTRY, *({"dtype": code, "name": name} for code, name in DTYPES.items())]
    for rank in range(2):
        records = []
        for number in range(1, STEPS + 1):
            for n, one in enumerate(step(number, *PASS)):
                fields = list(one)
                fields[7] = len(PASS) * number + n
                fields[10] += 0 if (n, rank) == (1, 1) else MS  # the end
                records.append(tuple(fields))
            records.append(mark(number, (number + 1) * 100 * MS))
        write_ring(watch.rings, records, names, rank=rank, world_size=2)
    watch.tick()
    return watch


def report_of(watch: Watch) -> Report:
    found = build(watch.agent, "job", watch.agent.path, "commwatch report")
    assert found is not None
    return found


def test_figures(watch: Watch) -> None:
    """Each part has its operations, their mean duration, mean wait for late ranks and busbw; those with the most time come first."""
    found = slowest(watch.agent.operations(0, 1 << 62, None, lambda _: True, 1000))
    assert {each.part: each.count for each in found} == dict.fromkeys(ENTRY["names"], 2 * STEPS)
    middle = next(each for each in found if each.part == "middle")
    assert replace(middle, wait_s=None, busbw=None) == PartFigures(
        "middle", "default_pg", "all_reduce", 40, 2 * STEPS, 1.5e-3, None, None
    )
    assert middle.wait_s == pytest.approx(0.5e-3)
    assert middle.busbw == pytest.approx(40 / 1.5e-3)
    assert found[-1] == middle


def test_figures_are_of_the_same_operations(watch: Watch) -> None:
    """Where some operations took far longer than most, the mean wait is below the mean duration, and busbw is all bus bytes by all time."""
    operations = list(watch.agent.operations(0, 1 << 62, None, lambda _: True, 1000))
    place = max(one.seq for one in operations if one.part == "middle")
    assert {one.rank for one in operations if one.seq == place} == {0, 1}
    longer = [
        replace(one, duration_s=one.duration_s + 1, busbw=one.busbw * one.duration_s / (one.duration_s + 1))
        if one.seq == place and one.rank == 0 and one.duration_s and one.busbw
        else one
        for one in operations
    ]
    middle = next(each for each in slowest(longer) if each.part == "middle")
    of_part = [one for one in longer if one.part == "middle"]
    time_s = sum(one.duration_s or 0 for one in of_part)
    assert middle.mean_s == pytest.approx(time_s / len(of_part))
    assert middle.wait_s is not None
    assert middle.wait_s <= middle.mean_s
    assert middle.busbw == pytest.approx(40 * len(of_part) / time_s)


def test_wait_is_never_longer_than_the_operation(watch: Watch) -> None:
    """Operations whose wait is not known, one in ten at most, are neither in the mean wait nor in the mean duration beside it."""
    operations = list(watch.agent.operations(0, 1 << 62, None, lambda _: True, 1000))
    middle = [one for one in operations if one.part == "middle"]
    waits = [replace(one, duration_s=1.0 if one.rank == 0 else 1e-9) for one in middle]
    apart = replace(waits[0], seq=10_000, duration_s=1e-9)
    (found,) = slowest([*waits, apart])
    assert found.count == len(middle) + 1
    assert found.wait_s is not None
    assert found.wait_s <= found.mean_s


def test_in_the_report(watch: Watch) -> None:
    """Text, page and JSON of a report have the table; without a known part, they do not."""
    found: Any = report_of(watch)
    assert {each.part for each in found.slowest_parts[:2]} == {"first", "last"}
    assert [each.part for each in found.slowest_parts[2:]] == ["middle"]
    text, page = report_text.text(found, 160), report_page.html(found, NOTHING)
    for row in slowest_parts.table(found.slowest_parts)[1]:
        assert all(cell in text and cell in page for cell in row)
    assert "slowest parts of the model" in text
    assert "Slowest parts of the model" in page


def test_narrow_table_has_its_keys(watch: Watch) -> None:
    """Where the table continues below itself, each line there has part and op, by which its row is known; a group only if there are several."""
    found = report_of(watch)
    first = replace(found.slowest_parts[0], part="unit layers.0 of the model", op="all_gather", busbw=12.3e9)
    each_op = [first, replace(first, op="reduce_scatter")]
    lines = report_text.text(replace(found, slowest_parts=each_op), 80).splitlines()
    start = lines.index("  slowest parts of the model")
    table = lines[start + 2 : next(n for n, line in enumerate(lines) if line.startswith("  Of the latest"))]
    heads = [line for line in table if "part" in line]
    assert "busbw" in heads[-1]
    assert not any("group" in line or "default_pg" in line for line in table)
    for op in ("all_gather", "reduce_scatter"):
        assert sum(f" {op}" in line for line in table) == len(heads)
    several = [first, replace(first, group="shards")]
    assert [row[2] for row in slowest_parts.table(several)[1]] == ["default_pg", "shards"]


@pytest.mark.parametrize("width", [1280, 400])
def test_page(chromium: Chromium, watch: Watch, tmp_path: Path, width: int) -> None:
    """The table can be read on a wide and on a narrow page, with a name as long as a bucket of a large model has."""
    found = report_of(watch)
    name = "bucket 12: model.layers.31.mlp.down_proj.weight … model.layers.28.self_attn.q_proj.weight (27 parameters)"
    long = replace(found, slowest_parts=[replace(each, part=name) for each in found.slowest_parts])
    path = tmp_path / "report.html"
    path.write_text(report_page.html(long, NOTHING), encoding="utf-8")
    with chromium.visit(path.as_uri(), width=width) as visit:
        visit.picture(f"slowest-parts-{width}")
        visit.assert_readable()
        expect(visit.page.locator("h2:text('Slowest parts of the model') + div tbody tr")).to_have_count(3)
        for head in ("part", "op", "mean", "wait", "busbw"):
            box = visit.page.locator(".parts th", has_text=head).bounding_box()
            assert box is not None
            assert box["x"] + box["width"] <= width


def test_in_timelines(watch: Watch) -> None:
    """A trace, its parts for other nodes, and one collective with its ranks name the parts that operations carry."""
    out = io.StringIO()
    timeline_export.export(watch.path, "job", Window(None), (), out)
    events = json.loads(out.getvalue())["traceEvents"]
    shown = [each["args"]["part"] for each in events if "part" in each.get("args", {})]
    assert sorted(shown) == sorted(ENTRY["names"] * STEPS * 2)
    page = part_of(watch.path, "job", Page(None, None, None, 1000), ())
    assert [one.part for one in trace_of(page).operations] == [
        "last",
        "last",
        "middle",
        "middle",
        "first",
        "first",
    ] * STEPS
    (group,) = {one.group_id for one in watch.agent.operations(0, 1 << 62, None, lambda _: True, 1)}
    found = watch.agent.collective(group, len(PASS) + 1)
    assert found is not None
    assert [one.part for one in found[0]] == ["middle"] * 2


def test_nothing_known(tmp_path: Path) -> None:
    """A job without a table has no such table in its report."""
    watch = Watch(tmp_path)
    write_ring(watch.rings, step(1, *PASS), [group_entry(0, (0,))], rank=0, world_size=1)
    watch.tick()
    found = report_of(watch)
    assert found.slowest_parts == []
    assert "slowest parts" not in report_text.text(found)


def test_efficiency_of_parts_and_of_operations(tmp_path: Path) -> None:
    """The only part of an operation has the efficiency of that operation, also where the times of a reference are on no curve."""
    references = References(tmp_path / "references")
    points = {256: 1e-4, 1 << 10: 5e-4, 4 << 10: 8e-4, 1 << 20: 1e-3}
    save(references.where, Measured("bench", "x", "gloo", 2, (), 0.0, {"all_reduce": points}, "test"))
    watch = Watch(tmp_path / "watch")
    watch.agent.references = references
    bucket = {"parts": 1, "since": 0, "names": ["bucket 0: a"], "order": [[0, "all_reduce", 1 << 10, [0]]]}
    names = [group_entry(0, (0, 1), backend="gloo"), bucket, {"dtype": FLOAT, "name": "float32"}]
    for rank in range(2):
        records = [mark(0, 100 * MS)]
        for n in range(1, STEPS + 1):
            records += [reduced(n * 100 + 1, 1 << 10, seq=n), mark(n, (n + 1) * 100 * MS)]
        write_ring(watch.rings, records, names, rank=rank, world_size=2)
    watch.tick()
    found = report_of(watch)
    (row,), (part,) = found.operations, found.slowest_parts
    assert row.reference == "bench"
    assert row.efficiency == part.efficiency == pytest.approx(0.8)


def test_slowest_without_the_wait(watch: Watch) -> None:
    """A part that waits for a late rank is not the slowest for that; with a reference, each part has its efficiency, as of the time without the wait."""
    operations = list(watch.agent.operations(0, 1 << 62, None, lambda _: True, 1000))
    waits = [replace(one, duration_s=1.0) if one.part == "middle" and one.rank == 0 else one for one in operations]
    assert max(slowest(waits), key=lambda each: each.mean_s).part == "middle"
    found = slowest(waits, {("default_pg", "all_reduce"): [Modelled("catalogue", "x", Curve(0.0, 1e-5))]})
    assert found[-1].part == "middle"
    assert found[-1].efficiency == pytest.approx(40e-5 / 1e-3)
    assert slowest_parts.table(found)[0][-1] == "efficiency"
    assert slowest_parts.table(slowest(waits))[0][-1] == "busbw"
