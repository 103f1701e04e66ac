"""The link catalogue: every entry is whole, in its units, and plausible beside its neighbours; the document shows it all."""

from __future__ import annotations

import re
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest

from commwatch_agent.reference.links import Link, UnknownLink, find, links

DOCUMENT = Path(__file__).parents[3] / "docs" / "hardware.md"
ALL = list(links().values())


@pytest.mark.parametrize("link", ALL, ids=lambda link: link.key)
def test_entry(link: Link) -> None:
    """An entry has all its fields, a bandwidth between 1 Gbit/s and 10 TB/s, a latency of microseconds or none, and a source."""
    assert re.fullmatch(r"[a-z]+[a-z0-9]*(-[a-z0-9]+)?", link.key)
    assert all(getattr(link, one.name) not in ("", None) for one in fields(Link) if one.name != "latency_s")
    assert 125e6 <= link.bandwidth <= 10e12
    assert link.latency_s is None or 0.1e-6 <= link.latency_s <= 100e-6
    assert (link.latency_s is None) == link.latency_note.startswith("not known")
    assert link.source.url.startswith("https://")
    assert len(link.source.title) > 10


@pytest.mark.parametrize("link", [link for link in ALL if "Gbit/s / 8" in link.note], ids=lambda link: link.key)
def test_bits_and_bytes(link: Link) -> None:
    """Where the note reckons in Gbit/s, the bandwidth is an eighth of that; a rate in the key or the name is the same."""
    matched = re.match(r"(\d+) Gbit/s", link.note)
    assert matched is not None
    assert link.bandwidth == int(matched[1]) * 1e9 / 8
    in_key = re.search(r"-(\d+)g$", link.key)
    assert in_key is None or (in_key[1] == matched[1] and f"{in_key[1]} Gbit/s" in link.name)


def test_lanes_and_links() -> None:
    """Where the note multiplies lanes, links, rates and codes, the bandwidth is the product."""
    checked = 0
    for link in ALL:
        lanes = re.match(r"(\d+) lanes × (\d+) GT/s × (\d+)/(\d+)", link.note)
        several = re.search(r"(\d+) links × (\d+) GB/s", link.note)
        serial = re.match(r"(\d+) links(?: to other packages)? × (\d+) GT/s × 16 bit / 8", link.note)
        if lanes:
            product = int(lanes[1]) * int(lanes[2]) * 1e9 * int(lanes[3]) / int(lanes[4]) / 8
        elif several:
            product = int(several[1]) * int(several[2]) * 1e9
        elif serial:
            product = int(serial[1]) * int(serial[2]) * 1e9 * 2
        else:
            continue
        checked += 1
        assert link.bandwidth == pytest.approx(product, rel=1e-3), link.key
    assert checked > 15


@pytest.mark.parametrize(
    "generations",
    [
        ["pcie3-x16", "pcie4-x16", "pcie5-x16", "pcie6-x16"],
        ["nvlink2", "nvlink3", "nvlink4", "nvlink5"],
        ["nvswitch1", "nvswitch2", "nvswitch3", "nvswitch4"],
        ["ib-edr", "ib-hdr", "ib-ndr", "ib-xdr"],
        ["roce-100g", "roce-200g", "roce-400g"],
        ["eth-1g", "eth-10g", "eth-25g", "eth-40g", "eth-50g", "eth-100g", "eth-200g", "eth-400g", "eth-800g"],
        ["if-mi250x", "if-mi300x"],
        ["ici-v5e", "ici-v4", "ici-v5p"],
        ["cxl2-x16", "cxl3-x16"],
        ["pcie5-x8", "pcie5-x16"],
    ],
    ids=lambda keys: keys[0],
)
def test_generations(generations: list[str]) -> None:
    """A later generation is faster, by up to ten times, and its messages are not slower."""
    for before, after in pairwise(generations):
        assert 1 < find(after).bandwidth / find(before).bandwidth <= 10
        assert (find(after).latency_s or 0) <= (find(before).latency_s or 0)


def test_several_of_one() -> None:
    """`8 x ib-ndr` is eight times the bandwidth of one, at the same latency."""
    one, eight = find("ib-ndr"), find(" 8 x ib-ndr ")
    assert (eight.bandwidth, eight.latency_s, eight.key) == (8 * one.bandwidth, one.latency_s, "8 x ib-ndr")
    time = eight.curve().time_s("all_reduce", 2, 800_000_000)
    assert time == pytest.approx(2 * 4e-6 + 800_000_000 / 400e9)


@pytest.mark.parametrize("text", ["", "ib", "0 x ib-ndr", "x ib-ndr", "8xib-ndr", "8 x", "ib-ndr ib-ndr"])
def test_unknown_link(text: str) -> None:
    """What is no link is named, with the nearest, or those there are, and how several are written."""
    with pytest.raises(UnknownLink) as caught:
        find(text)
    assert f"'{text}'" in str(caught.value)
    assert ("did you mean ib-ndr?" if text == "8xib-ndr" else "nvlink4") in str(caught.value)
    assert "'8 x ib-ndr'" in str(caught.value)


def document() -> list[list[str]]:
    """The rows that docs/hardware.md has to hold."""
    rows = []
    for link in ALL:
        latency = "–" if link.latency_s is None else f"{link.latency_s * 1e6:g} µs"
        rows.append([f"`{link.key}`", link.name, f"{link.bandwidth / 1e9:g} GB/s", latency, link.note])
    return rows


def test_document() -> None:
    """docs/hardware.md shows every entry as it is in the data, with its sources, and no other."""
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    assert [row for row in rows if len(row) == 5] == document()
    text = DOCUMENT.read_text(encoding="utf-8")
    for link in ALL:
        assert link.latency_note in text
        assert f"[{link.source.title}]({link.source.url})" in text
