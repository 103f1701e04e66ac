"""API answers about the agent, its alerts, summed operations, and advice, as plain values. Jobs and ranks: ``views.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


def is_prometheus(client: str | None) -> bool:
    """Return whether the name of an HTTP client is that of Prometheus."""
    return client is not None and client.startswith("Prometheus/")


@dataclass(frozen=True)
class PushView:
    """The pushes of one signal over OTLP."""

    #: Scheme, host and port of the receiver.
    endpoint: str
    #: Unix time of the latest push that the receiver accepted; ``None``: none yet.
    pushed_at: float | None = None
    pushes: int = 0
    failures: int = 0
    #: Log records that the receiver did not get, because it refused them, or was away for too long.
    dropped: int = 0
    #: Why the latest push failed; ``None``: it did not.
    trouble: str | None = None


@dataclass(frozen=True)
class About:
    """The agent and its state."""

    version: str
    pid: int
    history: str
    #: Why the agent is not ready; ``None`` if it is.
    trouble: str | None
    #: Unix time and client of the latest scrape of ``/metrics`` by Prometheus, or of the latest by others if it never did; ``None``: no scrape yet.
    scraped_at: float | None
    scraper: str | None
    #: Unix time of the answer, by the agent's clock.
    at: float | None = None
    #: Host name of the node, and a random name of this agent since its start.
    host: str = ""
    id: str = ""
    #: What the agent pushes over OTLP, by signal (``metrics``, ``logs``); empty: nothing.
    otlp: Mapping[str, PushView] = field(default_factory=dict)
    #: Names of the runs that have ranks here now, by the id that the ranks of a run share on all nodes.
    runs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One line of a summary. Times in seconds, bandwidths in bytes per second; ``None``: undefined or not known."""

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
    #: Expected / measured time where transfer times are known; and the kind of reference.
    efficiency: float | None
    reference: str | None


@dataclass(frozen=True)
class Summary:
    """Summed operations. ``since`` and ``until`` bound the rollups used: whole ones of 10 s (older: 5 min)."""

    since: float | None
    until: float | None
    by: list[str]
    rows: list[Row]


@dataclass(frozen=True)
class AlertView:
    """One alert. Times are Unix seconds; ``null``: not yet."""

    #: Id of this occurrence; a later occurrence gets a new id.
    id: str
    name: str
    #: ``info``, ``warning`` or ``critical``.
    severity: str
    #: ``pending``, ``firing`` or ``resolved``.
    state: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    #: Latest value of its expression; ``None``: not a finite number.
    value: float | None
    active_at: float
    fired_at: float | None
    resolved_at: float | None


@dataclass(frozen=True)
class AlertsView:
    """Alerts of this agent, without those of rules that only Prometheus can evaluate."""

    #: Pending and firing alerts, oldest first.
    active: list[AlertView]
    #: Resolved alerts, newest first.
    past: list[AlertView]


@dataclass(frozen=True)
class Remedy:
    """A form of an advice whose gain can be predicted."""

    #: Empty if the advice has no other form.
    name: str
    #: Parameters of ``/api/v1/whatif``, the same as the flags of ``commwatch whatif``.
    whatif: Mapping[str, str | int | list[int]]
    #: Largest gain as a share of step time.
    saves_share: float


@dataclass(frozen=True)
class Advice:
    """One thing to try."""

    rule: str
    title: str
    #: The numbers that led to it.
    because: list[str]
    #: What to try.
    do: str
    #: Expected gain, in words.
    gain: str
    #: Largest gain as a share of step time; ``None``: not known.
    saves_share: float | None
    #: Where ``saves_share`` comes from: an upper bound by a formula, or a replay of recorded steps.
    gain_source: Literal["bound", "replay"] = "bound"
    #: Its forms whose gain a replay can predict.
    remedies: list[Remedy] = field(default_factory=list)
