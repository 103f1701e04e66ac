"""The one function that concludes what is wrong, and the list of its rules. Pure.

It runs for one node, and for a whole job with the ranks of all its nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from commwatch_agent.analysis.flight_recorder_analysis import JOB, RankDump, views
from commwatch_agent.incidents.cut_off import cut_off, has_passed
from commwatch_agent.incidents.evidence import Evidence, KnownJob
from commwatch_agent.incidents.explanations import explained
from commwatch_agent.incidents.incident import (
    OF_RANKS,
    ONE_WAIT,
    REASONS_TO_WAIT,
    RECOVERED,
    SHARES,
    STANDSTILLS,
    Condition,
    Incident,
)
from commwatch_agent.incidents.job_rules import left_early, lost_ranks, of_verdicts, uneven_work
from commwatch_agent.incidents.judging import judged_dumps
from commwatch_agent.incidents.lifecycle import Around, Table, advanced, ended
from commwatch_agent.incidents.metric_conditions import MetricRule
from commwatch_agent.incidents.metric_rules import METRIC_RULES
from commwatch_agent.incidents.slow_links import slow_links
from commwatch_agent.incidents.software_rules import logged_errors


class Finder(NamedTuple):
    """One rule: when its incidents open, get worse and end is in the table of kinds."""

    kinds: tuple[str, ...]
    #: What it reads.
    reads: str
    #: Returns what holds now, given the thresholds of the table by name.
    find: Callable[[Evidence, Mapping[str, float]], Iterable[Condition]]


def of_ranks(evidence: Evidence) -> Iterator[Condition]:
    """Yield what ranks do that all nodes of their job know only together."""
    yield from of_verdicts(evidence)
    yield from left_early(evidence)
    yield from lost_ranks(evidence)
    yield from slow_links(evidence)


def _of_ranks(evidence: Evidence, thresholds: Mapping[str, float]) -> Iterator[Condition]:
    """Yield what ranks of this node do; of a job with ranks on several nodes what was found for all of them."""
    yield from (condition for condition in of_ranks(evidence) if condition.job_id not in evidence.whole)
    yield from (condition for found in evidence.whole.values() for condition in found.conditions)


def _in_dumps(evidence: Evidence, thresholds: Mapping[str, float]) -> Iterator[Condition]:
    if evidence.dumps:
        _, groups = views(evidence.dumps)
        yield from of_verdicts(replace(evidence, verdicts=judged_dumps(evidence.dumps), groups=groups))


def _in_logs(evidence: Evidence, thresholds: Mapping[str, float]) -> Iterator[Condition]:
    for job, errors in evidence.errors.items():
        for condition in logged_errors(job, errors, evidence.now):
            yield _in_its_run(condition, evidence)


def _in_its_run(condition: Condition, evidence: Evidence) -> Condition:
    job = evidence.jobs.get(condition.job_id)
    return condition if job is None else replace(condition, run=job.run)


def _of_metrics(rule: MetricRule) -> Callable[[Evidence, Mapping[str, float]], Iterator[Condition]]:
    """Return a rule about metrics, with the runs of its jobs. Of an error that is also known from a log, they do not say more."""

    def found(evidence: Evidence, thresholds: Mapping[str, float]) -> Iterator[Condition]:
        for condition in rule(evidence.metrics, thresholds, evidence.now):
            errors = evidence.errors.get(condition.job_id, ())
            if not (condition.kind == "nccl_fault" and condition.subject[0] in {error.name for error in errors}):
                yield _in_its_run(condition, evidence)

    return found


FINDERS: tuple[Finder, ...] = (
    Finder(
        tuple(sorted(OF_RANKS)),
        "operations in flight and ended, checks of data, NCCL's RAS, how ranks ended, TCP connections of ranks that communicate much",
        _of_ranks,
    ),
    Finder(("desync", "hang", "stalled"), "dumps of PyTorch's Flight Recorder", _in_dumps),
    Finder(("nccl_fault",), "the logs of NCCL, and the output of the ranks", _in_logs),
    Finder(("uneven_work",), "the waits in the steps of the last minute", lambda evidence, _: uneven_work(evidence)),
    *(Finder((kind,), "the last five minutes of the metrics", _of_metrics(rule)) for kind, rule in METRIC_RULES),
)


def conclude(
    evidence: Evidence, known: Iterable[Incident], table: Table, around: Around, finders: Sequence[Finder] = FINDERS
) -> list[Incident]:
    """Return the incidents after this moment: pending, open and ended ones.

    Args:
        known: as returned for the moment before.
    """
    before = list(known)
    conditions = [found for finder in finders for found in finder.find(evidence, table.thresholds)]
    conditions += cut_off(before, evidence, around.ended_runs)
    reasons: list[Condition | Incident] = [*conditions, *(each for each in before if each.ended_at is None)]
    known_why = {each.job_id for each in reasons if each.kind in REASONS_TO_WAIT}
    still = {each.job_id for each in reasons if each.kind in STANDSTILLS and getattr(each, "holds", True)}
    found = (each for each in conditions if not _is_uneven(each, known_why) and not _is_of_steps(each, still))
    before = [each for each in before if not (each.state == "pending" and _is_of_steps(each, still))]
    after = advanced(_as_known(found, before), before, table, around)
    # Of work that was uneven before, nothing is known from then on.
    over = (
        ended(each, each.last_at, RECOVERED) if each.state == "open" and _is_uneven(each, known_why) else each
        for each in after
    )
    return explained(_without_passed(over, evidence, around.now), around.now)


def _without_passed(incidents: Iterable[Incident], evidence: Evidence, now: float) -> Iterator[Incident]:
    """Yield incidents; a standstill that is not found any more, and whose operation has ended, does not hold, though it may come back."""
    known = {(view.job_id, view.rank): view for view in evidence.ranks}
    for each in incidents:
        here = [view for rank in (*each.ranks, *each.waiting) if (view := known.get((each.job_id, rank))) is not None]
        is_gone = each.kind in STANDSTILLS | {"waiting"} and each.ended_at is None and each.last_at < now
        is_over = is_gone and bool(here) and all(has_passed(view, each) for view in here)
        yield replace(each, holds=False) if is_over else each


def of_dumps(dumps: Sequence[RankDump], table: Table) -> list[Incident]:
    """Return the incidents that dumps of PyTorch's Flight Recorder show, as of the time when the latest of them was written."""
    now = max(each.at_ns for each in dumps) / 1e9
    return conclude(Evidence(now, {JOB: KnownJob(JOB, len(dumps), ended=True)}, dumps=dumps), (), table, Around(now))


def _is_uneven(each: Condition | Incident, jobs: Collection[str]) -> bool:
    """Return whether this is uneven work of one of some jobs."""
    return each.kind == "uneven_work" and each.job_id in jobs


def _is_of_steps(each: Condition | Incident, still: Collection[str]) -> bool:
    """Return whether this is a share of the steps of a job of which none runs: it is of the steps before."""
    return each.kind in SHARES and each.job_id in still


def _as_known(conditions: Iterable[Condition], known: Iterable[Incident]) -> Iterator[Condition]:
    """Yield conditions; a wait that was a fault before stays one: what a rank does may change, and an agent that starts knows less."""
    faults = {
        (each.run or each.job_id, each.group_id, each.seq): each
        for each in known
        if each.kind in ONE_WAIT and each.state == "open"
    }
    for condition in conditions:
        fault = faults.get((condition.run or condition.job_id, condition.group_id, condition.seq))
        is_same = condition.kind == "waiting" and fault is not None
        yield replace(condition, kind=fault.kind, subject=fault.subject) if is_same and fault else condition
