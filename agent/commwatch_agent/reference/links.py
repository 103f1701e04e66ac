"""The link catalogue: rated bandwidths and latencies. The data is ``links.json``; docs/hardware.md shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from commwatch_agent.model.alpha_beta import Curve
from commwatch_agent.text.nearest import nearest

#: Prefix of the catalogue keys by kind of network device.
_OF_DEVICES = {"ethernet": "eth-", "infiniband": "ib-", "roce": "roce-"}
_SEVERAL = re.compile(r"(?:(\d{1,4})\s*x\s+)?(\S+)")


class UnknownLink(Exception):
    """There is no such link; the message names it and lists the known ones."""


@dataclass(frozen=True)
class Source:
    """A public document."""

    title: str
    url: str


@dataclass(frozen=True)
class Link:
    """A link that carries the bytes of one rank; bandwidth is per direction."""

    key: str
    name: str
    #: Maximum in bytes per second: signalling rate minus line code; headers are not subtracted.
    bandwidth: float
    #: Seconds per message in a chain of messages; ``None``: not known.
    latency_s: float | None
    #: How the bandwidth is computed, and where the latency comes from.
    note: str
    latency_note: str
    source: Source

    def curve(self) -> Curve:
        """Return the curve of expected times; an unknown α counts as 0, which is too small."""
        return Curve(self.latency_s or 0.0, 1 / self.bandwidth)


@cache
def links() -> Mapping[str, Link]:
    """Return the catalogue by key."""
    entries = json.loads(Path(__file__).with_name("links.json").read_text(encoding="utf-8"))["links"]
    return {entry["key"]: Link(**{**entry, "source": Source(**entry["source"])}) for entry in entries}


def find(text: str) -> Link:
    """Return a link by its key, or several in parallel: ``ib-ndr``, ``8 x ib-ndr``.

    Raises:
        UnknownLink: there is no such key.

    >>> find("8 x ib-ndr").bandwidth
    400000000000.0
    """
    matched = _SEVERAL.fullmatch(text.strip())
    number, key = (int(matched[1] or 1), matched[2]) if matched else (1, text)
    link = links().get(key)
    if link is None or number < 1:
        near = nearest(key, links()) if matched and link is None else ""
        known = f"did you mean {near}?" if near else f"choose from {', '.join(links())}"
        raise UnknownLink(f"no link '{text}'; {known} (several of one: '8 x ib-ndr')")
    if number == 1:
        return link
    return replace(link, key=f"{number} x {key}", name=f"{number} x {link.name}", bandwidth=number * link.bandwidth)


def of_device(kind: str, speed: float | None) -> str | None:
    """Return the catalogue key for a network device's kind and speed in bytes per second; ``None``: none fits.

    >>> of_device("infiniband", 50e9), of_device("roce", 3.125e9)
    ('ib-ndr', None)
    """
    prefix = _OF_DEVICES.get(kind)
    if prefix is None or speed is None:
        return None
    fitting = (link.key for link in links().values() if link.key.startswith(prefix))
    return next((key for key in fitting if abs(links()[key].bandwidth / speed - 1) < 0.01), None)
