"""What an agent looks at to conclude: the jobs in memory, other sources, and its own metrics; all as conditions of one moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from prometheus_client.metrics_core import Metric

from commwatch_agent.analysis import live_ranks
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.analysis.verdicts import Verdict
from commwatch_agent.core.runs import Run
from commwatch_agent.core.views import GroupView, RankView
from commwatch_agent.incidents.incident import Condition
from commwatch_agent.incidents.job_rules import KnownJob, conditions_of
from commwatch_agent.incidents.judging import judged
from commwatch_agent.incidents.metric_rules import METRIC_NAMES, METRIC_RULES
from commwatch_agent.incidents.metric_window import MetricWindow
from commwatch_agent.ingest.jobs import Job
from commwatch_agent.nodes.merging import Seen

#: Nanoseconds between two searches in what has ended, which cover half a minute; seconds between two looks at the metrics.
_ENDED_NS, METRICS_S = 5_000_000_000, 15.0


class Look(NamedTuple):
    """What was found at one moment."""

    conditions: list[Condition]
    #: The jobs in memory, by name; and what all nodes know their runs by, by key.
    jobs: Mapping[str, KnownJob]
    common: Mapping[str, str]


@dataclass
class _Ended:
    """Verdicts on what has ended, by job, and when they were found, on the monotonic clock."""

    at_ns: int = -_ENDED_NS
    found: list[Verdict] = field(default_factory=list)


class NodeLook:
    """Looks at one node; one thread calls it.

    Args:
        queries: holds the jobs in memory.
        more: returns verdicts of other sources, such as NCCL's RAS.
        metrics: returns the families that ``/metrics`` shows.
        instance: label ``instance`` of this node's series.
    """

    def __init__(
        self,
        queries: QueryService,
        more: Callable[[], Iterable[Verdict]],
        metrics: Callable[[], Iterable[Metric]],
        instance: str = "",
    ) -> None:
        self._queries, self._more, self._metrics = queries, more, metrics
        self._window = MetricWindow(METRIC_NAMES, instance)
        self._ended = _Ended()
        self._of_metrics: tuple[float, list[Condition]] = (float("-inf"), [])

    def __call__(self, now: float, now_s: float, thresholds: Mapping[str, float]) -> Look:
        """Return what holds now.

        Args:
            now: Unix time in s.
            now_s: monotonic seconds.
            thresholds: of the table, by name.
        """
        more = list(self._more())
        with self._queries.live(None) as (held, now_ns):
            seen = self._seen(held, now_ns, more)
            runs = {job.id: (live_ranks.run_key(job), live_ranks.run(job)) for job in held}
            jobs = {job.id: _known(job, runs[job.id][0]) for job in held}
        conditions = conditions_of(judged(seen), seen.ranks, seen.groups, jobs, now)
        if now_s - self._of_metrics[0] >= METRICS_S:
            self._window.add(now_s, self._metrics())
            found = [each for _, rule in METRIC_RULES for each in rule(self._window, thresholds, now)]
            self._of_metrics = now_s, found
        of_metrics = [_of_run(each, jobs) for each in self._of_metrics[1]]
        return Look([*conditions, *of_metrics], jobs, _common(runs))

    def _seen(self, held: list[Job], now_ns: int, more: list[Verdict]) -> Seen:
        """Return what the jobs in memory show; the search in what has ended is made every 5 s."""
        if now_ns - self._ended.at_ns >= _ENDED_NS:
            self._ended = _Ended(now_ns, live_ranks.ended_verdicts(held, live_ranks.groups(held), now_ns))
        here = {job.id for job in held}
        ended = [verdict for verdict in self._ended.found if verdict.job_id in here]
        ranks: list[RankView] = live_ranks.ranks(held, now_ns)
        groups: list[GroupView] = live_ranks.groups(held)
        return Seen(ranks, groups, [*ended, *more], {})


def _known(job: Job, run: str) -> KnownJob:
    ranks = list(live_ranks.of_this_run(job))
    size = int(ranks[0].identity["world_size"]) if ranks else 0
    return KnownJob(run, size, not any(totals.alive for totals in job.rank_totals.values()))


def _common(runs: Mapping[str, tuple[str, Run]]) -> dict[str, str]:
    return {key: run.common for key, run in runs.values() if key and run.common}


def _of_run(condition: Condition, jobs: Mapping[str, KnownJob]) -> Condition:
    """Return a condition of a job with the key of its run."""
    job = jobs.get(condition.job_id)
    return condition if job is None else replace(condition, run=job.run)
