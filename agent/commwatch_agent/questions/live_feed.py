"""Data of the live page: the moment, the last hour, and what changes slowly; each as JSON on one line."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from socket import gethostname
from typing import Any
from urllib.parse import quote

from pydantic import TypeAdapter

from commwatch import __version__
from commwatch_agent.analysis import live_ranks
from commwatch_agent.analysis.advice_input import LAST_S
from commwatch_agent.analysis.time_buckets import Slot, slots_of
from commwatch_agent.analysis.timeline import MOST_RANKS, NodeBars, Timeline, bars, timeline
from commwatch_agent.incidents.alerts import alert_view
from commwatch_agent.incidents.answers import IncidentView, latest_of, merged
from commwatch_agent.incidents.answers import view_of as incident_view
from commwatch_agent.incidents.verdict_views import verdicts_of
from commwatch_agent.ingest.jobs import Job
from commwatch_agent.job.merging import Nodes
from commwatch_agent.model.api_views import Advice, AlertView
from commwatch_agent.model.nccl_views import NcclOperations
from commwatch_agent.questions.jobs import slots_elsewhere
from commwatch_agent.questions.live_view import JobNow, job_now
from commwatch_agent.questions.node_now import Card, NodeNow, OperationsNow, node_now, operations_now, pick, running
from commwatch_agent.questions.operations import summary
from commwatch_agent.questions.other_nodes import OtherNodes
from commwatch_agent.questions.report_sources import asked_of_others, own_facts
from commwatch_agent.questions.reports import advice
from commwatch_agent.questions.services import Services
from commwatch_collectors.nccl.views import Finding

#: Seconds of history in the page's plots, and in its table of operations.
PAST_S, LATELY_S = 3600.0, 60.0
#: ``Insights`` are cached for so many seconds, or for so many times the time they took, whichever is longer; and for so many at most.
_INSIGHTS_S, _SELDOM, _MOST_INSIGHTS_S = 60.0, 200, 600.0
#: Seconds for each agent between two requests for the operations of all nodes: with 128 agents 26 s.
_CELLS_S = 0.2
#: Most ended incidents of a moment.
_MOST_ENDED = 20


@dataclass(frozen=True)
class JobName:
    """A job that can be watched."""

    job_id: str
    running: bool


@dataclass(frozen=True)
class Moment:
    """The state of a job and of the agent right now."""

    #: Unix time.
    at: float
    version: str
    host: str
    #: What is wrong with the agent itself; ``None``: nothing.
    trouble: str | None
    jobs: list[JobName]
    #: ``None``: there is no job of that name, or no job at all.
    job: JobNow | None
    #: Firing and pending alerts of this job and of the node, in the form of ``/api/v1/alerts``.
    alerts: list[AlertView]
    #: The nodes that ``job`` covers.
    nodes: Nodes
    #: Incidents of this run of the job, as all its nodes know them, and of this node in its time, in the form of ``/api/v1/incidents``: those
    #: that are open or pending, and the latest of those that have ended.
    incidents: list[IncidentView]


@dataclass(frozen=True)
class LastHour:
    """The last hour of a job."""

    job_id: str | None
    slots: list[Slot]


@dataclass(frozen=True)
class Insights:
    """Findings in the NCCL logs of a job on this node, and what to try in the job on all nodes."""

    job_id: str | None
    findings: list[Finding]
    advice: list[Advice]


class LiveFeed:
    """Produces the data of the live page from an agent's services; any thread may call it.

    Args:
        clock: returns Unix time.
    """

    def __init__(self, services: Services, clock: Callable[[], float] = time.time) -> None:
        self._services, self._clock = services, clock
        self._agent, self._worker = services.queries, services.worker
        self._others = OtherNodes(services)
        #: By job: the time until which it is valid, and an ``Insights`` as JSON. Used by several threads, under the lock.
        self._slow: dict[str, tuple[float, bytes]] = {}
        self._slow_lock = threading.Lock()
        #: By job: the time until which it is valid, and the ``OperationsNow`` of all nodes as JSON. Used by one thread.
        self._joined: dict[str, tuple[float, bytes]] = {}

    def moment(self, wanted: str | None) -> bytes:
        """Return a ``Moment`` of the job named ``wanted``, by default of the latest. Reads nothing from the history."""
        with self._held(wanted) as (job, jobs, now_ns):
            names = [JobName(each.id, running(each)) for each in jobs]
            part = None if job is None else self._part(job, now_ns)
        shown, nodes, found = None, Nodes(1, {}), self._of_node(0.0 if part is None else part.started_at)
        if part is not None:
            parts, nodes = self._others.now(part.job_id)
            shown = job_now([part, *parts])
            there = ([replace(each, job_id=part.job_id) for each in other.incidents] for other in parts)
            found = merged([found, part.incidents, *there])
        here = (None, None if part is None else part.job_id)
        active = [alert for alert in self._services.incidents.alerts()[0] if alert.labels.get("job_id") in here]
        alerts = [alert_view(alert) for alert in self._services.evidence.linked(active)]
        about = (self._clock(), __version__, gethostname(), self._services.ready())
        return _json(Moment, Moment(*about, names, shown, alerts, nodes, latest_of(found, _MOST_ENDED)))

    def node(self, job_id: str) -> NodeNow | None:
        """Return what this node contributes to the moment of a job; ``None``: it is not in memory."""
        with self._agent.live(job_id) as (jobs, now_ns):
            job = pick(jobs, job_id)
            return None if job is None else self._part(job, now_ns)

    def _part(self, job: Job, now_ns: int) -> NodeNow:
        run, every = live_ranks.run_key(job) or job.id, self._services.incidents.incidents()
        of_run = [each for each in every if each.job_id and (each.run or each.job_id) == run]
        wrong = verdicts_of(of_run, self._clock())
        return node_now(job, self._cards(job), wrong, now_ns, latest_of(map(incident_view, of_run), _MOST_ENDED))

    def _of_node(self, since: float) -> list[IncidentView]:
        """Return the incidents of this node that lasted at some time since then."""
        every = (each for each in self._services.incidents.incidents() if not each.job_id)
        return [incident_view(each) for each in every if each.ended_at is None or each.ended_at >= since]

    def timeline(self, wanted: str | None) -> bytes:
        """Return a ``Timeline``; ``null``: there is none."""
        with self._held(wanted) as (job, _, now_ns):
            if job is None:
                return _json(Timeline | None, None)
            ranks = list(live_ranks.of_this_run(job))
            part, job_id = bars(ranks, now_ns), job.id
            # Rows of more ranks could not be read.
            few = all(int(each.identity["world_size"]) <= MOST_RANKS for each in ranks)
        return _json(Timeline | None, timeline([part, *(self._others.bars(job_id) if few else [])]))

    def bars(self, job_id: str) -> NodeBars | None:
        """Return what this node contributes to the timeline of a job; ``None``: it is not in memory."""
        with self._agent.live(job_id) as (jobs, now_ns):
            job = pick(jobs, job_id)
            return None if job is None else bars(live_ranks.of_this_run(job), now_ns)

    def operations(self, wanted: str | None) -> bytes:
        """Return the ``OperationsNow`` of the last minute."""
        with self._held(wanted) as (job, _, now_ns):
            found = OperationsNow(None, 0.0, [], []) if job is None else operations_now(job, now_ns)
        if found.job_id is None or not self._others.exist():
            return _json(OperationsNow, found)
        began = self._clock()
        until, text = self._joined.get(found.job_id, (began, b""))
        if until <= began:
            text = _json(OperationsNow, self._operations_of_nodes(found.job_id, found.chosen))
            self._joined = {each: kept for each, kept in self._joined.items() if kept[0] > began}
            self._joined[found.job_id] = began + self._others.every_s(0.0, _CELLS_S), text
        return text

    def _operations_of_nodes(self, job_id: str, chosen: list[NcclOperations]) -> OperationsNow:
        """Return the operations on all nodes, from the sums of the last minute's slots; ``chosen`` is of this node."""
        now_s = self._agent.now_s(job_id, self._clock())
        since_s = now_s - LATELY_S
        heard = self._services.peers.ask(f"cells?job={quote(job_id, safe='')}&since={LATELY_S:g}s")
        window = (int(since_s * 1e9), int(now_s * 1e9))
        found = self._worker.ask(summary, *window, job_id, by=["group", "op"], same={}, heard=heard).data
        covered_s = 0.0 if found.since is None or found.until is None else found.until - found.since
        return OperationsNow(job_id, covered_s, found.rows, chosen)

    def past(self, wanted: str | None) -> bytes:
        """Return a ``LastHour``."""
        job_id = self._job_id(wanted)
        if job_id is None:
            return _json(LastHour, LastHour(None, []))
        until = self._agent.now_s(job_id, self._clock()) + 1
        sums = self._agent.slots(int((until - PAST_S) * 1e9), int(until * 1e9), job_id)
        if self._others.exist():
            heard = self._services.peers.ask(f"slots?job={quote(job_id, safe='')}&since={PAST_S:g}s")
            sums += self._worker.ask(slots_elsewhere, heard=heard)
        return _json(LastHour, LastHour(job_id, slots_of(sums)))

    def insights(self, wanted: str | None) -> bytes:
        """Return an ``Insights``; cached, because advice reads much of the job's history."""
        job_id = self._job_id(wanted)
        if job_id is None:
            return _json(Insights, Insights(None, [], []))
        began = self._clock()
        with self._slow_lock:
            until, text = self._slow.get(job_id, (began, b""))
        if until <= began:
            text = self._compute_insights(job_id)
            cached_s = min(_MOST_INSIGHTS_S, max(_INSIGHTS_S, _SELDOM * (self._clock() - began)))
            again = self._clock() + cached_s
            with self._slow_lock:
                self._slow = {each: kept for each, kept in self._slow.items() if kept[0] > began}
                self._slow[job_id] = again, text
        return text

    def _compute_insights(self, job_id: str) -> bytes:
        own = own_facts(self._services, job_id)
        findings = [] if own.topology is None else own.topology.findings
        asked = asked_of_others(self._services, job_id, LAST_S, live=True) if self._others.exist() else None
        found = self._worker.ask(advice, job_id, own=own, last_s=LAST_S, asked=asked).data
        return _json(Insights, Insights(job_id, findings, found))

    @contextmanager
    def _held(self, wanted: str | None) -> Iterator[tuple[Job | None, list[Job], int]]:
        """Yield the job named ``wanted``, all jobs, and the monotonic time in ns, under the lock of the jobs."""
        with self._agent.live(None) as (jobs, now_ns):
            yield pick(jobs, wanted), jobs, now_ns

    def _job_id(self, wanted: str | None) -> str | None:
        with self._held(wanted) as (job, _, _):
            return None if job is None else job.id

    def _cards(self, job: Job) -> dict[int, Card]:
        placed = ((totals.rank, self._services.gpus.place(totals.gpu)) for totals in live_ranks.of_this_run(job))
        return {rank: Card(gpu.card.index, gpu.measured.utilization) for rank, gpu in placed if gpu is not None}


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _json(kind: object, value: object) -> bytes:
    return _adapter(kind).dump_json(value)
