"""One recorded scenario of each kind of incident: the agent's message on it, and the exported rule in Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.incidents.alerts import alerts_of
from commwatch_agent.incidents.conclude import conclude
from commwatch_agent.incidents.evidence import Evidence, KnownJob
from commwatch_agent.incidents.incident import Incident
from commwatch_agent.incidents.lifecycle import Around, Table
from commwatch_agent.model.views import RankView
from commwatch_alerts.delivery import Delivery
from commwatch_alerts.model import FIRING, Alert
from commwatch_alerts.receivers.opening import receivers
from commwatch_alerts.receivers.settings import RECEIVERS
from tests.agent.incidents.metric_series import BEGIN_S, CATALOGUE, LIMITS, labels_and_name, samples, windows
from tests.agent.incidents.test_slow_links import FIFTH_OF_FOUR, ring
from tests.alerts.cases import CASES, Case
from tests.alerts.promtool import evaluate
from tests.helpers import wait_for
from tests.receivers import Server

TABLE = Table(CATALOGUE.kinds, {name: CATALOGUE.rows(name) for name in CATALOGUE.kinds}, LIMITS)
#: Kinds of which an agent raises alerts, each with a scenario.
SCENARIOS = {
    kind: next(case for case in CASES if case.severities and case.alert in {rule.name for rule in rows})
    for kind, rows in TABLE.rows.items()
    if rows
}
#: What a verdict of a kind is about.
CAUSES = {
    "hang": "stopped",
    "stalled": "not_joined",
    "init_incomplete": "not_come",
    "desync": "ops",
    "corruption": "weights",
    "straggler": "late",
}


def test_every_kind_has_one() -> None:
    """All kinds of which an agent raises alerts are here."""
    assert len(SCENARIOS) == 18


@pytest.mark.parametrize("kind", SCENARIOS)
def test_both(tmp_path: Path, kind: str) -> None:
    """The agent sends the alert of the scenario, of its kind, and Prometheus fires the exported rule over the same series."""
    case = SCENARIOS[kind]
    evaluate(tmp_path, CATALOGUE, [case])
    fired = {(alert.name, alert.labels["severity"]): alert for _, alert in firing(case)}
    assert {(case.alert, severity) for severity in case.severities} <= fired.keys()
    assert {incident.kind for incident, alert in firing(case) if alert.name == case.alert} == {kind}
    with Server() as server:
        settings = RECEIVERS.checked(
            [{"kind": "webhook", "name": "hook", "url": server.url, "severity": "info"}], "receivers"
        )
        delivery = Delivery(receivers(settings, "http://agent"))
        try:
            delivery.send(list(fired.values()))
            wait_for(lambda: case.alert in names(server), "the message")
        finally:
            delivery.close(5.0)


def names(server: Server) -> set[str]:
    return {one["labels"]["alertname"] for asked in list(server.asked) for one in asked.json["alerts"]}


def firing(case: Case) -> Iterator[tuple[Incident, Alert]]:
    """The alerts that fire while the series of a case go by, with their incidents."""
    known: list[Incident] = []
    for at_s, evidence in seen(case):
        ended = {job.run for job in evidence.jobs.values() if job.ended}
        around = Around(evidence.now, ended if at_s > 600 else (), host="a", instance="a:9477")
        known = conclude(evidence, known, TABLE, around)
        yield from ((each, alert) for each in known for alert in alerts_of(each) if alert.state == FIRING)


def seen(case: Case) -> Iterator[tuple[int, Evidence]]:
    """What an agent knows that has exported the series of a case, every 15 s, with the seconds since the first."""
    for at_s, window in windows(case.series):
        there = {name: values[at_s // 15] for name, values in rows_of(case) if at_s // 15 < len(values)}
        verdicts, ranks = list(verdicts_in(there)), list(ranks_in(there))
        jobs = {
            name: KnownJob("key", 4, ended=len(ranks) > 1 and not any(view.state == "running" for view in ranks))
            for name in ("j", "k")
        }
        yield at_s, Evidence(BEGIN_S + at_s, jobs, verdicts, ranks, metrics=window)


Name = tuple[str, tuple[tuple[str, str], ...]]


def rows_of(case: Case) -> Iterator[tuple[Name, list[float | None]]]:
    for text, notation in case.series.items():
        name, labels = labels_and_name(text)
        yield (name, tuple(labels.items())), samples(notation)


def verdicts_in(there: Mapping[Name, float | None]) -> Iterator[Verdict]:
    """The verdicts of which an agent has exported these series."""
    for (name, pairs), value in there.items():
        labels = dict(pairs)
        if value is None or name not in ("commwatch_verdict_seconds", "commwatch_straggler_wait_ratio"):
            continue
        kind = labels.get("kind", "straggler")
        ranks = [int(labels["rank"])] if labels["rank"] else []
        about = (kind, CAUSES[kind], labels["job_id"], labels["group_id"], labels["group"])
        late = name == "commwatch_straggler_wait_ratio"
        seq, since_s, share = (None, 30.0, value) if late else (7, value, None)
        yield Verdict(*about, seq, "all_reduce", ranks, [2, 3], since_s, "wrong", cost_share=share)


def ranks_in(there: Mapping[Name, float | None]) -> Iterable[RankView]:
    """The ranks of which an agent has exported that they are up or lost, or wait for a slow link."""
    for (name, pairs), up in there.items():
        labels = dict(pairs)
        if labels.get("kind") == "slow_link":
            yield from (replace(view, job_id=labels["job_id"]) for view in ring(*FIFTH_OF_FOUR))
        if name == "commwatch_rank_up" and up is not None:
            state = "running" if up else "gone"
            view = RankView(
                labels["job_id"], int(labels["rank"]), 0, state, "a", 0, 1, "native", None, None, {}, {}, [], [], 0, 0
            )
            yield view
