"""The services of an agent that its routes and the live page use."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.incidents.verdict_views import verdicts_of
from commwatch_agent.model.api_views import PushView
from commwatch_agent.notify.bundles import Bundles
from commwatch_agent.notify.incident_watch import IncidentWatch
from commwatch_agent.notify.look import RankLook
from commwatch_agent.questions.worker import Worker
from commwatch_agent.runtime.peers import Peers
from commwatch_agent.sources.culprits import Culprits
from commwatch_agent.sources.gpus import Gpus
from commwatch_agent.sources.host import HostWatch
from commwatch_agent.sources.inspector import Inspector
from commwatch_agent.sources.nccl import NcclLogs
from commwatch_agent.sources.profiles import Profiles
from commwatch_agent.sources.ras import Ras


@dataclass(kw_only=True)
class Services:
    """The services of one agent that requests use; each is safe to call from several threads."""

    queries: QueryService
    #: Answers the questions that read much of the history.
    worker: Worker
    logs: NcclLogs
    profiles: Profiles
    gpus: Gpus
    inspector: Inspector
    ras: Ras
    host: HostWatch
    #: What is wrong, and the alerts of that.
    incidents: IncidentWatch
    #: Looks at what ranks of this node do right now.
    ranks: RankLook
    #: What the culprits on this node do.
    culprits: Culprits
    #: Bundles of data that were captured when alerts began to fire.
    evidence: Bundles
    #: The agents of other nodes.
    peers: Peers
    #: A random name of this agent, by which it recognises its own address among those of its peers.
    id: str
    #: Returns why the agent is broken; ``None``: it is not.
    healthy: Callable[[], str | None]
    #: Returns why it cannot answer yet, or not properly; ``None``: it can.
    ready: Callable[[], str | None]
    #: Returns whether it is about to end: then streams end, too.
    ending: Callable[[], bool]
    #: Asks the agents of other nodes about a job, if this agent leads it.
    look_elsewhere: Callable[[str], None] = lambda job: None
    #: Returns the state of the pushes over OTLP, by signal.
    pushes: Callable[[], dict[str, PushView]] = dict
    #: Unix time and client of the latest scrape of ``/metrics`` by Prometheus, or of the latest by others if it never did; ``None``: no scrape yet.
    scraped: tuple[float | None, str | None] = (None, None)

    def verdicts(self, job: str | None) -> list[Verdict]:
        """Return what ranks of a job (``None``: of all jobs) do wrong right now, the longest first: the incidents of this moment."""
        self.ranks.search_anew()
        return verdicts_of(self.incidents.current(), time.time(), job)
