"""The rules on metrics beside the table: what Prometheus finds in a series, the agent finds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest

from commwatch_agent.incidents.incident import Condition
from commwatch_agent.incidents.lifecycle import Around, Table, advanced
from commwatch_agent.incidents.metric_rules import METRIC_NAMES, METRIC_RULES
from commwatch_agent.incidents.metric_window import MetricWindow
from commwatch_agent.prometheus.metrics import METRICS
from commwatch_alerts.model import SEVERITIES, Rule
from commwatch_alerts.text import render
from tests.agent.incidents.metric_series import BEGIN_S, CATALOGUE, LIMITS, windows
from tests.alerts.cases import CASES, Case

#: The rows of the table that these rules are about.
ROWS = [row for kind, _ in METRIC_RULES for row in CATALOGUE.rows(kind)]
NAMES = {row.name for row in ROWS}
TABLE = Table(CATALOGUE.kinds, {name: CATALOGUE.rows(name) for name in CATALOGUE.kinds})


def conditions(window: MetricWindow, now_s: float) -> list[Condition]:
    """What all rules find."""
    return [one for _, rule in METRIC_RULES for one in rule(window, LIMITS, now_s)]


def texts(rule: Rule, found: Condition) -> list[str]:
    """Summary and description of an alert."""
    return [render(text, found.labels, found.value, found.numbers) for text in (rule.summary, rule.description)]


def fires(rule: Rule, case: Case) -> tuple[int, Condition] | None:
    """When a row first holds for as long as it must, and for what."""
    since: dict[tuple[str, ...], int] = {}
    for at_s, window in windows(case.series):
        found = [
            one
            for one in conditions(window, BEGIN_S + at_s)
            if one.kind == rule.kind and rule.holds(one.variant, one.value)
        ]
        since = {one.key: since.get(one.key, at_s) for one in found}
        for one in found:
            if at_s - since[one.key] >= rule.for_s:
                return at_s, one
    return None


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.alert in NAMES], ids=lambda case: f"{case.alert}: {case.why}"
)
def test_every_case(case: Case) -> None:
    """Each row holds when Prometheus's alert of the same name holds, with its labels and texts, and at no other time."""
    for rule in (row for row in ROWS if row.name == case.alert):
        fired = fires(rule, case)
        if rule.severity not in case.severities:
            assert fired is None
            continue
        assert fired is not None
        at_s, found = fired
        labels = {name: value for name, value in case.labels.items() if name != "job"}
        expected = replace(found, labels=labels, value=case.value, numbers=case.also)
        assert (at_s, found.labels, texts(rule, found)) == (case.at_s, labels, texts(rule, expected))


def test_every_kind_has_a_rule_of_its_own() -> None:
    """The rules are about different kinds, and each kind has rows."""
    kinds = [kind for kind, _ in METRIC_RULES]
    assert len(kinds) == len(set(kinds))
    assert {row.kind for row in ROWS} == set(kinds)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.alert}: {case.why}")
def test_only_what_a_row_is_about(case: Case) -> None:
    """A condition is found exactly when a row holds; no two of one incident are about the same row; and each is complete."""
    for at_s, window in islice(windows(case.series), 0, None, 7):
        found = conditions(window, BEGIN_S + at_s)
        for one in found:
            assert any(row.kind == one.kind and row.holds(one.variant, one.value) for row in ROWS)
            assert one.began_at == BEGIN_S + at_s
            assert one.says.isprintable()
            (item,) = one.evidence
            assert (item.at, item.text.isprintable(), bool(item.text)) == (one.began_at, True, True)
            assert bool(one.job_id) == ("job_id" in one.labels)
            assert one.nodes == (("a",) if "instance" in one.labels else ())
        assert not [key for key, number in Counter((one.key, one.variant) for one in found).items() if number > 1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.alert}: {case.why}")
def test_no_worse_than_its_alerts(case: Case) -> None:
    """Before its first alert fires, an incident is no worse than the alerts whose rows hold: what is for information only is no warning."""
    for at_s, window in islice(windows(case.series), 0, None, 7):
        for one in conditions(window, BEGIN_S + at_s):
            of_rows = [row.severity for row in ROWS if row.kind == one.kind and row.holds(one.variant, one.value)]
            worst = max(map(SEVERITIES.index, of_rows))
            (incident,) = advanced([one], [], TABLE, Around(BEGIN_S + at_s))
            assert SEVERITIES.index(incident.severity) <= worst, one.says


def test_nothing_is_known() -> None:
    """A window without snapshots, and one with an empty snapshot, has no condition."""
    window = MetricWindow(METRIC_NAMES)
    assert conditions(window, BEGIN_S) == []
    window.add(0.0, [])
    assert conditions(window, BEGIN_S) == []


def test_metrics_exist() -> None:
    """The rules read only metrics that agents export."""
    assert {spec.name for spec in METRICS.values()} >= METRIC_NAMES
