"""Plots as SVG: well-formed for any input, with numbers in the right places."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch_agent.report.svg import Axis, Point, Series, even_axis, heat, legend, log_axis, plot
from tests.helpers import elsewhere, examples

SVG = "{http://www.w3.org/2000/svg}"
#: The drawing: from 68 to 412 across, from 200 up to 24.
X, Y = Axis("time", 0, 10, [(0, "0"), (10, "10 s")]), Axis("share", 0, 1, [(0.5, "50%")])
HOSTILE = "<script>alert(1)</script>\"'&\x1b[2J\u202e\ud800]]>"


def drawn(*series: Series, x: Axis = X, y: Axis = Y, limit: float | None = None) -> ET.Element:
    """A plot, parsed."""
    return ET.fromstring(plot("p", "A title", "In words.", x, y, series=series, limit=limit))


def places(svg: ET.Element) -> list[tuple[float, float]]:
    """Where its dots are."""
    return [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in svg.iter(f"{SVG}circle")]


def test_numbers_are_where_they_belong() -> None:
    """Dots, lines, ticks and the limit lie where a linear axis has them; a larger value is higher up."""
    dots = Series("a", "dots", 0, [Point(0, 0.0), Point(5, 0.5, "half"), Point(10, 1.0)])
    line = Series("b", "line", 1, [Point(0, 0.25), Point(10, 0.75)])
    svg = drawn(dots, line, limit=0.3)
    assert places(svg) == [(68, 200), (240, 112), (412, 24)]
    (joined,) = svg.iter(f"{SVG}polyline")
    assert (joined.attrib["points"], joined.attrib["class"]) == ("68.0,156.0 412.0,68.0", "line c1")
    (limit,) = [each for each in svg.iter(f"{SVG}line") if each.attrib["class"] == "limit"]
    assert (limit.attrib["y1"], limit.attrib["y2"]) == ("147.2", "147.2")
    texts = {text.text: text.attrib for text in svg.iter(f"{SVG}text")}
    assert (texts["10 s"]["x"], texts["50%"]["y"]) == ("412.0", "116.0")
    assert {"time", "share"} <= set(texts)
    assert [title.text for dot in svg.iter(f"{SVG}circle") for title in dot] == ["half"]


def test_logarithmic_axis() -> None:
    """On a logarithmic axis equal ratios are equal ways; it covers its values in whole powers."""
    axis = log_axis(
        "size", [300.0, 70_000.0], 16, {16.0: "16", 256.0: "256", 4096.0: "4 Ki", 65536.0: "64 Ki", 2.0**20: "1 Mi"}
    )
    assert (axis.low, axis.high) == (256, 2.0**20)
    assert [written for _, written in axis.ticks] == ["256", "4 Ki", "64 Ki", "1 Mi"]
    assert [axis.part(value) for value, _ in axis.ticks] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    one = log_axis("busbw", [1e9], 10, {1e9: "1 GB/s", 1e10: "10 GB/s"})
    assert [one.low, one.high, one.part(1e9)] == pytest.approx([1e9, 1e10, 0])


def test_gaps() -> None:
    """Where a line has no value it has a gap; a value between two gaps is a dot; nothing at all is an empty plot."""
    points = [
        Point(0, 0.0),
        Point(1, 0.1),
        Point(2, None),
        Point(5, 0.5),
        Point(6, None),
        Point(9, 0.9),
        Point(10, 1.0),
    ]
    svg = drawn(Series("a", "line", 0, points))
    assert len(list(svg.iter(f"{SVG}polyline"))) == 2
    assert places(svg) == [(240, 112)]
    for empty in ((), (Series("a", "line", 0, []),), (Series("a", "dots", 0, [Point(1, None)]),)):
        assert places(drawn(*empty)) == []


def test_read_aloud() -> None:
    """A plot is an image with a title and a description that it names."""
    svg = drawn()
    assert (svg.attrib["role"], svg.attrib["aria-labelledby"]) == ("img", "p-title p-says")
    named = {each.attrib["id"]: each.text for each in svg if "id" in each.attrib}
    assert named == {"p-title": "A title", "p-says": "In words."}


def test_heat() -> None:
    """A matrix has a cell for each value, the strongest colour for the largest, nothing for what is not known, and each number."""
    values = {(0, 0): (4.0, "4 s"), (0, 1): (1.0, "1 s"), (1, 0): (0.0, "0 s")}
    svg = ET.fromstring(heat("h", "Waits", "In words.", ["rank 0", "rank 1"], ["dp", "tp"], values=values))
    cells = list(svg.iter(f"{SVG}rect"))
    assert [(cell.attrib["x"], cell.attrib["y"], cell.attrib["fill-opacity"]) for cell in cells] == [
        ("62.0", "22", "0.850"),
        ("251.0", "22", "0.212"),
        ("62.0", "44", "0.000"),
    ]
    assert [cell[0].text for cell in cells] == ["rank 0, dp: 4 s", "rank 0, tp: 1 s", "rank 1, dp: 0 s"]
    assert svg.attrib["viewBox"] == "0 0 440 66"
    assert svg.attrib["aria-labelledby"].split() == [each.attrib["id"] for each in svg if "id" in each.attrib]
    for names in ([], ["rank 0"]):
        assert not list(ET.fromstring(heat("h", "t", "s", names, [], values={})).iter(f"{SVG}rect"))


def test_hostile_names() -> None:
    """Names that are markup, control characters or no characters at all stay text, in every place where a name can be."""
    series = [Series(HOSTILE, "dots", 0, [Point(1, 0.5, HOSTILE)])]
    page = plot(
        "p", HOSTILE, HOSTILE, Axis(HOSTILE, 0, 1, [(0, HOSTILE)]), Axis(HOSTILE, 0, 1, [(1, HOSTILE)]), series=series
    )
    page += heat("h", HOSTILE, HOSTILE, [HOSTILE], [HOSTILE], values={(0, 0): (1.0, HOSTILE)}) + legend(series)
    root = ET.fromstring(f"<page>{page}</page>")
    assert not list(root.iter("script"))
    assert not list(root.iter(f"{SVG}script"))
    assert "\x1b" not in page
    assert elsewhere(page.replace('xmlns="http://www.w3.org/2000/svg"', "")) == []


@given(st.lists(st.tuples(st.floats(1e-3, 1e15), st.floats(1e-6, 1e14)), max_size=20))
@examples(100)
def test_within_the_drawing(values: list[tuple[float, float]]) -> None:
    """Whatever is measured lies within the axes that were made for it."""
    if not values:
        return
    x, y = log_axis("size", [a for a, _ in values], 16, {}), log_axis("busbw", [b for _, b in values], 10, {})
    found = places(drawn(Series("a", "dots", 0, [Point(a, b) for a, b in values]), x=x, y=y))
    assert all(67.9 <= a <= 412.1 and 23.9 <= b <= 200.1 for a, b in found)
    flat = even_axis("time", 0, 0, [(0, "0")])
    assert (flat.part(0), flat.ticks) == (0, [(0, "0")])


def test_legend() -> None:
    """A colour has one entry in the legend, even if dots and dashes share it."""
    both = [Series("dp", "dots", 0, []), Series("dp", "dashes", 0, []), Series("tp", "dots", 1, [])]
    assert legend(both) == '<span><b class="c0">■</b> dp</span><span><b class="c1">■</b> tp</span>'
