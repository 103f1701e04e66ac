"""What an agent has running, for its routes and the live page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from commwatch.alerting.bundles import Evidence
from commwatch.alerting.evaluation import Alerting
from commwatch.analysis.queries import QueryService
from commwatch.server.worker import Worker
from commwatch.watchers.gpus import Gpus
from commwatch.watchers.host import HostWatch
from commwatch.watchers.inspector import Inspector
from commwatch.watchers.nccl import NcclLogs
from commwatch.watchers.profiles import Profiles
from commwatch.watchers.ras import Ras


@dataclass(kw_only=True)
class Services:
    """One agent's parts, as far as requests need them; each guards itself against several threads."""

    queries: QueryService
    #: Answers the questions that read much of the history.
    worker: Worker
    logs: NcclLogs
    profiles: Profiles
    gpus: Gpus
    inspector: Inspector
    ras: Ras
    host: HostWatch
    alerts: Alerting
    #: What was to be seen when alerts began to fire.
    evidence: Evidence
    #: Why the agent is broken; ``None``: it is not.
    healthy: Callable[[], str | None]
    #: Why it cannot answer yet, or not properly; ``None``: it can.
    ready: Callable[[], str | None]
    #: Whether it is about to end: then streams do, too.
    ending: Callable[[], bool]
    #: Unix time of the latest fetch of ``/metrics``, and the client's name; ``None``: there was none.
    scraped: tuple[float | None, str | None] = (None, None)
