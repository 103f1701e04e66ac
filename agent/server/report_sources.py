"""What reports and advice on a job need from this agent's memory and from the agents of its other nodes."""

from __future__ import annotations

from urllib.parse import quote

from commwatch.analysis import live_ranks
from commwatch.nodes.job_report import MOST_OPERATIONS, MOST_STEPS
from commwatch.runtime.peers import SELF
from commwatch.server.job_reports import Asked, Own
from commwatch.server.services import Services
from commwatch.watchers.nccl_archive import kept

#: Seconds that the other agents have, both times that they are asked.
WITHIN_S = 5.0


def own_facts(services: Services, job: str) -> Own:
    """Return what this agent knows of a job beside its history."""
    with services.queries.live(job) as (jobs, now_ns):
        late = live_ranks.late_now(jobs, now_ns)
    state = services.queries.path.parent
    return Own(services.host.view(job), late, next(iter(services.logs.topology(job)), None) or kept(state, job))


def asked_of_others(services: Services, job: str, last_s: float | None) -> Asked:
    """Return the answers of the other agents about a job, after 10 s at most; ``last_s``: as in ``report``."""
    which = f"job={quote(job, safe='')}"
    nodes = sum(peer.state != SELF for peer in services.peers.views()) + 1
    most = MOST_STEPS // nodes
    parts = services.peers.ask(f"report_part?{which}&steps={most}", within_s=WITHIN_S)
    asked = Asked(most, (), parts)
    windows = tuple(services.worker.find("report_windows", job=job, last_s=last_s, asked=asked))
    paths = [f"cells?{which}&since={begin_ns // 10**9}" for begin_ns in windows]
    heard = services.peers.ask(*paths, f"ops?{which}&limit={MOST_OPERATIONS // nodes}", within_s=WITHIN_S)
    return Asked(most, windows, parts, heard)
