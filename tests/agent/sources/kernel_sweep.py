"""Communication and its exposed part by a sweep over the edges of kernels: the plainest way, to check the analysis of traces."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any, NamedTuple


class Kernel(NamedTuple):
    """A kernel that ran, in ns from the zero of its trace."""

    start: int
    end: int
    communicates: bool


def kernels(text: str) -> list[Kernel]:
    """Return the kernels of a trace. Times are read as decimals: a float cannot hold a Unix time in µs to the ns."""
    trace = json.loads(text, parse_float=Decimal)
    return [_kernel(event) for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") == "kernel"]


def _kernel(event: dict[str, Any]) -> Kernel:
    start, end = int(event["ts"] * 1000), int((event["ts"] + event["dur"]) * 1000)
    return Kernel(start, end, event["name"].startswith("nccl"))


def sweep(ran: list[Kernel], from_ns: int, until_ns: int) -> tuple[int, int]:
    """Return the ns between two times in which communication ran, and those of them in which nothing else ran."""
    edges = []
    for kernel in ran:
        start, end = max(kernel.start, from_ns), min(kernel.end, until_ns)
        if start < end:
            edges += [(start, 1, kernel.communicates), (end, -1, kernel.communicates)]
    running = {True: 0, False: 0}
    comm = exposed = reached = 0
    for at, change, communicates in sorted(edges):
        if running[True]:
            comm += at - reached
            if not running[False]:
                exposed += at - reached
        running[communicates] += change
        reached = at
    return comm, exposed
