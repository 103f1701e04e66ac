"""Evaluates the alert rules in the agent, over the metrics that it serves: for users without Prometheus."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from commwatch_agent.prometheus.families import Families
from commwatch_alerts.book import Book, Kept, with_past
from commwatch_alerts.evaluator import Evaluator, Render
from commwatch_alerts.model import PENDING, RESOLVED, Alert, Record, Rule
from commwatch_alerts.series import NAME, Labels, Samples, labels_of

log = logging.getLogger("commwatch")
#: Seconds between two rounds of an agent.
_ROUND_S = 15.0


def as_it_is(template: str, labels: Mapping[str, str], value: float, also: Mapping[str, float]) -> str:
    """Return ``template`` unchanged: for rules whose text has no placeholders."""
    return template


@dataclass(frozen=True)
class Plan:
    """The rules that an agent evaluates, and where it delivers the alerts."""

    rules: Sequence[Rule] = ()
    records: Sequence[Record] = ()
    render: Render = as_it_is
    #: Returns the URL of the runbook section on a rule, given its name; ``None``: no links.
    runbook_url: Callable[[str], str] | None = None
    #: Gets all firing alerts in each round, and those resolved in it. Must not block.
    deliver: Callable[[Sequence[Alert]], object] = lambda alerts: None
    #: Label ``instance`` of this node's series; empty: no such label.
    instance: str = ""
    #: Seconds between two rounds.
    every_s: float = field(default_factory=lambda: _ROUND_S)


def _evaluator(plan: Plan) -> Evaluator:
    return Evaluator(plan.rules, plan.records, plan.render, plan.runbook_url)


class Alerting(Collector):
    """Evaluates the rules every ``Plan.every_s`` seconds, saves their state, and delivers firing and resolved alerts.

    Args:
        collect: returns the families that ``/metrics`` shows.
        book: the file that keeps the state over restarts.
        clock: monotonic time in s, for durations.
        wall: Unix time in s, for times that people read.

    Raises:
        UnsupportedExpression: the agent cannot evaluate a rule; the message names it.
    """

    def __init__(
        self,
        plan: Plan,
        collect: Callable[[], Iterable[Metric]],
        book: Book,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.plan, self._collect, self._book = plan, collect, book
        self._clock, self._wall = clock, wall
        self._evaluator = _evaluator(plan)
        self._samples = Samples(self._evaluator.needs)
        #: Takes effect with the next ``tick``.
        self._coming: tuple[Plan, Evaluator] | None = None
        self._next_s = clock()
        self._failing: set[str] = set()
        self._failures, self._seconds = 0, 0.0
        kept = book.load()
        if kept is not None:
            self._evaluator.restore(kept.state, clock(), wall())
        self._shown = (tuple(self._evaluator.active()), () if kept is None else kept.past)

    def prepared(self, plan: Plan) -> Callable[[], None]:
        """Prepare another plan. Alerts of rules in both plans continue; alerts of other rules end.

        Returns:
            A function that makes the next ``tick`` use the plan.

        Raises:
            UnsupportedExpression: the agent cannot evaluate a rule of the plan.
        """
        coming = plan, _evaluator(plan)

        def apply() -> None:
            self._coming = coming

        return apply

    def tick(self) -> None:
        """Run a round if one is due; call this about once a second."""
        now_s = self._clock()
        if self._coming is not None:
            (self.plan, evaluator), self._coming = self._coming, None
            if not evaluator.succeed(self._evaluator):
                self._samples = Samples(evaluator.needs)
            self._evaluator, self._next_s = evaluator, now_s
        if now_s < self._next_s:
            return
        planned_s = self._next_s + self.plan.every_s
        self._next_s = planned_s if planned_s > now_s else now_s + self.plan.every_s
        self._round(now_s, self._wall())
        self._seconds += self._clock() - now_s

    def _round(self, now_s: float, wall_s: float) -> None:
        self._samples.add(now_s, dict(self._wanted()))
        alerts = self._evaluator.evaluate(now_s, wall_s, self._samples)
        self._say()
        past = with_past(self._shown[1], (alert for alert in alerts if alert.state == RESOLVED), wall_s)
        # Saved before delivery, because a crash must not lose an alert that was delivered.
        self._book.save(Kept(self._evaluator.state(), past), now_s)
        due = [alert for alert in alerts if alert.state != PENDING]
        if due:
            self.plan.deliver(due)
        # After delivery, which requests the evidence, so that each alert in the API has the URL of its bundle.
        self._shown = (tuple(alert for alert in alerts if alert.state != RESOLVED), past)

    def _wanted(self) -> Iterator[tuple[Labels, float]]:
        here = {"instance": self.plan.instance} if self.plan.instance else {}
        for family in self._collect():
            for sample in family.samples:
                if self._samples.wants(sample.name):
                    yield labels_of({**here, **sample.labels, NAME: sample.name}), sample.value

    def _say(self) -> None:
        """Log each failure once, when it begins."""
        failing = dict(self._evaluator.failing)
        self._failures += len(failing)
        if self._samples.refused:
            failing["samples"] = "there are too many series; further ones are not watched"
        for name, why in failing.items():
            if name not in self._failing:
                log.warning("alerts: %s: %s", name, why)
        self._failing = set(failing)

    def close(self) -> None:
        """Save the active alerts, and for how long each has been active."""
        self._book.save(Kept(self._evaluator.state(), self._shown[1]), self._clock(), last=True)

    def alerts(self) -> tuple[tuple[Alert, ...], tuple[Alert, ...]]:
        """Return the alerts that are pending or firing, and the resolved ones, newest first."""
        return self._shown

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that the registry does not collect at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the number of alerts and the cost of evaluation; nothing without rules."""
        if not self.plan.rules:
            return
        families = Families()
        active = Counter((one.name, one.labels.get("severity", ""), one.state) for one in self._shown[0])
        for labels, number in active.items():
            families.add("alerts", labels, number)
        families.add("alert_evaluation_seconds_total", (), self._seconds)
        families.add("alert_evaluation_failures_total", (), self._failures)
        yield from families.values()
