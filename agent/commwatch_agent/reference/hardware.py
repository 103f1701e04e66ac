"""The rated links between the GPUs of a node, known from their names. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

#: Names of GPUs that are only built with these links, by key of the catalogue. The same chips on PCI Express have other names.
_LINKS = (
    (re.compile(r"\bV100-SXM"), "nvlink2"),
    (re.compile(r"\bA100-SXM"), "nvlink3"),
    (re.compile(r"\bH100 80GB HBM3\b|\bH200\b(?! NVL)|\bH20\b"), "nvlink4"),
    (re.compile(r"\bG?B200\b"), "nvlink5"),
    (re.compile(r"\bMI300X\b"), "if-mi300x"),
)


class GpuLink(NamedTuple):
    """The link that each GPU of a node has to the others."""

    #: Key of the catalogue.
    key: str
    #: GPUs of the node.
    gpus: int


def link_of(names: Sequence[str]) -> GpuLink | None:
    """Return the link between the GPUs of a node; ``None``: not known, or they differ, or there is one GPU.

    Args:
        names: of all GPUs of the node that count the bytes on their links, as the driver has them.

    >>> link_of(["NVIDIA H100 80GB HBM3"] * 8), link_of(["NVIDIA L4"] * 2)
    (GpuLink(key='nvlink4', gpus=8), None)
    """
    keys = {next((key for pattern, key in _LINKS if pattern.search(name)), None) for name in names}
    key = keys.pop() if len(keys) == 1 else None
    return None if key is None or len(names) < 2 else GpuLink(key, len(names))
