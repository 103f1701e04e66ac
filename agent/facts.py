"""What advice is about, put together from a job's report, its operations and their references."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from commwatch.advice import Facts, Kind
from commwatch.answers import Agent
from commwatch.collectors.nccl.findings import Finding
from commwatch.host_views import HostView
from commwatch.near import places
from commwatch.network_advice import Network
from commwatch.shares import LEAST_STEPS, comm_share, exposed_share
from commwatch.summary import Row
from commwatch.views import GroupView, JobView, StepView

#: Advice needs so many steps of a rank, or so many seconds of them.
_ENOUGH_STEPS, _ENOUGH_S = 20, 30.0
#: The latest operations looked at for their dtypes.
_MOST_OPERATIONS = 1_000


class Counts(NamedTuple):
    """What a report has added up already."""

    #: By group and op, and by rank.
    operations: list[Row]
    by_rank: list[Row]
    #: The part of the steps that operations of a group took, by its label.
    group_shares: Mapping[str, float]


def facts(
    agent: Agent,
    job: JobView,
    steps: list[StepView],
    counts: Counts,
    findings: Iterable[Finding],
    host: HostView | None = None,
    gpus: Mapping[int, str] | None = None,
    late: Mapping[int, float] | None = None,
) -> Facts | None:
    """What is known of a job; ``None`` where no rank has made 20 steps or 30 s of them.

    Args:
        steps: of all ranks, without the long ones.
        host: the node, if somebody watches it right now.
        gpus: PCI addresses of the GPUs of the ranks of this node, as far as they are known.
        late: the stragglers right now, by rank, with the part of the time that the others wait for each.
    """
    total = sum(step.duration_s for step in steps)
    by_rank = Counter(step.rank for step in steps)
    if not total or (max(by_rank.values()) < _ENOUGH_STEPS and total / len(by_rank) < _ENOUGH_S):
        return None
    bubble = [step.p2p_wait_s for step in steps if step.p2p_wait_s is not None]
    return Facts(
        step_s=total / len(steps),
        # Where it is not known nothing is to follow from it.
        comm=comm_share(steps) or 0.0,
        exposed=exposed_share(steps),
        kinds=_kinds(agent, job.job_id, steps, counts),
        waits=_waits(counts.by_rank, steps),
        bubble=sum(bubble) / total if bubble else None,
        findings=list(findings),
        network=Network() if host is None else Network(places(gpus or {}, host), host.complaints),
        late=late or {},
    )


def _waits(by_rank: Iterable[Row], steps: Iterable[StepView]) -> dict[int, float]:
    """The part of its steps that each rank waited for late ranks and for messages.

    Left out are ranks of too few steps, and those that waited longer than all of theirs: then waiting outside of them is in it.
    """
    took: dict[int | str | None, list[float]] = {}
    for step in steps:
        took.setdefault(step.rank, []).append(step.duration_s)
    return {
        int(rank): waited_s / steps_s
        for row in by_rank
        if (rank := row.by["rank"]) is not None
        and len(of_rank := took.get(rank, [])) >= LEAST_STEPS
        and (row.wait_s is not None or row.p2p_wait_s is not None)
        and (waited_s := (row.wait_s or 0.0) + (row.p2p_wait_s or 0.0)) <= (steps_s := sum(of_rank))
    }


def _kinds(agent: Agent, job_id: str, steps: list[StepView], counts: Counts) -> list[Kind]:
    curves = agent.curves(job_id)
    groups: dict[str, GroupView] = {view.group: view for view in agent.groups(job_id)}
    latest = agent.operations(0, 1 << 62, None, lambda _: True, _MOST_OPERATIONS, job_id)
    dtypes = {(operation.group, operation.op): operation.dtype for operation in latest}
    total, ranks = sum(step.duration_s for step in steps), len({step.rank for step in steps})
    per_rank = len(steps) / ranks + 1  # with the step before the first mark
    kinds = []
    for row in counts.operations:
        group, op = str(row.by["group"]), str(row.by["op"])
        share = counts.group_shares.get(group, 0.0)
        of_group = sum(other.seconds for other in counts.operations if other.by["group"] == group)
        if not share or not row.seconds or row.group_size is None or row.group_size < 2:
            continue
        seconds = share * row.seconds / of_group * total / len(steps)
        view = groups.get(group)
        kinds.append(
            Kind(
                group=group,
                op=op,
                group_size=row.group_size,
                per_step=row.count / row.ranks / per_rank,
                size_bytes=row.bytes / row.count if row.count else 0,
                seconds=seconds,
                curve=curves.get((group, op)),
                efficiency=row.efficiency,
                reference=row.reference,
                local=len(view.ranks) if view is not None else 0,
                dtype=dtypes.get((group, op)),
                waiting_s=seconds * min(1.0, (row.wait_s or 0) / row.seconds),
            )
        )
    return kinds
