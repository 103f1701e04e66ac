"""``commwatch doctor`` names the NVLinks that differ from the others of their GPU, and GPUs without all their lanes."""

from __future__ import annotations

from typing import Any

from commwatch_agent.commands.network_checks import gpu_links


def link(number: int, *, up: bool | None = True, **errors: int) -> dict[str, Any]:
    return {"number": number, "up": up, "bytes": {}, "errors": errors}


def said(*links: dict[str, Any], link_of: str | None = None, most: str | None = None) -> list[str]:
    """What is wrong with the links of GPU 3."""
    gpu = {"gpu": {"card": {"index": 3}, "measured": {"nvlinks": list(links)}}}
    host = {"gpus": [{"pci": {"address": "0000:1b:00.0", "link": link_of, "most": most}}]}
    found = list(gpu_links({"gpus": [gpu]}, host))
    assert all((each.result, each.what) == ("warn", "links") and each.remedy for each in found)
    return [each.says for each in found]


def test_down() -> None:
    """Links that are down are named where others are up; a GPU on which none is up, or none is known to be, has no NVLink in use."""
    assert said(link(0), link(1, up=False), link(2), link(3, up=False)) == ["GPU 3: 2 NVLinks of 4 down: 1, 3"]
    assert said(link(0, up=False), link(1, up=False)) == []
    assert said(link(0, up=None), link(1, up=None)) == []


def test_errors() -> None:
    """A link that was brought up again is named, and one that sent far more packets again than the others."""
    quiet = [link(number, crc=2, replay=10, recovery=0) for number in range(3)]
    assert said(*quiet) == []
    assert said(*quiet, link(3, crc=0, replay=3, recovery=1)) == [
        "GPU 3: NVLink 3 has had errors: 3 replay, 1 recovery"
    ]
    assert said(*quiet, link(3, crc=90, replay=60)) == ["GPU 3: NVLink 3 has had errors: 90 crc, 60 replay"]
    assert said(*quiet, link(3, crc=50, replay=40)) == []
    assert said(*(link(number, replay=5000) for number in range(4))) == []


def test_lanes() -> None:
    """A GPU with fewer PCI Express lanes than it could have is named; a slower clock, as of an idle GPU, is not."""
    assert said(link_of="16 GT/s x8", most="32 GT/s x16") == ["GPU 0000:1b:00.0 has 8 of 16 PCI Express lanes"]
    assert said(link_of="2.5 GT/s x16", most="32 GT/s x16") == []
    assert said(link_of=None, most="32 GT/s x16") == []
