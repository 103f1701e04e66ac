"""Remedies that fit the log: without settings that its version of NCCL lacks, and with what an address of docker means. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: Setting -> the first version that has it.
_SINCE = {
    "NCCL_CUMEM_ENABLE": (2, 18),
    "NCCL_LOCAL_REGISTER": (2, 19),
    "NCCL_CUMEM_HOST_ENABLE": (2, 23),
    "NCCL_WIN_ENABLE": (2, 27),
}
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})")
_SENTENCE = re.compile(r"(?<=[.)]) (?=[A-Z])")
_BRIDGE = re.compile(r"(?<![\d.])172\.17\.\d{1,3}\.\d{1,3}\b")
#: Finding -> what to set where an address of docker's bridge was used for a connection.
_ADDRESS_OF = {
    "connection_refused": "set NCCL_SOCKET_IFNAME on all nodes to the interface on which they reach each other, or run the containers with --net=host",
    "store_error": "set MASTER_ADDR (--rdzv-endpoint) to an address that all nodes reach, or run the containers with --net=host",
    "gloo_error": "set GLOO_SOCKET_IFNAME on all nodes to the interface on which they reach each other, or run the containers with --net=host",
    "ucx_error": "set UCX_NET_DEVICES on all nodes to the devices on which they reach each other",
}


def fit(name: str, says: str, do: str, versions: Iterable[str]) -> str:
    """Return the remedy ``do`` of a finding as it fits this log.

    Args:
        name: of the finding.
        says: the finding's text.
        do: the remedy.
        versions: of NCCL or RCCL in the log; none: not known.
    """
    newest = max((_number(version) for version in versions), default=None)
    late = [setting for setting, since in _SINCE.items() if newest is not None and newest < since]
    kept = [part for part in _SENTENCE.split(do) if not any(re.search(rf"\b{setting}\b", part) for setting in late)]
    bridge = name in _ADDRESS_OF and _BRIDGE.search(says)
    own = []
    if bridge:
        own.append(
            f"{bridge[0]} is an address of docker's bridge, which no other node reaches: if the peer is on another node, {_ADDRESS_OF[name]}."
        )
    return " ".join([*own, *(kept or [do])])


def _number(version: str) -> tuple[int, int]:
    """Return a version as numbers; one of an unknown form counts as the newest.

    >>> _number("2.7.8+cuda11.1"), _number("x") > (99, 0)
    ((2, 7), True)
    """
    found = _VERSION.match(version)
    return (int(found[1]), int(found[2])) if found else (1_000_000, 0)
