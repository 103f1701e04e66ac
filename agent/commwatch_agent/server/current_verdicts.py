"""The question what is wrong right now on all nodes of a job."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from commwatch_agent.analysis import ended_operations
from commwatch_agent.analysis.ended_operations import RankParts
from commwatch_agent.nodes.replica_parts import rank_checks
from commwatch_agent.server.services import Services

#: Assumed pairs of a rank and a group that also has ranks on other nodes, on each node.
_COLUMNS = 64


def question_of_job(services: Services, job: str) -> dict[str, Any]:
    """Return the arguments of the worker's question ``job_verdicts``; waits for the agents of other nodes, at most 2 s."""
    parts, theirs = parts_of_job(services, job)
    which = f"job={quote(job, safe='')}"
    with services.queries.live(job) as (jobs, now_ns):
        replicas = rank_checks(jobs, now_ns)
    heard = services.peers.ask(*(f"{route}?{which}" for route in ("ranks", "groups", "verdicts")), theirs)
    return {"job": job, "reported": services.verdicts(job), "parts": parts, "replicas": replicas, "heard": heard}


def parts_of_job(services: Services, job: str) -> tuple[list[RankParts], str]:
    """Return this node's latest collectives of groups that span nodes, and the path of the question for those of other nodes."""
    with services.queries.live(job) as (jobs, now_ns):
        _, parts = ended_operations.parts(jobs, now_ns)
    limit = ended_operations.most_collectives(_COLUMNS * len(services.peers.views()))
    return parts, f"parts?job={quote(job, safe='')}&limit={limit}"
