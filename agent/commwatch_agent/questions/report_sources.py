"""What reports and advice on a job need from this agent's memory and from the agents of its other nodes."""

from __future__ import annotations

import time
from urllib.parse import quote

from commwatch_agent.analysis import live_ranks
from commwatch_agent.incidents.answers import details_of
from commwatch_agent.incidents.verdict_views import late_now
from commwatch_agent.job.job_report import MOST_OPERATIONS, MOST_STEPS
from commwatch_agent.job.wait_parts import MOST_COLLECTIVES, MOST_OF_ALL
from commwatch_agent.questions.reports import Asked, NodeFacts, report_windows
from commwatch_agent.questions.services import Services
from commwatch_agent.report.recorded_steps import ADVICE_PARTS, FEW_PARTS
from commwatch_agent.runtime.peers import SELF
from commwatch_agent.sources.nccl_archive import kept

#: Seconds that the other agents have, each of the four times that they are asked.
WITHIN_S = 5.0


def own_facts(services: Services, job: str) -> NodeFacts:
    """Return what this agent knows of a job beside its history."""
    is_whole = services.incidents.judges_all_nodes(job)
    with services.queries.live(job) as (jobs, now_ns):
        is_known = live_ranks.shows_late_ranks(jobs, now_ns, of_all_nodes=is_whole)
    stored = services.queries.stored(job)
    topology = next(iter(services.logs.topology(job)), None) or kept(services.queries.path, stored)
    incidents = [each for each in services.incidents.incidents() if each.job_id == job]
    late = late_now(incidents, time.time()) if is_known else None
    return NodeFacts(services.host.view(job), late, topology, list(map(details_of, incidents)))


def asked_of_others(services: Services, job: str, last_s: float | None, *, live: bool = False) -> Asked:
    """Return the answers of the other agents about a job, after 20 s at most.

    Args:
        last_s: as in ``report``.
        live: request fewer operations for a replay.
    """
    which = f"job={quote(job, safe='')}"
    nodes = sum(peer.state != SELF for peer in services.peers.views()) + 1
    most = MOST_STEPS // nodes
    parts = services.peers.ask(f"report_part?{which}&steps={most}", within_s=WITHIN_S)
    asked = Asked(most, (), parts)
    windows = tuple(services.worker.ask(report_windows, job, last_s=last_s, asked=asked))
    paths = [f"cells?{which}&since={begin_ns // 10**9}" for begin_ns in windows]
    heard = services.peers.ask(*paths, f"ops?{which}&limit={MOST_OPERATIONS // nodes}", within_s=WITHIN_S)
    # Apart, so that an agent that takes too long for these counts all the same.
    collectives = min(MOST_COLLECTIVES, MOST_OF_ALL // nodes)
    waits = services.peers.ask(f"wait_part?{which}&most={collectives}", within_s=WITHIN_S)
    replayed = ADVICE_PARTS if live else FEW_PARTS
    last = "all" if last_s is None else f"{last_s:g}s"
    timelines = services.peers.ask(f"timeline_part?{which}&last={last}&limit={replayed // nodes}", within_s=WITHIN_S)
    return Asked(most, windows, parts, heard, collectives, waits, timelines, replayed)
