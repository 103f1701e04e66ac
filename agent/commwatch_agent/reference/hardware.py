"""The rated links of the GPUs of a node: between them, known from their names, and to other nodes, known from its network cards. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from commwatch_agent.reference.links import find

#: Names of GPUs that are only built with these links, by key of the catalogue. The same chips on PCI Express have other names.
_LINKS = (
    (re.compile(r"\bV100-SXM"), "nvlink2"),
    (re.compile(r"\bA100-SXM"), "nvlink3"),
    (re.compile(r"\bH100 80GB HBM3\b|\bH200\b(?! NVL)|\bH20\b"), "nvlink4"),
    (re.compile(r"\bG?B200\b"), "nvlink5"),
    (re.compile(r"\bMI300X\b"), "if-mi300x"),
)


#: Ports slower than this part of the fastest are for management or storage.
_LEAST_SPEED = 0.5


class GpuLink(NamedTuple):
    """The links that each GPU of a node has, as keys of the catalogue."""

    #: To the other GPUs of the node.
    key: str
    #: GPUs of the node.
    gpus: int
    #: To the network, through a card of its own; ``None``: not known.
    nic: str | None = None


def link_of(names: Sequence[str], ports: Iterable[str | None] = ()) -> GpuLink | None:
    """Return the links of the GPUs of a node; ``None``: that between them is not known, or they differ, or there is one GPU.

    Args:
        names: of all GPUs of the node, as the driver has them; empty for one that does not count the bytes on its links.
        ports: links of the RDMA ports of the node that are up; ``None``: not in the catalogue.

    >>> link_of(["NVIDIA H100 80GB HBM3"] * 8), link_of(["NVIDIA L4"] * 2)
    (GpuLink(key='nvlink4', gpus=8), None)
    """
    keys = {next((key for pattern, key in _LINKS if pattern.search(name)), None) for name in names}
    key = keys.pop() if len(keys) == 1 else None
    return None if key is None or len(names) < 2 else GpuLink(key, len(names), _own_port(len(names), ports))


def _own_port(gpus: int, ports: Iterable[str | None]) -> str | None:
    """Return the link of the port that each GPU has; ``None``: there are not as many fast ports as GPUs, or they differ."""
    every = list(ports)
    if None in every:
        return None
    speeds = [(find(str(port)).bandwidth, str(port)) for port in every]
    fastest = max((speed for speed, _ in speeds), default=0.0)
    fast = [port for speed, port in speeds if speed >= _LEAST_SPEED * fastest]
    return fast[0] if len(fast) == gpus and len(set(fast)) == 1 else None
