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

from commwatch_agent.analysis.flight_recorder_analysis import JOB
from commwatch_agent.history.history import History
from commwatch_agent.history.store import Writer
from commwatch_agent.incidents.answers import view_of
from commwatch_agent.incidents.evidence import Evidence
from commwatch_agent.incidents.incident import JOB_ENDED, Incident
from commwatch_agent.incidents.stored import incidents_of
from commwatch_agent.incidents.verdict_views import KINDS, verdicts_of
from commwatch_agent.notify.incident_watch import IncidentWatch, Plan
from commwatch_alerts.model import FIRING, Alert
from commwatch_collectors.nccl.views import Evidence as Line
from commwatch_collectors.nccl.views import Finding
from tests.agent.analysis.test_flight_recorder_analysis import taken
from tests.agent.incidents.test_job_rules import GROUP, HANG, JOBS, NOW, rank
from tests.agent.incidents.test_uneven_work import UNEVEN
from tests.agent.prometheus.test_metrics import samples
from tests.alerts.cases import Case
from tests.alerts.test_both_ways import SCENARIOS, TABLE, seen
from tests.collectors.node.test_flight_recorder import entry, pending

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


OVER = {"train": JOBS["train"]._replace(ended=True)}
ALIVE = [rank(number) for number in range(4)]
RAISED = replace(ALIVE[0], state="ended", raised="ValueError", raised_at="load (train.py:88)", ended_at=NOW - 5)
SIZES = replace(HANG, kind="desync", cause="sizes", says="sizes differ: rank 1: 8 bytes; ranks 0, 2-3: 4 bytes")
DUMPS = [taken(0, entry(0, 1), pending(1, 2), after_s=90), taken(1, entry(0, 1), after_s=90)]
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
    "hang of a stopped rank": Story("hang", "probe", lasting(verdicts=[HANG])),
    "destroyed group": Story("hang", "probe", lasting(verdicts=[replace(HANG, cause="destroyed")], ranks=ALIVE)),
    "sizes differ": Story("desync", "probe", lasting(verdicts=[SIZES], ranks=ALIVE)),
    "sizes differ, and one rank has raised": Story(
        "desync", "probe", lasting(verdicts=[SIZES], ranks=[*ALIVE[1:], RAISED])
    ),
    "exception of the loader": Story("rank_lost", "ending", lasting(ranks=[*ALIVE[1:], RAISED])),
    "out of memory": Story(
        "rank_lost", "ending", lasting(ranks=[*ALIVE[1:], replace(RAISED, raised="OutOfMemoryError")])
    ),
    "killed rank": Story(
        "rank_lost", "ending", lasting(ranks=[*ALIVE[1:], replace(RAISED, state="gone", raised=None)])
    ),
    "dumps of the Flight Recorder": Story(
        "stalled", "flight_recorder", lasting(jobs={JOB: JOBS["train"]}, dumps=DUMPS)
    ),
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

    def series(self, wanted: str) -> list[dict[str, str]]:
        """The labels of a metric."""
        registry = CollectorRegistry()
        registry.register(self.watch)
        page = samples(generate_latest(registry).decode())
        return [dict(labels) for (name, labels) in page if name == wanted]


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
        opened, judged = (
            [
                each
                for each in agent.series(f"commwatch_{name}")
                if (each["kind"], each["job_id"]) == (kind, shown.job_id)
            ]
            for name in ("incident_open", "verdict_seconds")
        )
        assert {each["rank"] for each in opened if each["severity"] == shown.severity} == ranks
        assert {each["rank"] for each in judged} == (ranks if kind in KINDS else set())
        now = agent.look.now
        verdicts = [each for each in verdicts_of(agent.watch.incidents(), now, shown.job_id) if each.kind == kind]
        told = [(each.ranks, each.waiting, each.cause, each.since_s) for each in verdicts]
        assert told == [(shown.ranks, shown.waiting, shown.cause, now - shown.began_at)] * (kind in KINDS)
        for alert in agent.sent(one)[-1:]:
            assert (alert.labels.get("job_id", ""), alert.annotations["cause"]) == (shown.job_id, shown.says)
            assert alert.labels.get("rank", "") in {"", *ranks}


def test_stopped_for_a_minute_and_killed(tmp_path: Path) -> None:
    """A rank that is stopped for a minute and then killed is one hang to the job's end; its loss is a consequence, with no message of its own."""
    agent = Agent(tmp_path)
    dead = replace(HANG, cause="dead", says="process dead: rank 1 died")
    lost = replace(RAISED, rank=1, state="gone", raised=None, ended_at=NOW + 60)
    with closing(agent.store):
        for at_s in range(75):
            here = [ALIVE[0], lost, *ALIVE[2:]] if at_s > 60 else ALIVE
            verdict = replace(dead if at_s > 60 else HANG, since_s=12.0 + at_s)
            agent.see(Evidence(NOW + at_s, JOBS if at_s < 72 else OVER, [verdict], here, [GROUP]))
        found = {each.kind: agent.stored(each.id) for each in agent.watch.incidents()}
        assert found.keys() == {"hang", "rank_lost"}
        hang, rank_lost = found["hang"], found["rank_lost"]
        assert (hang.cause, hang.ranks, hang.began_at, hang.outcome) == ("stopped", (1,), NOW - 12, JOB_ENDED)
        assert (rank_lost.consequence_of, hang.consequence_of, rank_lost.outcome) == (hang.id, None, JOB_ENDED)
        assert hang.number == 0
        assert agent.sent(hang)
        assert not agent.sent(rank_lost)
        assert verdicts_of(agent.watch.incidents(), NOW + 75) == []
