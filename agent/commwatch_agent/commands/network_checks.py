"""What ``commwatch doctor`` checks of the network: devices, traffic, and connections of ranks; and what the result of a check is."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from commwatch_agent.analysis.traffic import NOT_COUNTED
from commwatch_agent.text.units import counted, line_rate
from commwatch_collectors.node.tcp_connections import Sockets, sockets
from commwatch_collectors.node.tcp_peers import is_local
from commwatch_collectors.spans import ranks as named

_STUCK_S = 30.0
#: Errors of an NVLink, of packets that were sent again, from which on it stands out; and how many times as many as the others of its GPU have.
_ERRORS, _OF_OTHERS = 100, 10
PASS, WARN, FAIL = "pass", "warn", "fail"


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    #: ``pass``, ``warn`` or ``fail``.
    result: str
    what: str
    says: str
    #: What to do; empty if there is nothing to do.
    remedy: str = ""


def network_checks(host: dict[str, Any]) -> Iterator[Check]:
    """Check the network devices in an answer of ``/api/v1/host``."""
    age = time.time() - host["looked_at"] if host["looked_at"] is not None else 0.0
    if age > _STUCK_S:
        remedy = (
            "a driver may block: check dmesg; commwatch_network_bytes_total and related metrics are absent until then"
        )
        yield Check(WARN, "network", f"not read for {age:.0f} s", remedy)
    for complaint in host["complaints"]:
        yield Check(WARN, "network", f"{complaint['device']}: {complaint['says']}", complaint["remedy"])
    used = [nic for nic in host["nics"] if nic["received_bytes"] or nic["sent_bytes"]]
    if not used:
        remedy = "the agent sees the devices of its own network namespace: run it in the trainer's (same pod, or host network)"
        yield Check(WARN, "network", "no device has sent or received a byte", remedy)
    elif not host["complaints"]:
        yield Check(PASS, "network", ", ".join(_named(nic) for nic in used))
    if host["traffic"]["says"] == NOT_COUNTED:
        remedy = (
            "run the agent in the trainer's network namespace, so that it can compare sent bytes with expected bytes"
        )
        yield Check(WARN, "traffic", f"collectives across nodes: {NOT_COUNTED}", remedy)


def gpu_links(gpus: dict[str, Any], host: dict[str, Any]) -> Iterator[Check]:
    """Check the links of the GPUs in answers of ``/api/v1/gpus`` and ``/api/v1/host``: NVLinks that differ from the others of a GPU, and lost lanes."""
    for view in gpus["gpus"]:
        name, links = f"GPU {view['gpu']['card']['index']}", view["gpu"]["measured"]["nvlinks"]
        down = [link["number"] for link in links if link["up"] is False]
        if down and any(link["up"] for link in links):
            says = f"{name}: {counted(len(down), 'NVLink')} of {len(links)} down: {', '.join(map(str, down))}"
            yield Check(WARN, "links", says, "check nvidia-smi nvlink -s and the fabric manager's log; reset the GPU")
        for link in links:
            if (link["errors"].get("recovery") or 0) > 0 or _stands_out(link, links):
                errors = ", ".join(f"{number} {kind}" for kind, number in link["errors"].items() if number)
                remedy = "check nvidia-smi nvlink -e and the fabric manager's log; if the errors grow, have the link inspected"
                yield Check(WARN, "links", f"{name}: NVLink {link['number']} has had errors: {errors}", remedy)
    for gpu in host["gpus"]:
        pci = gpu["pci"]
        lanes, most = _lanes(pci["link"]), _lanes(pci["most"])
        if lanes is not None and most is not None and lanes < most:
            remedy = "reseat the GPU, check its riser and the firmware settings of its slot"
            yield Check(WARN, "links", f"GPU {pci['address']} has {lanes} of {most} PCI Express lanes", remedy)


def _stands_out(link: dict[str, Any], links: list[dict[str, Any]]) -> bool:
    """Return whether a link has far more errors than the others of its GPU."""
    own, *others = (sum(each["errors"].values()) for each in (link, *(each for each in links if each is not link)))
    return bool(others) and own >= _ERRORS and own >= _OF_OTHERS * median(others)


def _lanes(link: str | None) -> int | None:
    """Return the lanes of a link such as ``16 GT/s x8``."""
    lanes = (link or "").rpartition(" x")[2]
    return int(lanes) if lanes.isdecimal() else None


def _named(nic: dict[str, Any]) -> str:
    return nic["device"] if nic["speed"] is None else f"{nic['device']} ({line_rate(nic['speed'])})"


def connections(name: str, world_size: int, ranks: Iterable[dict[str, Any]]) -> Iterator[Check]:
    """Check whether a slow link would be seen: the TCP connections of the ranks of a job on several nodes."""
    live = [rank for rank in ranks if rank["state"] == "running"]
    here = [rank for rank in live if rank["host"] == socket.gethostname() and rank["visible_pid"]]
    if not here or world_size <= len(live):
        return
    found = sockets([rank["visible_pid"] for rank in here])
    unknown: dict[str, list[int]] = {}
    number = 0
    for rank in here:
        seen = found[rank["visible_pid"]]
        by_agent = (rank.get("traffic") or {}).get("unknown", "")
        if isinstance(seen, Sockets) and not by_agent:
            number += sum(not is_local(each, seen.devices) for each in seen.connections)
        else:
            unknown.setdefault(by_agent or getattr(seen, "reason", ""), []).append(rank["rank"])
    for reason, whom in unknown.items():
        remedy = "run the agent as the user of the trainer and in its network namespace, or as root; else a slow link is not named"
        yield Check(WARN, "connections", f"{name}: of {named(whom)} not known: {reason}", remedy)
    if not unknown:
        yield Check(PASS, "connections", f"{name}: {counted(number, 'connection')} to other addresses")
