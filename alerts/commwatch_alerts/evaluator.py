"""From rules and samples to alerts: the state machine of Prometheus's alerting rules. No clock, file or thread.

The caller passes two times. Durations (``for``, ``keep_firing_for``, ranges) use a monotonic clock; the wall clock is only
for displayed times and for ``time()`` in expressions. So setting the wall clock neither fires nor resolves an alert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from commwatch_alerts.alert_json import as_json, from_json
from commwatch_alerts.model import FIRING, PENDING, RESOLVED, Alert, Record, Rule
from commwatch_alerts.promql import EvaluationError, Expression, Moment, UnsupportedExpression
from commwatch_alerts.series import NAME, Labels, Need, Samples, Vector, labels_of, value_of

#: No rule is warm in the first seconds after the start, even without a range, because gauges over the last minute have to
#: fill up.
LEAST_WARM_S = 60.0
#: Seconds without an agent after which a pending alert starts again; and a firing one is resolved (as by Alertmanager).
OUTAGE_S, AWAY_S = 3600.0, 300.0


class Render(Protocol):
    """Fills labels and numbers into a text of a rule."""

    def __call__(self, template: str, labels: Mapping[str, str], value: float, also: Mapping[str, float]) -> str:
        """Return the text."""


@dataclass(frozen=True)
class _Active:
    """An alert that is pending or firing."""

    alert: Alert
    #: When its condition was first seen, in monotonic seconds.
    since_s: float
    #: When its condition ended, in monotonic seconds, while ``keep_firing_for`` keeps it firing; else ``None``.
    ended_s: float | None = None
    #: It was active before a restart of the agent, so it cannot end before its rule is warm.
    restored: bool = False


def advanced(active: _Active, seen: bool, at_s: float, wall_s: float, rule: Rule, warm: bool) -> _Active | None:
    """Return the next state of an alert after one round; ``None``: it is dropped. A pure function of its arguments.

    Args:
        seen: its condition holds now.
        at_s: monotonic seconds.
        wall_s: Unix time in seconds.
        warm: the samples cover the ranges of its rule.
    """
    alert = active.alert
    if seen:
        if alert.state == PENDING and at_s - active.since_s >= rule.for_s:
            alert = replace(alert, state=FIRING, fired_at=wall_s)
        return replace(active, alert=alert, ended_s=None, restored=active.restored and not warm)
    if active.restored and not warm:
        return active
    if alert.state == PENDING:
        return None
    ended_s = at_s if active.ended_s is None else active.ended_s
    if at_s - ended_s < rule.keep_firing_for_s:
        return replace(active, ended_s=ended_s, restored=False)
    return replace(active, alert=replace(alert, state=RESOLVED, resolved_at=wall_s))


class _Watched:
    """A rule and its current alerts."""

    def __init__(self, rule: Rule, warm_of: Callable[[Expression], float]) -> None:
        self.rule = rule
        self.expression = _read(rule.name, rule.expr)
        self.also = {name: _read(f"{rule.name}, {name}", text) for name, text in rule.also.items()}
        self.warm_s = max(LEAST_WARM_S, warm_of(self.expression))
        self.active: dict[Labels, _Active] = {}

    def elements(self, moment: Moment) -> dict[Labels, float]:
        """Return the values of the expression, by the labels of the alerts."""
        found: dict[Labels, float] = {}
        for labels, value in self.expression.evaluate(moment).items():
            kept = {name: text for name, text in labels if name != NAME}
            named = labels_of({**kept, "alertname": self.rule.name, "severity": self.rule.severity})
            if named in found:
                raise EvaluationError(f"two alerts would be {dict(named)}")
            found[named] = value
        return found


class Evaluator:
    """Evaluates the rules of one agent, round after round.

    Recording rules come first, in order; their results become samples of the round. ``prometheus_only`` rules are
    skipped. A rule that fails keeps its alerts unchanged and does not stop the others.

    Args:
        render: fills in the texts of an alert.
        runbook_url: returns the URL of the runbook for a rule's name; ``None``: alerts have no such link.

    Raises:
        UnsupportedExpression: names the rule, and the part of it that the agent cannot evaluate.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        records: Sequence[Record],
        render: Render,
        runbook_url: Callable[[str], str] | None = None,
    ) -> None:
        self._render = render
        self._links = (
            {} if runbook_url is None else {rule.name: {"runbook_url": runbook_url(rule.name)} for rule in rules}
        )
        self._records = [(one.name, _read(one.name, one.expr)) for one in records if not one.prometheus_only]
        self._warm_records: dict[str, float] = {}
        for name, expression in self._records:
            self._warm_records[name] = self._warm_s(expression)
        self._watched = [_Watched(rule, self._warm_s) for rule in rules if not rule.prometheus_only]
        self._orphans: list[Alert] = []
        self._began_s: float | None = None
        self._seen_s = 0.0
        self._seen_wall_s: float | None = None
        #: Rules that failed in the latest round, with the reason.
        self.failing: dict[str, str] = {}

    @property
    def needs(self) -> list[Need]:
        """The samples that the rules read, to construct ``Samples`` with."""
        expressions = [expression for _, expression in self._records]
        for watched in self._watched:
            expressions += [watched.expression, *watched.also.values()]
        return [need for expression in expressions for need in expression.needs]

    def _warm_s(self, expression: Expression) -> float:
        """Return the longest range, in seconds, that an expression reads, directly or through recording rules."""
        recorded = (
            warm_s
            for name, warm_s in self._warm_records.items()
            for need in expression.needs
            if all(matcher.accepts(name) for matcher in need.names)
        )
        return max([*(need.range_s for need in expression.needs), *recorded], default=0.0)

    # -- one round ----------------------------------------------------------------------------

    def evaluate(self, at_s: float, wall_s: float, samples: Samples) -> list[Alert]:
        """Evaluate all rules once.

        Args:
            at_s: monotonic seconds, on the clock of the samples.
            wall_s: Unix time in seconds.
            samples: constructed with ``needs``; the results of recording rules are added to it.

        Returns:
            All pending and firing alerts, and those resolved in this round.
        """
        if self._began_s is None:
            self._began_s = at_s
        self._seen_s, self._seen_wall_s = at_s, wall_s
        self.failing = {}
        moment = Moment(samples, at_s, wall_s)
        for number, (name, expression) in enumerate(self._records):
            found = self._tried(name, partial(_recorded, name, expression, moment))
            if found is not None:
                samples.add(at_s, found, source=f"{number} {name}")
        resolved = [replace(alert, state=RESOLVED, resolved_at=wall_s) for alert in self._orphans]
        self._orphans = []
        for watched in self._watched:
            resolved += self._round(watched, moment)
        return [*self.active(), *resolved]

    def _tried(self, name: str, evaluate: Callable[[], Vector]) -> Vector | None:
        try:
            return evaluate()
        except EvaluationError as error:
            self.failing[name] = str(error)
            return None

    def _round(self, watched: _Watched, moment: Moment) -> list[Alert]:
        """Evaluate one rule; return the alerts that it resolves."""
        rule, at_s, wall_s = watched.rule, moment.at_s, moment.wall_s
        found = self._tried(rule.name, partial(watched.elements, moment))
        if found is None:
            return []
        assert self._began_s is not None
        warm = at_s - self._began_s >= watched.warm_s
        numbers = self._numbers(watched, moment) if found else {}
        resolved: list[Alert] = []
        for labels, value in found.items():
            active = watched.active.get(labels)
            if active is None:
                active = _Active(Alert(rule.name, dict(labels), {}, value, PENDING, active_at=wall_s), at_s)
            said = self._annotations(rule, active.alert.labels, value, numbers)
            watched.active[labels] = replace(active, alert=replace(active.alert, annotations=said, value=value))
        for labels, active in list(watched.active.items()):
            then = advanced(active, labels in found, at_s, wall_s, rule, warm)
            if then is not None and then.alert.state != RESOLVED:
                watched.active[labels] = then
                continue
            del watched.active[labels]
            if then is not None:
                resolved.append(then.alert)
        return resolved

    def _numbers(self, watched: _Watched, moment: Moment) -> dict[str, dict[Labels, float]]:
        """Return the ``also`` numbers of a rule's texts by name, each by the labels that it shares with the alerts."""
        on = watched.rule.on
        numbers: dict[str, dict[Labels, float]] = {}
        for name, expression in watched.also.items():
            found = self._tried(f"{watched.rule.name}, {name}", partial(expression.evaluate, moment))
            by_key: dict[Labels, list[float]] = {}
            for labels, value in (found or {}).items():
                by_key.setdefault(_key(labels, on), []).append(value)
            # Several values for one alert are ambiguous, so the number counts as not known.
            numbers[name] = {key: values[0] for key, values in by_key.items() if len(values) == 1}
        return numbers

    def _annotations(
        self, rule: Rule, labels: Mapping[str, str], value: float, numbers: Mapping[str, Mapping[Labels, float]]
    ) -> dict[str, str]:
        key = _key(labels_of(labels), rule.on)
        also = {name: by_key[key] for name, by_key in numbers.items() if key in by_key}
        texts = {"summary": rule.summary, "description": rule.description}
        rendered = {name: self._render(text, labels, value, also) for name, text in texts.items()}
        return {**rendered, **self._links.get(rule.name, {})}

    def active(self) -> list[Alert]:
        """Return the alerts that are pending or firing."""
        return [active.alert for watched in self._watched for active in watched.active.values()]

    # -- over a restart -----------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state to keep over a restart, as JSON types; durations in seconds, ``seen_at`` in Unix seconds."""
        return {
            "seen_at": self._seen_wall_s,
            "active": [
                {
                    "alert": as_json(one.alert),
                    "held_s": self._seen_s - one.since_s,
                    "ended_s": None if one.ended_s is None else self._seen_s - one.ended_s,
                }
                for watched in self._watched
                for one in watched.active.values()
            ],
        }

    def restore(self, state: Mapping[str, Any], at_s: float, wall_s: float) -> None:
        """Restore the state of an earlier agent. Call it before the first round.

        A pending alert keeps the time for which its condition held, without the outage between the agents; it is dropped
        after an outage of ``OUTAGE_S``. A firing alert is resolved in the first round if its rule is gone, or after an
        outage of ``AWAY_S``, because its job may have ended long ago. The others cannot end before their rules are warm,
        because missing samples do not show that a condition has ended.
        """
        self._seen_s, self._seen_wall_s = at_s, wall_s
        seen_at = state["seen_at"]
        away_s = max(0.0, wall_s - seen_at) if seen_at is not None else 0.0
        by_rule = {(watched.rule.name, watched.rule.severity): watched for watched in self._watched}
        for one in state["active"]:
            alert, ended_s = from_json(one["alert"]), one["ended_s"]
            watched = by_rule.get((alert.name, alert.labels.get("severity", "")))
            if alert.state == PENDING and (watched is None or away_s > OUTAGE_S):
                continue
            if watched is None or (alert.state == FIRING and away_s > AWAY_S):
                self._orphans.append(alert)
                continue
            since_s = at_s - one["held_s"]
            ended_s = None if ended_s is None else at_s - away_s - ended_s
            watched.active[labels_of(alert.labels)] = _Active(alert, since_s, ended_s, restored=True)

    def succeed(self, before: Evaluator) -> bool:
        """Take over the alerts of ``before``, this agent's evaluator of other rules. Call it before the first round.

        Returns:
            True if this evaluator can use the samples of ``before``, as when only thresholds differ. Otherwise, active
            alerts cannot end before their rules are warm.
        """
        same = set(self.needs) <= set(before.needs) and list(self._warm_records) == list(before._warm_records)
        if same:
            self._began_s = before._began_s
        self._orphans = list(before._orphans)
        self._seen_s, self._seen_wall_s = before._seen_s, before._seen_wall_s
        by_rule = {(watched.rule.name, watched.rule.severity): watched for watched in self._watched}
        for watched in before._watched:
            heir = by_rule.get((watched.rule.name, watched.rule.severity))
            if heir is None:
                self._orphans += [one.alert for one in watched.active.values() if one.alert.state == FIRING]
            else:
                heir.active = {
                    labels: replace(one, restored=one.restored or not same) for labels, one in watched.active.items()
                }
        return same


def _key(labels: Labels, on: tuple[str, ...]) -> Labels:
    return tuple((name, value_of(labels, name)) for name in on)


def _recorded(name: str, expression: Expression, moment: Moment) -> dict[Labels, float]:
    """Return the result of a recording rule, with the rule's name as metric name."""
    found: dict[Labels, float] = {}
    for labels, value in expression.evaluate(moment).items():
        named = labels_of({**dict(labels), NAME: name})
        if named in found:
            raise EvaluationError(f"two results would be {dict(named)}")
        found[named] = value
    return found


def _read(name: str, text: str) -> Expression:
    try:
        return Expression(text)
    except UnsupportedExpression as error:
        raise UnsupportedExpression(f"{name}: {error}") from None
