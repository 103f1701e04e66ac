"""The link catalogue: what links of the field are rated at. The data is ``links.json``, docs/links.md shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from commwatch.core.alpha_beta import Curve

#: Beginning of the keys that carry what a kind of network device carries.
_OF_DEVICES = {"ethernet": "eth-", "infiniband": "ib-", "roce": "roce-"}
_SEVERAL = re.compile(r"(?:(\d{1,4})\s*x\s+)?(\S+)")


class UnknownLink(Exception):
    """There is no such link; the message names it and what there is."""


@dataclass(frozen=True)
class Source:
    """A public document."""

    title: str
    url: str


@dataclass(frozen=True)
class Link:
    """What carries the bytes of one rank; bandwidth counts one direction."""

    key: str
    name: str
    #: At most, in bytes per second: the signalling rate less what the line code takes; headers are not taken off.
    bandwidth: float
    #: Seconds one message takes that has to be waited for; ``None``: not known.
    latency_s: float | None
    #: How the bandwidth is reckoned, and where the latency comes from.
    note: str
    latency_note: str
    source: Source

    def curve(self) -> Curve:
        """What operations over it should take; where α is not known it is 0, which is too little."""
        return Curve(self.latency_s or 0.0, 1 / self.bandwidth)


@cache
def links() -> Mapping[str, Link]:
    """The catalogue, by key."""
    entries = json.loads(Path(__file__).with_name("links.json").read_text(encoding="utf-8"))["links"]
    return {entry["key"]: Link(**{**entry, "source": Source(**entry["source"])}) for entry in entries}


def find(text: str) -> Link:
    """A link by its key, or several side by side: ``ib-ndr``, ``8 x ib-ndr``.

    Raises:
        UnknownLink: no such key.

    >>> find("8 x ib-ndr").bandwidth
    400000000000.0
    """
    matched = _SEVERAL.fullmatch(text.strip())
    number, key = (int(matched[1] or 1), matched[2]) if matched else (1, text)
    link = links().get(key)
    if link is None or number < 1:
        raise UnknownLink(f"no link '{text}'; there are {', '.join(links())}, or several of one: '8 x ib-ndr'")
    if number == 1:
        return link
    return replace(link, key=f"{number} x {key}", name=f"{number} x {link.name}", bandwidth=number * link.bandwidth)


def of_device(kind: str, speed: float | None) -> str | None:
    """The key of the link of a network device, by its kind and its speed in bytes per second; ``None``: none fits.

    >>> of_device("infiniband", 50e9), of_device("roce", 3.125e9)
    ('ib-ndr', None)
    """
    prefix = _OF_DEVICES.get(kind)
    if prefix is None or speed is None:
        return None
    fitting = (link.key for link in links().values() if link.key.startswith(prefix))
    return next((key for key in fitting if abs(links()[key].bandwidth / speed - 1) < 0.01), None)
