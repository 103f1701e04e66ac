"""What a rule of the one list says, and what an alert is. Values only; ``rules.yaml`` is read by ``catalogue.py``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

#: From quiet to loud: worth knowing, worth a look today, worth waking somebody.
INFO, WARNING, CRITICAL = SEVERITIES = ("info", "warning", "critical")
PENDING, FIRING, RESOLVED = STATES = ("pending", "firing", "resolved")


def printable(text: str) -> str:
    """Text of others for one line that people read: a blank for white space, a question mark for what has no sign of its own.

    >>> printable("evil\\nBcc: a\\x1b[31m")
    'evil Bcc: a?[31m'
    """
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))


class OneLineError(ValueError):
    """An error whose message is one line, whatever of somebody's text is in it."""

    def __init__(self, says: str) -> None:
        super().__init__("".join(each if each.isprintable() else repr(each)[1:-1] for each in says))


@dataclass(frozen=True)
class Record:
    """A recording rule."""

    name: str
    #: PromQL, thresholds put in.
    expr: str
    #: Prometheus alone can tell: it takes the series of several agents, or of none.
    prometheus_only: bool = False


@dataclass(frozen=True)
class Rule:
    """One alert of the list."""

    #: In ``CamelCase``, as people know it; the heading of its section in the runbook. Rules of different severity may share one.
    name: str
    #: PromQL, thresholds put in: an element of the result is an alert, its value the number of the text.
    expr: str
    #: How long the condition must hold before the alert fires.
    for_s: float
    #: How long it goes on firing once the condition has ended.
    keep_firing_for_s: float
    #: One of ``SEVERITIES``.
    severity: str
    #: One line, in the template language of ``text.py``.
    summary: str
    #: What is wrong, with the numbers; same language.
    description: str
    #: Further numbers of the text: name to PromQL whose result has the labels ``on`` in common with the alert.
    also: Mapping[str, str] = field(default_factory=dict)
    #: Labels by which ``also`` is looked up.
    on: tuple[str, ...] = ()
    #: As in ``Record``.
    prometheus_only: bool = False


@dataclass(frozen=True)
class Alert:
    """One condition on one thing, from when it was first seen to after its end. Times are Unix seconds."""

    #: Of the rule that raised it.
    name: str
    #: Of the series, with ``alertname`` and ``severity``: what tells it apart from all others.
    labels: Mapping[str, str]
    #: ``summary``, ``description``, ``runbook_url``, and ``evidence_url`` where there is a bundle.
    annotations: Mapping[str, str]
    #: What the expression gave last.
    value: float
    #: One of ``STATES``.
    state: str
    #: When the condition was first seen.
    active_at: float
    fired_at: float | None = None
    resolved_at: float | None = None

    @property
    def id(self) -> str:
        """Names this occurrence: the same condition later on is another."""
        parts = [*(f"{name}={value}" for name, value in sorted(self.labels.items())), f"{self.active_at:.3f}"]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
