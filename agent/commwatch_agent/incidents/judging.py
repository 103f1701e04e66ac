"""What ranks do wrong right now, on one node or on all nodes of a job: one function over what agents have seen. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from commwatch_agent.analysis import live_ranks
from commwatch_agent.analysis.ended_operations import once
from commwatch_agent.analysis.flight_recorder_analysis import SOURCE, RankDump, views
from commwatch_agent.analysis.verdict import Verdict, combined, straggler_verdict
from commwatch_agent.analysis.verdicts import merged_groups, verdicts
from commwatch_agent.ingest.jobs import Job
from commwatch_agent.job.merging import Seen
from commwatch_agent.job.message_parts import late_senders
from commwatch_agent.job.rank_parts import late_across
from commwatch_agent.job.replica_parts import corruptions_across
from commwatch_agent.model.views import GroupView


def seen_here(jobs: Iterable[Job], now_ns: int, reported: Iterable[Verdict]) -> Seen:
    """Return what this agent has in memory of jobs.

    Args:
        jobs: locked by the caller.
        now_ns: the monotonic clock.
        reported: verdicts on what has ended, and those of other sources.
    """
    held = list(jobs)
    return Seen(live_ranks.ranks(held, now_ns), live_ranks.groups(held), list(reported))


def judged_dumps(dumps: Iterable[RankDump]) -> list[Verdict]:
    """Return the verdicts on the ranks of dumps of PyTorch's Flight Recorder, the longest first."""
    found = judged(Seen(*views(dumps), []))
    return [replace(verdict, source=SOURCE) for verdict in found]


def judged(seen: Seen) -> list[Verdict]:
    """Return the verdicts on what one agent or several have seen, the longest first, without waits that are no fault."""
    return faults(with_waits(seen))


def faults(found: Iterable[Verdict]) -> list[Verdict]:
    """Return verdicts without waits that are no fault."""
    return [verdict for verdict in found if verdict.kind != "waiting"]


def with_waits(seen: Seen) -> list[Verdict]:
    """Return ``judged`` with long waits that are no fault."""
    found = verdicts(seen.ranks, seen.groups)
    groups = {(group.job_id, group.group_id): group for group in merged_groups(seen.groups)}
    known = {(verdict.job_id, verdict.group_id, verdict.cause, verdict.source) for verdict in found}
    reported: dict[tuple[object, ...], Verdict] = {}
    for verdict in (
        *seen.reported,
        *_across(seen, groups),
        *corruptions_across(seen.replicas, groups),
    ):  # drop duplicates from an agent that was queried under two names
        at = (verdict.job_id, verdict.group_id, verdict.cause, verdict.source)
        # Of an ``all_to_all``, each slice has a verdict.
        what = verdict.says if verdict.kind == "corruption" else None
        if at not in known:
            reported.setdefault((*at, verdict.group, verdict.seq, what, *verdict.ranks), verdict)
    return combined(found, _without_doubt(list(reported.values())))


def _without_doubt(found: list[Verdict]) -> Iterator[Verdict]:
    """Yield verdicts without those that one of some ranks has wrong weights, where more ranks together show which one."""
    known = [verdict for verdict in found if verdict.cause == "weights"]
    for verdict in found:
        about = (verdict.job_id, verdict.group_id, verdict.parameter)
        same = [set(each.ranks) for each in known if (each.job_id, each.group_id, each.parameter) == about]
        if verdict.cause != "one_of" or not any(ranks <= set(verdict.ranks) for ranks in same):
            yield verdict


def _across(seen: Seen, groups: Mapping[tuple[str, str], GroupView]) -> Iterator[Verdict]:
    for job, group_id, late in once([*late_across(seen.parts), *late_senders(seen.messages, seen.parts)]):
        if (job, group_id) in groups:
            yield straggler_verdict(late, groups, (job, group_id))
