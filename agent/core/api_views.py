"""What the API answers about the agent itself, its alerts, and operations added up. Plain values; views of jobs and ranks: ``views.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class About:
    """The agent itself."""

    version: str
    pid: int
    history: str
    #: Why it is not ready; ``None`` if it is.
    trouble: str | None
    #: When ``/metrics`` was last fetched, and by whom; ``None``: never.
    scraped_at: float | None
    scraper: str | None
    #: Unix time of the answer, by the agent's clock.
    at: float | None = None


@dataclass(frozen=True)
class Row:
    """One line of a summary. Times in seconds, bandwidths in bytes per second; ``None``: not defined, or not known."""

    by: dict[str, str | int | None]
    ranks: int
    group_size: int | None
    count: int
    bytes: int
    seconds: float
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    algbw: float | None
    busbw: float | None
    wait_s: float | None
    p2p_wait_s: float | None
    failed: int
    untimed: int
    #: Expected over measured time, where the transfers are known, and by which kind of reference.
    efficiency: float | None
    reference: str | None


@dataclass(frozen=True)
class Summary:
    """Operations added up. ``since`` and ``until`` are what was really covered: whole roll-ups of 10 s (older: 5 min)."""

    since: float | None
    until: float | None
    by: list[str]
    rows: list[Row]


@dataclass(frozen=True)
class AlertView:
    """One condition on one thing. Times are Unix seconds; ``null``: not yet."""

    #: Of this occurrence; the same condition later on has another.
    id: str
    name: str
    #: ``info``, ``warning`` or ``critical``.
    severity: str
    #: ``pending``, ``firing`` or ``resolved``.
    state: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    #: What its expression gave last; ``None``: no finite number.
    value: float | None
    active_at: float
    fired_at: float | None
    resolved_at: float | None


@dataclass(frozen=True)
class AlertsView:
    """Alerts of this agent. Rules that Prometheus alone can judge have none here."""

    #: Pending and firing ones, oldest first.
    active: list[AlertView]
    #: Those that are over, newest first.
    past: list[AlertView]
