"""Rules of the list of alerts, and alerts, as plain values. ``catalogue.py`` reads ``rules.yaml``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

#: In increasing order: for information, to be checked the same day, worth waking a person.
INFO, WARNING, CRITICAL = SEVERITIES = ("info", "warning", "critical")
PENDING, FIRING, RESOLVED = STATES = ("pending", "firing", "resolved")


def printable(text: str) -> str:
    """Return foreign text as one line: white space becomes a blank, an unprintable character a question mark.

    >>> printable("evil\\nBcc: a\\x1b[31m")
    'evil Bcc: a?[31m'
    """
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))


class OneLineError(ValueError):
    """An error whose message is one line, even if it quotes text with line breaks."""

    def __init__(self, says: str) -> None:
        super().__init__("".join(each if each.isprintable() else repr(each)[1:-1] for each in says))


@dataclass(frozen=True)
class Record:
    """A recording rule."""

    name: str
    #: PromQL, with the values of thresholds filled in.
    expr: str


@dataclass(frozen=True)
class Rule:
    """One alert of the list."""

    #: Name in ``CamelCase``, and heading of its section in the runbook. Rules of different severity may share a name.
    name: str
    #: PromQL, with the values of thresholds filled in; each element of its result is an alert.
    expr: str
    #: Seconds for which the condition must hold before the alert fires.
    for_s: float
    #: Seconds for which it goes on firing after the condition has ended.
    keep_firing_for_s: float
    #: One of ``SEVERITIES``.
    severity: str
    _: KW_ONLY
    #: One line, in the template language of ``text.py``.
    summary: str
    #: What is wrong, with numbers, in the template language of ``text.py``.
    description: str
    #: Further numbers for the texts: PromQL by name. Its result and the alert share the labels ``on``.
    also: Mapping[str, str] = field(default_factory=dict)
    #: Labels that select the element of an ``also`` result for an alert.
    on: tuple[str, ...] = ()
    #: Only Prometheus raises it, because it needs series of several agents, or series that no agent has.
    prometheus_only: bool = False
    #: Name of its ``Kind``.
    kind: str = ""
    #: Which conditions of the kind it is about; empty: those without a variant.
    variant: str = ""
    #: The value of the condition must be above, or below, this number; ``None``: any value.
    above: float | None = None
    below: float | None = None

    def holds(self, variant: str, value: float) -> bool:
        """Return whether it applies to a condition of its kind."""
        high_enough = self.above is None or value > self.above
        return self.variant == variant and high_enough and (self.below is None or value < self.below)


@dataclass(frozen=True)
class Kind:
    """One kind of incident."""

    #: As in ``/api/v1/incidents``.
    name: str
    #: One of ``SEVERITIES``: of its incidents while none of its rules holds.
    severity: str
    #: Seconds for which its condition must hold before the incident is open; ``None``: until the first of its alerts fires.
    opens_after_s: float | None
    #: Seconds without its condition after which an incident ends.
    ends_after_s: float
    #: What it means, in one line.
    help: str
    #: Heading of the runbook: name of a rule.
    runbook: str
    enabled: bool = True


@dataclass(frozen=True)
class KindSettings:
    """What the settings change of a kind, for the agent and for Prometheus."""

    #: ``False``: it has no incidents and no alerts.
    enabled: bool = True
    #: One of ``SEVERITIES``: worse ones are lowered to it; ``None``: as listed.
    severity: str | None = None
    #: Seconds for which its condition must hold, for its incidents and for all its rules; ``None``: as listed.
    for_s: float | None = None


@dataclass(frozen=True)
class Alert:
    """One occurrence of a condition on one set of labels, from its start to after its end. Times are Unix seconds."""

    #: Name of its rule.
    name: str
    #: Labels of the series, with ``alertname`` and ``severity``; no two active alerts have equal labels.
    labels: Mapping[str, str]
    #: ``summary``, ``description``, ``runbook_url``, and ``evidence_url`` if there is a bundle.
    annotations: Mapping[str, str]
    #: Latest value of the expression.
    value: float
    #: One of ``STATES``.
    state: str
    _: KW_ONLY
    #: When the condition was first seen.
    active_at: float
    fired_at: float | None = None
    resolved_at: float | None = None

    @property
    def id(self) -> str:
        """Identifier of this occurrence; a later occurrence of the condition has another."""
        parts = [*(f"{name}={value}" for name, value in sorted(self.labels.items())), f"{self.active_at:.3f}"]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
