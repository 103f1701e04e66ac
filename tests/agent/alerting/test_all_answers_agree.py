"""Of a fault of any kind, from any source: the API, the metrics, the message and the history have the same incident."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from commwatch_agent.alerting.incident_watch import IncidentWatch, Plan
from commwatch_agent.history.history import History
from commwatch_agent.history.store import Writer
from commwatch_agent.incidents.answers import view_of
from commwatch_agent.incidents.evidence import Evidence
from commwatch_agent.incidents.incident import Incident
from commwatch_agent.incidents.stored import incidents_of
from commwatch_alerts.model import FIRING, Alert
from commwatch_collectors.nccl.views import Evidence as Line
from commwatch_collectors.nccl.views import Finding
from tests.agent.incidents.test_job_rules import GROUP, HANG, JOBS, NOW
from tests.agent.incidents.test_uneven_work import UNEVEN
from tests.agent.prometheus.test_metrics import samples
from tests.alerts.cases import Case
from tests.alerts.test_both_ways import SCENARIOS, TABLE, seen

AGENT = "/run/commwatch"
ERROR = Finding(
    "cuda_error", "error", "CUDA error", "an access", "A kernel failed.", "Look.", [Line("out", 7, "error")]
)


class Story(NamedTuple):
    """A fault, and what an agent sees of it."""

    kind: str
    #: Of its evidence.
    source: str
    looks: Callable[[], Iterable[Evidence]]


def of_case(case: Case) -> Iterator[Evidence]:
    return (evidence for _, evidence in seen(case))


def lasting(**about: Any) -> Callable[[], Iterator[Evidence]]:
    """The same for eight minutes."""
    known = Evidence(NOW, **{"jobs": JOBS, "groups": [GROUP], **about})
    return lambda: (replace(known, now=NOW + at_s) for at_s in range(0, 480, 5))


#: By kind, where it is not ``metrics``.
SOURCES = {
    **dict.fromkeys(("hang", "stalled", "init_incomplete", "desync", "corruption", "straggler"), "probe"),
    **dict.fromkeys(("gpu_fault", "gpu_underused"), "gpu"),
    **dict.fromkeys(("network_fault", "link_saturated"), "host"),
    "rank_lost": "ending",
    "slow_link": "tcp",
    "nccl_fault": "nccl_log",
}
STORIES = {
    **{kind: Story(kind, SOURCES.get(kind, "metrics"), partial(of_case, case)) for kind, case in SCENARIOS.items()},
    "hang that only RAS knows": Story("hang", "ras", lasting(verdicts=[replace(HANG, source="ras", seq=None)])),
    "long wait": Story("waiting", "probe", lasting(verdicts=[replace(HANG, kind="waiting", cause="not_joined")])),
    "error in a log": Story("nccl_fault", "nccl_log", lasting(errors={"train": [ERROR]})),
    "uneven work": Story("uneven_work", "probe", lasting(waits={"train": UNEVEN})),
}


class Agent:
    """It concludes and stores, under the clock of what it sees."""

    def __init__(self, directory: Path) -> None:
        self.path, self.look = directory / "history.sqlite", Evidence(NOW)
        self.store, self.delivered = Writer(self.path), list[Alert]()
        plan = Plan(TABLE, "a:9477", self.delivered.extend)
        self.watch = IncidentWatch(
            plan, lambda now, now_s: self.look, AGENT, clock=lambda: self.look.now, wall=lambda: self.look.now
        )

    def see(self, look: Evidence) -> None:
        self.look = look
        self.watch.tick()
        rows = self.watch.unstored()
        for _, row in rows:
            self.store.incident(row)
        if self.store.commit():
            self.watch.stored(rows)

    def found(self, kind: str) -> Incident | None:
        """The open incident of a kind, once its message is sent, if it has one."""
        of_kind = [each for each in self.watch.incidents() if each.kind == kind and each.state == "open"]
        return next((each for each in of_kind if self.sent(each) or not TABLE.rows[kind]), None)

    def sent(self, incident: Incident) -> list[Alert]:
        of_it = [each for each in self.delivered if each.annotations["incident"] == incident.id]
        return [each for each in of_it if each.state == FIRING]

    def stored(self, incident_id: str) -> Incident:
        with History(self.path) as history:
            (one,) = incidents_of(history.incidents(incident_id=incident_id))
        return one

    def open_series(self) -> list[dict[str, str]]:
        """The labels of ``commwatch_incident_open``."""
        registry = CollectorRegistry()
        registry.register(self.watch)
        page = samples(generate_latest(registry).decode())
        return [dict(labels) for (name, labels) in page if name == "commwatch_incident_open"]


@pytest.mark.parametrize("name", STORIES)
def test_all_answers_agree(tmp_path: Path, name: str) -> None:
    """The API, the metrics, the message and what is stored agree on kind, ranks, cause and begin, and the evidence is of the right source."""
    kind, source, looks = STORIES[name]
    agent, one = Agent(tmp_path), None
    with closing(agent.store):
        for look in looks():
            agent.see(look)
            if (one := agent.found(kind)) is not None:
                break
        assert one is not None
        shown, stored = view_of(one), agent.stored(one.id)
        # Figures are stored once a minute.
        figures = {name: getattr(stored, name) for name in ("last_at", "cost_rank_s", "share", "says")}
        assert view_of(stored) == replace(shown, **figures)
        assert source in {item.source for item in stored.evidence}
        ranks = {str(rank) for rank in shown.ranks} or {""}
        series = [each for each in agent.open_series() if (each["kind"], each["job_id"]) == (kind, shown.job_id)]
        assert {each["rank"] for each in series if each["severity"] == shown.severity} == ranks
        for alert in agent.sent(one)[-1:]:
            assert (alert.labels.get("job_id", ""), alert.annotations["cause"]) == (shown.job_id, shown.says)
            assert alert.labels.get("rank", "") in {"", *ranks}
