"""What an agent looks at to conclude: the jobs in memory, other sources, and its own metrics, as a value."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from prometheus_client.metrics_core import Metric

from commwatch_agent.analysis import live_ranks
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.analysis.waits.step_waits import step_waits
from commwatch_agent.analysis.waits.uneven_work import StepWaits
from commwatch_agent.incidents.evidence import Evidence, KnownJob, WholeJob, is_ended
from commwatch_agent.incidents.judging import seen_here, with_waits
from commwatch_agent.incidents.metric_rules import METRIC_NAMES
from commwatch_agent.incidents.metric_window import MetricWindow
from commwatch_agent.ingest.jobs import Job
from commwatch_agent.job.merging import own_records
from commwatch_agent.model.views import RankView
from commwatch_agent.prometheus.metrics import NAMED
from commwatch_collectors.nccl.views import Finding
from commwatch_collectors.node import process

#: Nanoseconds between two searches in what has ended, which cover half a minute; seconds between two looks at the metrics and the waits.
_ENDED_NS, METRICS_S = 2_000_000_000, 15.0


@dataclass
class _Ended:
    """Verdicts on what has ended, by job, and when they were found, on the monotonic clock."""

    at_ns: int = -_ENDED_NS
    found: list[Verdict] = field(default_factory=list)


class RankLook:
    """Looks at what ranks of this node do right now; any thread may call it.

    Args:
        queries: holds the jobs in memory.
        more: returns verdicts of other sources, such as NCCL's RAS.
        named: what of a job is named, as in the setting ``job_info``.
    """

    def __init__(
        self, queries: QueryService, more: Callable[[], Iterable[Verdict]] = tuple, named: Collection[str] = NAMED
    ) -> None:
        self._queries, self._more, self.named = queries, more, named
        self._lock = threading.Lock()
        self._ended = _Ended()
        #: By run: who runs it, and its script.
        self._owners: dict[str, tuple[str, str]] = {}

    def search_anew(self) -> None:
        """Let the next look search in what has ended; by default that is done every other second."""
        with self._lock:
            self._ended.at_ns = -_ENDED_NS

    def of_records(self, job: str | None) -> list[Verdict]:
        """Return the verdicts on a job (``None``: on all) that other agents cannot conclude from its ranks and groups."""
        self.search_anew()
        return [verdict for verdict in own_records(self.look().verdicts) if job in (None, verdict.job_id)]

    def look(self, now: float | None = None) -> Evidence:
        """Return what ranks do wrong, with what that is based on, and with long waits that are no fault; ``now``: Unix time in s, by default by the clock."""
        more = list(self._more())
        with self._queries.live(None) as (held, now_ns):
            seen = seen_here(held, now_ns, [*self._of_ended(held, now_ns), *more])
            runs = {job.id: live_ranks.run(job) for job in held}
            jobs = {job.id: self._known(job, seen.ranks) for job in held if job.rank_totals}
        common = {job.run: runs[name].common for name, job in jobs.items() if job.run and runs[name].common}
        found = with_waits(seen)
        return Evidence(time.time() if now is None else now, jobs, found, seen.ranks, seen.groups, common=common)

    def waits(self) -> dict[str, StepWaits]:
        """Return how ranks waited for each other in the steps of the last minute, by job, where it is known."""
        with self._queries.live(None) as (held, now_ns):
            found = {job.id: step_waits(job, now_ns) for job in held}
        return {job_id: waits for job_id, waits in found.items() if waits is not None}

    def _known(self, job: Job, ranks: Iterable[RankView]) -> KnownJob:
        run, size = live_ranks.run_key(job), int(next(live_ranks.of_this_run(job)).identity["world_size"])
        ended = is_ended((view for view in ranks if view.job_id == job.id), size)
        return KnownJob(run, size, ended, *self.owner(job))

    def owner(self, job: Job) -> tuple[str, str]:
        """Return who runs a job, and its script, as far as they are to be named; empty: not known.

        They are those of a rank's process. Where the agent does not see that, the user is the owner of the ring. The caller locks the jobs.
        """
        run = live_ranks.run_key(job) or job.id
        if run not in self._owners:
            pid = next((totals.pid for totals in live_ranks.of_this_run(job) if totals.alive and totals.pid), None)
            if pid is not None:
                self._owners[run] = process.user(pid), process.script(pid)
        user, script = self._owners.get(run) or (", ".join(map(process.account, sorted(job.owners))), "")
        return user if "user" in self.named else "", script if "script" in self.named else ""

    def _of_ended(self, held: list[Job], now_ns: int) -> list[Verdict]:
        """Return verdicts on what has ended."""
        with self._lock:
            if now_ns - self._ended.at_ns >= _ENDED_NS:
                self._ended = _Ended(now_ns, live_ranks.ended_verdicts(held, live_ranks.groups(held), now_ns))
            here = {job.id for job in held}
            return [verdict for verdict in self._ended.found if verdict.job_id in here]


class Whole(Protocol):
    """What other agents know of a job, put together."""

    def found(self, job: str) -> WholeJob | None:
        """Return what was found of a job on all its nodes; ``None``: nothing lately."""

    def leads(self, common: str) -> bool:
        """Return whether this agent concludes for all nodes of a run, by what they know it by."""


class NodeLook:
    """Looks at one node; one thread calls it.

    Args:
        ranks: looks at its ranks.
        metrics: returns the families that ``/metrics`` shows.
        instance: label ``instance`` of this node's series.
        errors: returns the errors in the logs, by job.
    """

    def __init__(
        self,
        ranks: RankLook,
        metrics: Callable[[], Iterable[Metric]],
        instance: str = "",
        errors: Callable[[], Mapping[str, Sequence[Finding]]] = dict,
    ) -> None:
        self._ranks, self._metrics, self._errors = ranks, metrics, errors
        #: Concludes for jobs with ranks on several nodes; ``None``: there are none.
        self.whole: Whole | None = None
        self._window = MetricWindow(METRIC_NAMES, instance)
        self._waits: dict[str, StepWaits] = {}
        self._measured_s = float("-inf")

    def __call__(self, now: float, now_s: float) -> Evidence:
        """Return what is known now.

        Args:
            now: Unix time in s.
            now_s: monotonic seconds.
        """
        found = self._ranks.look(now)
        whole = self._of_all_nodes(found.jobs)
        jobs = {
            name: job._replace(ended=whole[name].ended) if name in whole else job for name, job in found.jobs.items()
        }
        if now_s - self._measured_s >= METRICS_S:
            self._window.add(now_s, self._metrics())
            self._waits = self._ranks.waits()
            self._measured_s = now_s
        elsewhere = frozenset(
            name for name, job in jobs.items() if self.whole and not self.whole.leads(found.common.get(job.run, ""))
        )
        return replace(
            found,
            jobs=jobs,
            waits=self._waits,
            metrics=self._window,
            errors=self._errors(),
            whole=whole,
            led_elsewhere=elsewhere,
        )

    def _of_all_nodes(self, jobs: Iterable[str]) -> dict[str, WholeJob]:
        known = {} if self.whole is None else {name: self.whole.found(name) for name in jobs}
        return {name: found for name, found in known.items() if found is not None}
