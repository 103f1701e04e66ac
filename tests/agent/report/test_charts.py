"""What the HTML report draws, of values made by hand."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Any

import pytest

from commwatch_agent.model.alpha_beta import Curve
from commwatch_agent.model.views import GroupView, StepView, WaitView
from commwatch_agent.report.charts import Material, figures, over_time, shares
from tests.agent.commands.test_top import row
from tests.agent.report.test_svg import HOSTILE, SVG

NOTHING = Material([], [], [], [], {}, [], [])


def step(seq: int, comm_s: float | None, exposed_s: float | None = None, **more: Any) -> StepView:
    """A step of one second that begins with its number."""
    made = StepView("job", 0, seq, seq, seq + 1, 1.0, comm_s, comm_s, exposed_s, exposed_s, {}, None, False)
    return replace(made, **more)


def pictures(material: Material) -> list[ET.Element]:
    """Its plots, parsed."""
    return [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", figures(material), re.DOTALL)]


def test_shares_by_hand() -> None:
    """Shares are of the steps of a piece of time, over all ranks; a long step is a gap, an unknown exposed share none."""
    steps = [
        step(0, 0.2, 0.1),
        step(0, 0.4, 0.1, rank=1),
        step(1, 0.5, None),
        step(2, 0.9, 0.9, long=True),
        step(3, 0.6, 0.3),
    ]
    found = shares(steps)
    assert [at for at, _, _ in found] == pytest.approx([4 / 6, 2, 20 / 6])
    assert [comm for _, comm, _ in found] == pytest.approx([0.3, 0.5, 0.6])
    assert [exposed for _, _, exposed in found] == [pytest.approx(0.1), None, pytest.approx(0.3)]


def test_shares_of_a_long_job() -> None:
    """A hundred thousand steps are a hundred points; between two far apart there is a gap."""
    assert len(shares([step(n, 0.2) for n in range(5000)])) == 100
    apart = shares([step(n, 0.2) for n in (0, 1, 98, 99)])
    assert [comm for _, comm, _ in apart] == [pytest.approx(0.2), None, None, pytest.approx(0.2)]
    assert shares([]) == []
    assert shares([step(0, 0.5, long=True)]) == []
    assert len(shares([step(0, 0.5)])) == 1


def test_nothing_known() -> None:
    """Of a job of which nothing is known there are no plots and no headings."""
    assert figures(NOTHING).strip() == ""


def test_share_plot() -> None:
    """The share has the 30% line across, its numbers in a table behind it, and in words how often it is above."""
    material = replace(NOTHING, steps=[step(n, 0.2 if n < 3 else 0.4) for n in range(4)])
    (svg,) = pictures(material)
    assert [line.attrib["class"] for line in svg.iter(f"{SVG}line")].count("limit") == 1
    page = figures(material)
    assert "At most 40% of step time is communication; it is above the 30% line in 1 of 4 intervals." in page
    assert page.count("<td>20%") == 3
    assert "exposed" not in re.sub(r"<details>.*?</details>", "", page, flags=re.DOTALL)


def test_share_that_is_not_known_everywhere() -> None:
    """The text gives how often the known share is above the line, and for how much of the time it is unknown."""
    material = replace(NOTHING, steps=[step(n, 0.4 if n == 7 else None) for n in range(10)])
    assert "above the 30% line in 1 of 1 intervals, and not known in 9 more." in figures(material)
    assert "Shares over time" not in figures(replace(NOTHING, steps=[step(0, None)]))


def test_bandwidth_plot() -> None:
    """Each operation has a plot with a dot for each size, and dashes where it is known what it should be."""
    rows = [
        row(
            {"group": "dp", "op": "all_reduce", "size": 1 << power},
            bytes=(1 << power) * 10,
            count=10,
            busbw=busbw,
            seconds=3.0,
        )
        for power, busbw in ((10, 1e6), (20, 5e8))
    ]
    rows.append(row({"group": "tp", "op": "broadcast", "size": 1 << 16}, bytes=10 << 16, count=10, busbw=1e9))
    rows.append(row({"group": "dp", "op": "barrier", "size": None}, bytes=0, busbw=None))
    material = replace(NOTHING, by_size=rows, curves={("dp", "all_reduce"): Curve(1e-4, 1e-9)})
    first, second = pictures(material)
    assert [len(list(svg.iter(f"{SVG}circle"))) for svg in (first, second)] == [2, 1]
    assert [len(list(svg.iter(f"{SVG}polyline"))) for svg in (first, second)] == [1, 0]
    hints = [title.text for dot in first.iter(f"{SVG}circle") for title in dot]
    assert hints == ["dp, 1 KiB: 1 MB/s, 10 operations", "dp, 1 MiB: 500 MB/s, 10 operations"]
    # 1 MiB among two ranks: 2·100 µs + 1.049 ms, so 840 MB/s.
    assert "<td>840 MB/s" in figures(material)


def test_wait_matrix() -> None:
    """Who waited in which group, who least in all; of many ranks those that waited most, by number, and who waited least."""
    waits = [row({"rank": rank, "group": "dp"}, wait_s=wait_s) for rank, wait_s in ((0, 0.5), (1, 0.01), (2, None))]
    (svg,) = pictures(replace(NOTHING, waits=waits))
    assert [cell[0].text for cell in svg.iter(f"{SVG}rect")] == ["rank 0, dp: 500 ms", "rank 1, dp: 10 ms"]
    material = replace(NOTHING, waits=waits)
    assert "rank 1 waited least, 10 ms in all, so the others wait for it." in figures(material, {1: 0.2})
    assert "rank 1 waited least, 10 ms in all." in figures(material, {0: 0.2}), "it is not known to be late"
    many = [row({"rank": rank, "group": "dp"}, wait_s=float(rank)) for rank in range(100)]
    (svg,) = pictures(replace(NOTHING, waits=many))
    names = [str(text.text) for text in svg.iter(f"{SVG}text") if str(text.text).startswith("rank")]
    assert (len(names), names[:2], names[-1]) == (64, ["rank 0", "rank 37"], "rank 99")
    assert "Shown: 64 of 100 ranks, 1 of 1 groups" in figures(replace(NOTHING, waits=many))


def test_waits_over_time_by_hand() -> None:
    """A piece of time is as long as the longest stretch that was counted as one; each stretch is in one piece; one piece is no history."""
    coarse = [WaitView(0, 600.0, 300.0, 5.0), WaitView(1, 600.0, 300.0, 1.0)]
    fine = [WaitView(0, 900.0 + 10 * i, 10.0, 0.5) for i in range(60)]
    piece_s, known = over_time([*fine, *coarse])
    assert (piece_s, known) == (300.0, {(0, 0): 5.0, (1, 0): 1.0, (0, 1): 15.0, (0, 2): 15.0})
    assert over_time(fine)[0] == 20.0
    assert over_time(fine[:36]) == (10.0, {(0, i): 0.5 for i in range(36)})
    assert over_time(coarse) == (300.0, {})
    assert over_time([])[1] == {}


def test_waits_over_time() -> None:
    """Ranks by time: each piece says who waited how long; few of many columns are named; in words the longest wait, and when."""
    waits = [WaitView(rank, 10.0 * i, 10.0, 2.0 if rank and i > 10 else 0.1) for rank in range(3) for i in range(30)]
    waits.append(WaitView(2, 200.0, 10.0, 1.0))
    (svg,) = pictures(replace(NOTHING, waits_at=waits))
    cells = [str(cell[0].text) for cell in svg.iter(f"{SVG}rect")]
    assert (len(cells), cells[0], cells[-1]) == (90, "rank 0, 0:00: 100 ms", "rank 2, 4:50: 2.00 s")
    named = [str(text.text) for text in svg.iter(f"{SVG}text") if ":" in str(text.text)]
    assert named == ["0:00", "0:40", "1:20", "2:00", "2:40", "3:20", "4:00"]
    assert "in intervals of 0:10. The longest wait is that of rank 2: 3.00 s in the interval from 3:20." in figures(
        replace(NOTHING, waits_at=waits)
    )


def test_hostile_names() -> None:
    """A group or operation that is named like markup is text everywhere."""
    material = Material(
        steps=[],
        by_size=[row({"group": HOSTILE, "op": HOSTILE, "size": 8}, busbw=1e6)],
        waits=[row({"rank": 0, "group": HOSTILE}, wait_s=1.0)],
        waits_at=[],
        choices=[],
        curves={},
        groups=[GroupView("job", HOSTILE, HOSTILE, HOSTILE, "", 2, None, [0], True, HOSTILE)],
    )
    assert "<script" not in figures(material)
    assert len(pictures(material)) == 2
