"""Measurements of a node over time, for the timeline of a job."""

from __future__ import annotations

from typing import NamedTuple

#: Kinds by name, each with its unit.
GPU_BUSY, RECEIVED, SENT = "gpu_utilization", "received", "sent"
UNITS = {GPU_BUSY: "ratio", RECEIVED: "bytes/s", SENT: "bytes/s"}


class NodeCounter(NamedTuple):
    """One measurement of a device."""

    #: A key of ``UNITS``.
    kind: str
    #: Index of a GPU, or name of a network device.
    device: str
    value: float


class CounterSample(NamedTuple):
    """The measurements of one moment."""

    #: Unix time in ns.
    at_ns: int
    counters: list[NodeCounter]
