"""What an agent knows at one moment: the value that the rules read. Several nodes' parts add up to one for a whole job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from commwatch_agent.analysis.flight_recorder_analysis import RankDump
from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.analysis.waits.uneven_work import StepWaits
from commwatch_agent.incidents.incident import Condition
from commwatch_agent.incidents.metric_conditions import Name
from commwatch_agent.incidents.metric_window import MetricWindow
from commwatch_agent.model.views import GroupView, RankView
from commwatch_collectors.nccl.views import Finding


class KnownJob(NamedTuple):
    """What identifies a job of this node."""

    run: str
    world_size: int
    #: All its ranks are known to have ended.
    ended: bool
    #: Who runs it, and its script; empty: not known.
    user: str = ""
    script: str = ""


class WholeJob(NamedTuple):
    """What was found of a job on all its nodes."""

    conditions: list[Condition]
    #: All its ranks are known to have ended.
    ended: bool


@dataclass(frozen=True)
class Evidence:
    """What is known at one moment."""

    #: Unix time in s.
    now: float
    #: The jobs, by name.
    jobs: Mapping[str, KnownJob] = field(default_factory=dict)
    #: What ranks do wrong, by ``judging.judged`` of the same ranks and groups.
    verdicts: Sequence[Verdict] = ()
    ranks: Sequence[RankView] = ()
    groups: Sequence[GroupView] = ()
    #: How ranks waited for each other in the steps of the last minute, by job, where it is known.
    waits: Mapping[str, StepWaits] = field(default_factory=dict)
    #: The last minutes of the node's metrics.
    metrics: MetricWindow = field(default_factory=lambda: MetricWindow([name.value for name in Name]))
    #: The errors that were found in the logs of NCCL and the output of jobs, by job.
    errors: Mapping[str, Sequence[Finding]] = field(default_factory=dict)
    #: Dumps of PyTorch's Flight Recorder, of the job ``JOB``.
    dumps: Sequence[RankDump] = ()
    #: What was found of jobs with ranks on several nodes, in place of what this node knows of their ranks.
    whole: Mapping[str, WholeJob] = field(default_factory=dict)
    #: What all nodes know the runs of jobs by, by key.
    common: Mapping[str, str] = field(default_factory=dict)
    #: Names of the jobs of which another agent says what ranks do wrong.
    led_elsewhere: frozenset[str] = frozenset()


def is_ended(ranks: Iterable[RankView], world_size: int) -> bool:
    """Return whether a job is known to have ended: no rank runs, and none may run elsewhere.

    Ranks that have ended properly do so together. If others were lost, those that are not known may still run.
    """
    views = list(ranks)
    if any(view.state == "running" for view in views):
        return False
    return len({view.rank for view in views}) >= world_size or all(view.state in ("ended", "left") for view in views)
