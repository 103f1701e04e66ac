"""Measurements of a node over time, for the timeline of a job."""

from __future__ import annotations

from typing import NamedTuple

#: Kinds: how busy a GPU is (0 to 1), and what a network device receives and sends (bytes per second).
GPU_BUSY, RECEIVED, SENT = "gpu_utilization", "received", "sent"


class NodeCounter(NamedTuple):
    """One measurement of a device."""

    #: ``GPU_BUSY``, ``RECEIVED`` or ``SENT``.
    kind: str
    #: Index of a GPU, or name of a network device.
    device: str
    value: float


class CounterSample(NamedTuple):
    """The measurements of one moment."""

    #: Unix time in ns.
    at_ns: int
    counters: list[NodeCounter]
