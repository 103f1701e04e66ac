"""The rules, evaluated by the agent itself over what it serves: for people without Prometheus."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from commwatch.alerts.book import Book, Kept, with_past
from commwatch.alerts.evaluator import Evaluator, Render
from commwatch.alerts.model import PENDING, RESOLVED, Alert, Record, Rule
from commwatch.alerts.series import NAME, Labels, Samples, labels_of
from commwatch.prometheus.families import Families

log = logging.getLogger("commwatch")


def as_it_is(template: str, labels: Mapping[str, str], value: float, also: Mapping[str, float]) -> str:
    """The text of a rule whose text is no template."""
    return template


@dataclass(frozen=True)
class Plan:
    """What an agent watches for, and whom it tells."""

    rules: Sequence[Rule] = ()
    records: Sequence[Record] = ()
    render: Render = as_it_is
    #: Where the runbook has its section on a rule of that name; ``None``: nowhere.
    runbook_url: Callable[[str], str] | None = None
    #: Gets all alerts that are firing, each round, and those resolved in it. Must not block.
    deliver: Callable[[Sequence[Alert]], object] = lambda alerts: None
    #: Tells this node's series from those of others; empty: nothing does.
    instance: str = ""
    #: Seconds between two rounds.
    every_s: float = 15.0


def _evaluator(plan: Plan) -> Evaluator:
    return Evaluator(plan.rules, plan.records, plan.render, plan.runbook_url)


class Alerting(Collector):
    """Evaluates the rules every few seconds, keeps the book, and hands on what fires or is over.

    Args:
        collect: the families that ``/metrics`` shows.
        clock: one that never goes back: durations go by it.
        wall: Unix time: what people read.

    Raises:
        UnsupportedExpression: names the rule that the agent cannot evaluate.
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
        #: What counts from the next look on.
        self._coming: tuple[Plan, Evaluator] | None = None
        self._next_s = clock()
        self._failing: set[str] = set()
        self._failures, self._seconds = 0, 0.0
        kept = book.load()
        if kept is not None:
            self._evaluator.restore(kept.state, clock(), wall())
        self._shown = (tuple(self._evaluator.active()), () if kept is None else kept.past)

    def prepared(self, plan: Plan) -> Callable[[], None]:
        """Make ready for another plan; alerts of rules that stay go on, those of others end.

        Returns:
            What takes it up; a round follows soon.

        Raises:
            UnsupportedExpression: as at the start.
        """
        coming = plan, _evaluator(plan)

        def apply() -> None:
            self._coming = coming

        return apply

    def tick(self) -> None:
        """A round, if it is time; once a second is often enough to ask."""
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
        # Before anybody is told: what was told must not be forgotten.
        self._book.save(Kept(self._evaluator.state(), past), now_s)
        told = [alert for alert in alerts if alert.state != PENDING]
        if told:
            self.plan.deliver(told)
        # Last, so that an alert that is shown has the address of its evidence.
        self._shown = (tuple(alert for alert in alerts if alert.state != RESOLVED), past)

    def _wanted(self) -> Iterator[tuple[Labels, float]]:
        here = {"instance": self.plan.instance} if self.plan.instance else {}
        for family in self._collect():
            for sample in family.samples:
                if self._samples.wants(sample.name):
                    yield labels_of({**here, **sample.labels, NAME: sample.name}), sample.value

    def _say(self) -> None:
        """What fails is said when it begins to."""
        failing = dict(self._evaluator.failing)
        self._failures += len(failing)
        if self._samples.refused:
            failing["samples"] = "there are too many series; further ones are not watched"
        for name, why in failing.items():
            if name not in self._failing:
                log.warning("alerts: %s: %s", name, why)
        self._failing = set(failing)

    def close(self) -> None:
        """Leave on disk what is active, and since when."""
        self._book.save(Kept(self._evaluator.state(), self._shown[1]), self._clock(), last=True)

    def alerts(self) -> tuple[tuple[Alert, ...], tuple[Alert, ...]]:
        """What is pending or firing, and what is over, newest first."""
        return self._shown

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: the registry need not collect at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """How many alerts there are, and what evaluating them costs; nothing where there are no rules."""
        if not self.plan.rules:
            return
        families = Families()
        active = Counter((one.name, one.labels.get("severity", ""), one.state) for one in self._shown[0])
        for labels, number in active.items():
            families.add("alerts", labels, number)
        families.add("alert_evaluation_seconds_total", (), self._seconds)
        families.add("alert_evaluation_failures_total", (), self._failures)
        yield from families.values()
