"""What is wrong, as plain values: a condition that holds at one moment, and the incident that it belongs to, from its begin to its end."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

#: How an incident ended.
RECOVERED, JOB_ENDED = "recovered", "job_ended"
#: Kinds of one wait, as it goes on and more is known of it, from the one that says least: they share an id.
ONE_WAIT = ("stalled", "hang")
#: While one of these lasts, the ranks of a group do nothing; others wait for the culprits all the time.
STANDSTILLS = frozenset({*ONE_WAIT, "desync", "init_incomplete"})
#: Kinds about what the steps of a job are spent on.
SHARES = frozenset({"comm_bound", "exposed_comm"})
WAITED_FOR = frozenset({*ONE_WAIT, "waiting", "init_incomplete"})
#: Causes of a wait by which its culprit is lost.
LOST = frozenset({"dead", "gone"})
#: Variant of a wait for ranks that Ctrl-C has ended: it is no fault, and what was known of the wait before stays.
BY_CTRL_C = "interrupted"
#: Kinds about what ranks of a job do, which the agents of all its nodes know only together.
OF_RANKS = STANDSTILLS | {"waiting", "straggler", "corruption", "rank_lost", "slow_link"}
#: Kinds whose conditions stay when their reason is over: a log never revokes a message.
STANDING = frozenset({"nccl_fault"})
#: Kinds that are of one moment.
MOMENTS = frozenset({"rank_lost"})
#: While one of these lasts, ranks wait for a known reason, and not because their work is uneven.
REASONS_TO_WAIT = OF_RANKS - {"corruption"}


@dataclass(frozen=True)
class EvidenceItem:
    """One thing that an incident rests on."""

    #: ``probe``, ``ras``, ``nccl_log``, ``gpu``, ``host``, ``metrics``, ``ending``, ``process``, ``stack`` or ``peers``.
    source: str
    #: Unix time in s.
    at: float
    text: str
    #: The same as data; JSON types.
    data: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Condition:
    """What one rule finds at one moment."""

    #: One of the kinds of the table (``alerts/commwatch_alerts/rules.yaml``).
    kind: str
    #: What it is about, within its run or node: group and number of an operation, or a rank, or a device.
    subject: tuple[str, ...]
    #: One sentence with numbers.
    says: str
    #: When it began, by the evidence: Unix time in s.
    began_at: float
    #: Name of the job, and the key of its run on this node; empty: a condition of the node.
    job_id: str = ""
    run: str = ""
    #: Code of the cause, such as ``dead`` or ``sizes``; empty: not known, or the kind says it.
    cause: str = ""
    #: Which rows of the table apply; empty: those without a variant.
    variant: str = ""
    #: Nothing can change it, so its alerts do not wait: a loss that has ended its job, and its reason.
    is_final: bool = False
    #: The number that the rows compare with their thresholds.
    value: float = 0.0
    #: The culprits, which may be unknown; and those that wait.
    ranks: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    #: Host names; empty: this one.
    nodes: tuple[str, ...] = ()
    group_id: str = ""
    group: str = ""
    op: str = ""
    seq: int | None = None
    #: How many ranks do nothing because of it, on average; ``None``: not known.
    idle_ranks: float | None = None
    #: Share of the time (0 to 1) that it takes from each of them; ``None``: not known.
    share: float | None = None
    #: When it last held, if the evidence tells; ``None``: it holds now.
    last_at: float | None = None
    #: Further labels; words of the texts of the table, which are no labels; and numbers of the texts.
    labels: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    #: Further facts for the views of it, such as ``verdict_views``.
    details: Mapping[str, object] = field(default_factory=dict)
    evidence: tuple[EvidenceItem, ...] = ()

    @property
    def key(self) -> tuple[str, ...]:
        """What identifies the incident among those that are open on this node."""
        return (self.run or self.job_id, family(self.kind), *self.subject)


@dataclass(frozen=True)
class AlertState:
    """One row of the table that applies to an incident. Times are Unix seconds."""

    #: Name and severity of the row.
    name: str
    severity: str
    #: Since when its condition holds; when that had held long enough; and when it had ended for long enough.
    active_at: float
    fired_at: float | None = None
    resolved_at: float | None = None
    #: When its condition last held, and the value then.
    seen_at: float = 0.0
    value: float = 0.0
    #: Labels of the alert, fixed when it fires, and its texts.
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Incident:
    """One fault or condition of one run of a job, or of a node. Times are Unix seconds."""

    #: Equal on all nodes of the job, and after a restart of the agent.
    id: str
    kind: str
    #: ``info``, ``warning`` or ``critical``: of the worst row that applies.
    severity: str
    #: ``pending``: its condition has not held for long enough; ``open``; ``ended``.
    state: str
    job_id: str
    run: str
    subject: tuple[str, ...]
    began_at: float
    #: When it was concluded, and when its condition last held.
    seen_at: float
    last_at: float
    ended_at: float | None = None
    #: ``RECOVERED`` or ``JOB_ENDED``.
    outcome: str | None = None
    #: Whether it is open and its condition was found lately.
    holds: bool = True
    #: Number of earlier incidents with the same run, kind and subject.
    number: int = 0
    cause: str = ""
    says: str = ""
    ranks: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    group_id: str = ""
    group: str = ""
    op: str = ""
    seq: int | None = None
    #: Rank seconds lost; share of the time while it lasted; ``None``: not known.
    cost_rank_s: float | None = None
    share: float | None = None
    #: When the fault itself was last there, if the evidence tells: its condition is found for longer.
    until: float | None = None
    #: Id of the incident that explains this one.
    consequence_of: str | None = None
    #: As of its latest condition.
    details: Mapping[str, object] = field(default_factory=dict)
    evidence: tuple[EvidenceItem, ...] = ()
    alerts: tuple[AlertState, ...] = ()

    @property
    def key(self) -> tuple[str, ...]:
        """As of a ``Condition``."""
        return (self.run or self.job_id, family(self.kind), *self.subject)

    @property
    def there_until(self) -> float:
        """When the fault itself was last there, as far as the evidence tells; else when its condition was last found."""
        return self.last_at if self.until is None else self.until

    @property
    def is_closed(self) -> bool:
        """Whether it and all its alerts have ended."""
        return self.ended_at is not None and all(each.resolved_at is not None for each in self.alerts)


def with_new(known: Iterable[EvidenceItem], found: Iterable[EvidenceItem]) -> list[EvidenceItem]:
    """Return evidence with what is new: the same data is kept once, as it was first seen."""
    kept = list(known)
    for item in found:
        if all((each.source, each.data) != (item.source, item.data) for each in kept):
            kept.append(item)
    return kept


def is_known(known: Iterable[EvidenceItem], found: Iterable[EvidenceItem]) -> bool:
    """Return whether evidence has nothing new."""
    before = list(known)
    return len(with_new(before, found)) == len(before)


def family(kind: str) -> str:
    """Return what kinds share that follow each other in one incident: a wait becomes a hang once its culprit is known."""
    return "wait" if kind in ONE_WAIT else kind


def incident_id(run: str, kind: str, subject: tuple[str, ...], number: int) -> str:
    """Return the id of an incident.

    Args:
        run: what all nodes know the run by; the name of the host for an incident of a node.
        number: of earlier incidents with the same run, kind and subject.
    """
    parts = (run, family(kind), *subject, *([str(number)] if number else []))
    return hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()[:16]
