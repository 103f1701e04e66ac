"""What ``commwatch doctor`` checks of the network: devices, traffic, and connections of ranks; and what the result of a check is."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from commwatch_agent.analysis.traffic import NOT_COUNTED
from commwatch_agent.core.units import counted, line_rate
from commwatch_collectors.node.tcp_connections import Sockets, sockets
from commwatch_collectors.node.tcp_peers import is_local
from commwatch_collectors.spans import ranks as named

_STUCK_S = 30.0
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
