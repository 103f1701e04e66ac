"""Concludes once a second what is wrong, and keeps it: open incidents in memory, all in the history; alerts are made of them."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from socket import gethostname

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.history.rows import IncidentRow
from commwatch_agent.incidents.alerts import alerts_of, is_explained, with_cause
from commwatch_agent.incidents.conclude import FINDERS, Finder, conclude
from commwatch_agent.incidents.evidence import Evidence
from commwatch_agent.incidents.incident import OF_RANKS, EvidenceItem, Incident
from commwatch_agent.incidents.lifecycle import Around, Table
from commwatch_agent.incidents.stored import incidents_of, row_of
from commwatch_agent.incidents.verdict_views import verdicts_of
from commwatch_agent.notify.journal import Journal
from commwatch_agent.prometheus.families import Families
from commwatch_alerts.model import FIRING, PENDING, RESOLVED, Alert

#: Seconds after the start in which nothing ends because it is not found: gauges over the last minute have to fill up.
SETTLED_S = 60.0
#: Seconds between writes of an incident that only goes on; for so long the alerts of one that has changed wait until it is in the history.
_REFRESH_S, _UNSTORED_S = 10.0, 5.0
#: A difference between the clocks that has changed by so many seconds means that the wall clock was set.
_STEP_S = 1.0
#: What was concluded so many seconds ago is of now.
_MOMENT_S = 0.25
#: Most ended incidents in memory, most series of one incident, and most verdicts in ``/metrics``: the oldest, stragglers last.
_MOST_ENDED, MOST_RANKS, MOST_VERDICTS = 1000, 8, 16


@dataclass(frozen=True)
class Plan:
    """How an agent concludes, and where it delivers the alerts."""

    table: Table
    #: Label ``instance`` of this node in alerts that are about it; empty: no such label.
    instance: str = ""
    #: Gets all firing alerts after each look, and those that have ended, once. Must not block.
    deliver: Callable[[Sequence[Alert]], object] = lambda alerts: None
    finders: Sequence[Finder] = FINDERS
    #: Labels of the settings, for all alerts.
    labels: Mapping[str, str] = field(default_factory=dict)


class IncidentWatch(Collector):
    """Concludes, keeps and tells what is wrong; any thread may call it.

    Args:
        look: returns what is known, given Unix time and monotonic seconds.
        agent: run directory of this agent, by which it finds its incidents in the history.
        kept: incidents of this agent in the history.
        clock: monotonic time in s.
        wall: Unix time in s.
    """

    def __init__(
        self,
        plan: Plan,
        look: Callable[[float, float], Evidence],
        agent: str,
        kept: Iterable[IncidentRow] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.plan, self._look, self._agent = plan, look, agent
        self._clock, self._wall, self._host = clock, wall, gethostname()
        self._began_s = clock()
        #: When the last look began from which all has been concluded.
        self._looked_s = float("-inf")
        self._offset_s = wall() - clock()
        self._lock, self._looking = threading.Lock(), threading.Lock()
        self._incidents: list[Incident] = list(incidents_of(kept))
        self._journal = Journal(wall(), self._incidents)
        #: By id: those that are to be stored, and since when they wait (monotonic).
        self._unstored: dict[str, tuple[Incident, float]] = {}
        #: By id: what was stored last, and when.
        self._written: dict[str, tuple[tuple[object, ...], float]] = {
            each.id: (_gist(each), self._began_s) for each in self._incidents
        }
        #: Ids of alerts that were delivered, and whose end was not.
        self._told = {alert.id for each in self._incidents for alert in alerts_of(each) if alert.state == FIRING}
        self._items: dict[str, list[EvidenceItem]] = {}
        self._whole: frozenset[str] = frozenset()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._costs: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._seconds = 0.0

    def change(self, plan: Plan) -> None:
        """Use another plan from the next look on. Incidents of kinds that it lacks end."""
        self.plan = plan

    def tick(self) -> None:
        """Look, conclude, and deliver; call this about once a second."""
        with self._looking:
            self._conclude()

    def current(self) -> list[Incident]:
        """Return the incidents after a look at this moment, or a moment ago."""
        with self._looking:
            if self._clock() - self._looked_s >= _MOMENT_S:
                self._conclude()
        return self.incidents()

    def _conclude(self) -> None:
        now_s, now = self._clock(), self._wall()
        before = self._in_step(now - now_s)
        look = self._look(now, now_s)
        self._whole = frozenset(look.whole)
        settled = now_s - self._began_s >= SETTLED_S
        owners = {name: ", ".join(filter(None, (job.user, job.script))) for name, job in look.jobs.items()}
        ended = self._ended_runs(look, before, settled)
        since = now - (now_s - self._began_s)
        around = Around(
            now, ended, look.common, self._host, self.plan.instance, owners, settled, since, self.plan.labels
        )
        with self._lock:
            items, self._items = self._items, {}
        before = [replace(each, evidence=(*each.evidence, *items.get(each.id, ()))) for each in before]
        after = _pruned(conclude(look, before, self.plan.table, around, self.plan.finders))
        self._count(before, after, {"", *look.jobs})
        with self._lock:
            self._incidents = after
            self._note_changes(now_s)
            self._looked_s = now_s
        self._journal(look, after)
        self._deliver(now_s, look.led_elsewhere)
        self._seconds += self._clock() - now_s

    def _in_step(self, offset_s: float) -> list[Incident]:
        """Return the incidents; if the wall clock was set, with times by the new one."""
        delta_s, self._offset_s = offset_s - self._offset_s, offset_s
        if abs(delta_s) < _STEP_S:
            return self._incidents
        return [each if each.is_closed else _shifted(each, delta_s) for each in self._incidents]

    def _ended_runs(self, look: Evidence, known: Iterable[Incident], settled: bool) -> set[str]:
        """Return the keys of the runs that are over: none of their ranks is alive, or they are no longer in memory."""
        live = {job.run or name for name, job in look.jobs.items() if not job.ended}
        of_jobs = {job.run or name for name, job in look.jobs.items()}
        gone = {each.run or each.job_id for each in known if each.job_id} if settled else set()
        return (of_jobs | gone) - live

    def _count(self, before: Iterable[Incident], after: Iterable[Incident], jobs: Collection[str]) -> None:
        """Count what is new; the series of jobs that are no longer in memory go, as all others of them do."""
        for gone in [each for each in self._counts.keys() | self._costs.keys() if each[0] not in jobs]:
            self._counts.pop(gone, None)
            self._costs.pop(gone, None)
        costs = {each.id: (each.state, each.cost_rank_s or 0.0) for each in before}
        for each in after:
            state, cost = costs.get(each.id, ("", 0.0))
            if each.state == "pending" or each.job_id not in jobs:
                continue
            self._counts[each.job_id, each.kind] += state in ("", "pending")
            if each.cost_rank_s is not None:
                self._costs[each.job_id, each.kind] += max(
                    0.0, each.cost_rank_s - (cost if state == "open" else 0.0)
                ) * (state != "ended")

    # -- history --------------------------------------------------------------------------------

    def _note_changes(self, now_s: float) -> None:
        """Note which incidents are to be stored."""
        for each in self._incidents:
            gist, written_s = self._written.get(each.id, (None, float("-inf")))
            if _gist(each) != gist or (each.ended_at is None and now_s - written_s >= _REFRESH_S):
                self._unstored.setdefault(each.id, (each, now_s))
                self._unstored[each.id] = each, self._unstored[each.id][1]
        here = {each.id for each in self._incidents}
        self._written = {each: kept for each, kept in self._written.items() if each in here}

    def unstored(self) -> list[tuple[Incident, IncidentRow]]:
        """Return the incidents that are to be written to the history; call ``stored`` once they are."""
        with self._lock:
            return [(each, row_of(each, self._agent)) for each, _ in self._unstored.values()]

    def stored(self, rows: Iterable[tuple[Incident, IncidentRow]]) -> None:
        """Take in that incidents are in the history."""
        with self._lock:
            for incident, _ in rows:
                self._written[incident.id] = _gist(incident), self._clock()
                if incident.id in self._unstored and self._unstored[incident.id][0] is incident:
                    del self._unstored[incident.id]

    def has_concluded(self, since_s: float) -> bool:
        """Return whether there was a look since a time, in monotonic seconds, and what was concluded is in the history."""
        with self._lock:
            return self._looked_s >= since_s and not self._unstored

    # -- answers --------------------------------------------------------------------------------

    def incidents(self) -> list[Incident]:
        """Return the incidents in memory: pending, open, and those that ended while their job is in memory."""
        with self._lock:
            return list(self._incidents)

    def judges_all_nodes(self, job: str) -> bool:
        """Return whether this agent has concluded from the ranks of a job on all its nodes."""
        return job in self._whole

    def add_evidence(self, incident_id: str, items: Sequence[EvidenceItem]) -> None:
        """Add evidence that took time to get, such as a stack."""
        with self._lock:
            self._items.setdefault(incident_id, []).extend(items)

    def alerts(self) -> tuple[tuple[Alert, ...], tuple[Alert, ...]]:
        """Return the alerts that are pending or firing, and the resolved ones, newest first."""
        found = [alert for each in self.incidents() for alert in alerts_of(each)]
        past = sorted(
            (alert for alert in found if alert.state == RESOLVED), key=lambda alert: -(alert.resolved_at or 0.0)
        )
        return _once(found), tuple(past)

    def _deliver(self, now_s: float, led_elsewhere: Collection[str]) -> None:
        """Deliver the alerts of incidents that are in the history; a crash must not lose an alert that was delivered.

        What ranks of a job on several nodes do wrong is delivered by the agent that leads it.
        """
        with self._lock:
            waiting = {
                at
                for at, (one, since_s) in self._unstored.items()
                if now_s - since_s < _UNSTORED_S and _gist(one) != self._written.get(at, (None, 0.0))[0]
            }
        known = {each.id: each for each in self.incidents()}
        found = [
            with_cause(alert, each, known)
            for each in known.values()
            if each.id not in waiting
            for alert in alerts_of(each)
            # What was delivered once is delivered to its end, also if another agent leads now.
            if alert.id in self._told
            or (not is_explained(each, known) and not (each.kind in OF_RANKS and each.job_id in led_elsewhere))
        ]
        ends = [alert for alert in found if alert.state == RESOLVED and alert.id in self._told]
        due = [*(alert for alert in _once(found) if alert.state == FIRING), *ends]
        self._told = (self._told | {alert.id for alert in due}) - {alert.id for alert in ends}
        if due:
            self.plan.deliver(due)

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that the registry does not collect at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the number of alerts and incidents, their cost, and that of concluding."""
        families = Families()
        active = Counter((one.name, one.labels.get("severity", ""), one.state) for one in self.alerts()[0])
        for labels, number in active.items():
            families.add("alerts", labels, number)
        is_open = [each for each in self.incidents() if each.state == "open"]
        series = Counter(
            (each.job_id, each.kind, each.severity, rank)
            for each in is_open
            for rank in [str(rank) for rank in each.ranks[:MOST_RANKS]] or [""]
        )
        for about, number in series.items():
            families.add("incident_open", about, number)
        for of_kind, count in list(self._counts.items()):
            families.add("incidents_total", of_kind, count)
        for of_kind, cost in list(self._costs.items()):
            families.add("incident_cost_seconds_total", of_kind, cost)
        _verdicts(families, verdicts_of(is_open, self._wall()))
        families.add("alert_evaluation_seconds_total", (), self._seconds)
        yield from families.values()


def _verdicts(families: Families, found: list[Verdict]) -> None:
    """Add one series per culprit; verdicts with equal labels share one, with the greatest age."""
    ages: dict[tuple[str, ...], float] = {}
    for verdict in sorted(found, key=lambda verdict: (verdict.kind == "straggler", -verdict.since_s))[:MOST_VERDICTS]:
        about = (verdict.job_id, verdict.group, verdict.group_id)
        for rank in [str(rank) for rank in verdict.ranks[:MOST_RANKS]] or [""]:
            ages.setdefault((*about, verdict.kind, rank), verdict.since_s)
            if verdict.cost_share is not None:
                families.add("straggler_wait_ratio", (*about, rank), verdict.cost_share)
    for labels, age_s in ages.items():
        families.add("verdict_seconds", labels, age_s)


def _gist(incident: Incident) -> tuple[object, ...]:
    """Return what of an incident is written at once when it changes."""
    alerts = [(each.name, each.severity, each.fired_at, each.resolved_at) for each in incident.alerts]
    about = (incident.kind, incident.cause, incident.ranks, incident.consequence_of, incident.job_id)
    return incident.state, incident.severity, *about, len(incident.evidence), alerts


def _shifted(incident: Incident, by_s: float) -> Incident:
    """Return an incident with its times moved."""
    alerts = tuple(
        replace(
            each,
            active_at=each.active_at + by_s,
            seen_at=each.seen_at + by_s,
            fired_at=None if each.fired_at is None else each.fired_at + by_s,
            resolved_at=None if each.resolved_at is None else each.resolved_at + by_s,
        )
        for each in incident.alerts
    )
    times = {name: getattr(incident, name) + by_s for name in ("began_at", "seen_at", "last_at")}
    ended_at = None if incident.ended_at is None else incident.ended_at + by_s
    until = None if incident.until is None else incident.until + by_s
    return replace(incident, alerts=alerts, ended_at=ended_at, until=until, **times)


def _pruned(incidents: list[Incident]) -> list[Incident]:
    """Return the incidents to keep in memory: of the ended ones the latest."""
    ended = sorted((each for each in incidents if each.ended_at is not None), key=lambda each: -(each.ended_at or 0.0))
    return [*(each for each in incidents if each.ended_at is None), *ended[:_MOST_ENDED]]


def _once(alerts: Iterable[Alert]) -> tuple[Alert, ...]:
    """Return the alerts that are pending or firing, oldest first; of those with equal labels only the first."""
    active = sorted(
        (alert for alert in alerts if alert.state in (PENDING, FIRING)),
        key=lambda alert: (alert.state != FIRING, alert.active_at),
    )
    return tuple({tuple(sorted(alert.labels.items())): alert for alert in reversed(active)}.values())[::-1]
