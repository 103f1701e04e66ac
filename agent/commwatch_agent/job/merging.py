"""The whole job: the answers of the agents of its nodes, put together. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.analysis.verdicts import latest_life
from commwatch_agent.job.message_parts import MessageParts
from commwatch_agent.job.rank_parts import RankParts
from commwatch_agent.job.replica_parts import RankChecks
from commwatch_agent.model.runs import free_name
from commwatch_agent.model.views import GroupView, JobView, RankView, common_source

_T = TypeVar("_T")
_Part = TypeVar("_Part")
#: Kinds of verdicts that need an agent's own records.
_OF_RECORDS = frozenset({"straggler", "desync", "corruption"})


class Heard(NamedTuple):
    """What the agents of other nodes answered to one question."""

    #: By URL, an answer to each path. Agents that do not have the job are left out.
    answers: dict[str, list[bytes]]
    #: Agents that did not answer, by URL, with the reason; they may have ranks of the job.
    silent: dict[str, str]


@dataclass(frozen=True)
class Nodes:
    """The nodes that an answer covers."""

    #: Number of agents whose data it has: this one, and the others that have the job.
    answered: int
    #: Agents that did not answer, by URL, with the reason; they may have ranks of the job.
    silent: dict[str, str]


def covered(nodes: Nodes) -> str:
    """Return how many nodes an answer covers, as ``3 nodes`` or ``3 of 4 nodes``; empty for the node of the only agent."""
    known = nodes.answered + len(nodes.silent)
    if known == 1:
        return ""
    return f"{nodes.answered} of {known} nodes" if nodes.silent else f"{nodes.answered} nodes"


@dataclass(frozen=True)
class JobWide(Generic[_T]):
    """An answer that covers all nodes of a job."""

    nodes: Nodes
    data: _T


@dataclass
class Seen:
    """The combined answers of all agents."""

    ranks: list[RankView]
    groups: list[GroupView]
    #: Verdicts that need an agent's own records: late ranks, ranks that disagreed in ended operations, other sources.
    reported: list[Verdict]
    #: The latest collectives of cross-node groups, by rank.
    parts: list[RankParts] = field(default_factory=list)
    #: The latest checks of replicas that have ranks on several nodes, by rank.
    replicas: list[RankChecks] = field(default_factory=list)
    #: The latest waits of ranks that send messages to other nodes.
    messages: list[MessageParts] = field(default_factory=list)


def own_records(found: Iterable[Verdict]) -> list[Verdict]:
    """Return an agent's verdicts that the views of its ranks and groups do not give."""
    return [verdict for verdict in found if verdict.source != "probe" or verdict.kind in _OF_RECORDS]


def merged_ranks(ranks: Iterable[RankView]) -> list[RankView]:
    """Return the ranks of each job's ``latest_life``, by job and number."""
    latest = latest_life(ranks)
    return [latest[at] for at in sorted(latest)]


def by_run(parts: Iterable[_Part], view_of: Callable[[_Part], JobView]) -> dict[str, list[_Part]]:
    """Return the parts of each run by its name; the first part of a run names it, and a second run of that name gets a number.

    A node may not know yet which run its ranks belong to: then they are of the one that runs under their name, if there is one.

    Args:
        parts: of several nodes, those of this one first.
        view_of: returns the job of a part.
    """
    of_run: dict[tuple[str, str], list[_Part]] = {}
    unknown: list[_Part] = []
    for part in parts:
        run = view_of(part).run
        if run:
            of_run.setdefault(("", run), []).append(part)
        else:
            unknown.append(part)
    running: dict[str, list[list[_Part]]] = {}
    for found in of_run.values():
        if any(view_of(part).state == "running" for part in found):
            running.setdefault(view_of(found[0]).job_id, []).append(found)
    for part in unknown:
        view = view_of(part)
        known = running.get(view.job_id, []) if view.state == "running" else []
        (known[0] if len(known) == 1 else of_run.setdefault((view.job_id, ""), [])).append(part)
    named: dict[str, list[_Part]] = {}
    for found in of_run.values():
        named[free_name(view_of(found[0]).job_id, named.keys())] = found
    return named


def merged_jobs(jobs: Iterable[JobView]) -> list[JobView]:
    """Return each run once, the latest started first; this node's are the first in ``jobs``."""
    runs = by_run(jobs, lambda view: view)
    return sorted((_merged_job(name, views) for name, views in runs.items()), key=lambda job: -job.started_at)


def _merged_job(name: str, views: list[JobView]) -> JobView:
    running = any(view.state == "running" for view in views)
    latest = max(views, key=lambda view: (view.state == "running", view.restarts, view.started_at))
    failures = [view.failed for view in views]
    codes = sorted({view.exit_code for view in views if view.exit_code is not None}, key=lambda code: (code == 0, code))
    by_first = sorted(views, key=lambda view: min(view.ranks, default=0))
    return replace(
        latest,
        job_id=name,
        state="running" if running else "ended",
        ranks=sorted({rank for view in views for rank in view.ranks}),
        started_at=min(view.started_at for view in views),
        last_seen_at=max(view.last_seen_at for view in views),
        lost=sum(view.lost for view in views),
        records=sum(view.records for view in views),
        steps_unavailable=next((view.steps_unavailable for view in views if view.steps_unavailable), None),
        step_source=common_source(view.step_source for view in views),
        # A launcher that failed decides; those of the other nodes were often only stopped.
        exit_code=codes[0] if codes and not running else None,
        failed=None if running else True if True in failures else None if None in failures else False,
        ending="" if running else "; ".join(dict.fromkeys(view.ending for view in by_first if view.ending)),
    )
