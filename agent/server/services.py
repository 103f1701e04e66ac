"""What an agent has running beside its intake, for the routes and the live page."""

from __future__ import annotations

from typing import NamedTuple

from commwatch.alerting.bundles import Evidence
from commwatch.alerting.evaluation import Alerting
from commwatch.server.routes.witnesses import Witnesses
from commwatch.watchers.gpus import Gpus
from commwatch.watchers.host import HostWatch
from commwatch.watchers.nccl import NcclLogs
from commwatch.watchers.profiles import Profiles


class Watchers(NamedTuple):
    """What an agent has running beside its intake, each with a thread of its own."""

    #: The NCCL logs it follows.
    logs: NcclLogs
    #: What it does on demand.
    profiles: Profiles
    #: The cards of the node.
    gpus: Gpus
    #: NCCL Inspector and NCCL's RAS.
    witnesses: Witnesses
    #: What it knows of the node.
    host: HostWatch
    #: The rules that it evaluates itself.
    alerts: Alerting
    #: What was to be seen when they began to fire.
    evidence: Evidence
