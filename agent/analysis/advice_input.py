"""What advice is about, put together from a job's report, its operations and their references."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from statistics import median
from typing import NamedTuple

from commwatch.analysis.advice import Facts, Kind
from commwatch.analysis.gpu_nic_affinity import places
from commwatch.analysis.knobs import is_model
from commwatch.analysis.network_advice import Network
from commwatch.analysis.queries import QueryService
from commwatch.collectors.nccl.findings import Finding
from commwatch.core.ages import LAST, parse_age
from commwatch.core.api_views import Row
from commwatch.core.cells import SLOT_NS
from commwatch.core.host_views import HostView
from commwatch.core.views import GroupView, JobView, StepView
from commwatch.history.store import COARSE_NS, COARSEN_AFTER_NS
from commwatch.ingest.step_accounting import LEAST_STEPS, comm_share, exposed_share, of_known

#: Most steps of a job that are read.
MOST_STEPS = 100_000
#: ``LAST`` in seconds.
LAST_S = parse_age(LAST)
#: Advice needs so many steps of a rank, or so many seconds of them.
_ENOUGH_STEPS, _ENOUGH_S = 20, 30.0
#: The latest operations looked at for their dtypes.
_MOST_OPERATIONS = 1_000


class Counts(NamedTuple):
    """What a stretch of a job's history adds up to."""

    #: Since when, in ns of Unix time; 0: its begin.
    since_ns: int
    #: By rank of this run: all its steps, and those that say something about training.
    steps_of: Mapping[int, list[StepView]]
    usual_of: Mapping[int, list[StepView]]
    #: By group and op, and by rank.
    operations: list[Row]
    by_rank: list[Row]
    #: The part of the usual steps that operations of a group took, by its label, the largest first.
    group_shares: Mapping[str, float]

    @property
    def steps(self) -> list[StepView]:
        """All steps."""
        return [step for of_rank in self.steps_of.values() for step in of_rank]

    @property
    def usual(self) -> list[StepView]:
        """Those of all ranks that say something about training."""
        return [step for of_rank in self.usual_of.values() for step in of_rank]

    @property
    def enough(self) -> bool:
        """Whether a rank has made 20 usual steps, or they have 30 s of them each."""
        made = [of_rank for of_rank in self.usual_of.values() if of_rank]
        total_s = sum(step.duration_s for of_rank in made for step in of_rank)
        return bool(total_s) and (max(map(len, made)) >= _ENOUGH_STEPS or total_s / len(made) >= _ENOUGH_S)


def count(agent: QueryService, job_id: str, since_ns: int = 0) -> Counts:
    """Read a job's history from then on, or of the latest steps that can be read."""
    until = time.time_ns()
    steps = agent.steps(since_ns, until, job_id, None, MOST_STEPS)
    if len(steps) == MOST_STEPS:  # sums and steps are of the same time
        _, since_ns = slot_of(steps[-1].end_at, until)
    steps_of: dict[int, list[StepView]] = {view.rank: [] for view in agent.ranks(job_id)}
    for step in steps:
        if step.rank in steps_of and step.end_at * 1e9 >= since_ns:
            steps_of[step.rank].append(step)
    usual_of = {rank: usual_steps(of_rank) for rank, of_rank in steps_of.items()}
    operations, by_rank = sums(agent, job_id, since_ns)
    known = [step for of_rank in usual_of.values() for step in of_rank if step.comm_s is not None]
    return Counts(
        since_ns,
        steps_of,
        usual_of,
        operations,
        by_rank=[row for row in by_rank if row.by["rank"] in steps_of],
        group_shares=_group_shares(known),
    )


def sums(agent: QueryService, job_id: str, since_ns: int = 0) -> tuple[list[Row], list[Row]]:
    """A job's operations from then on, by group and op, and by rank."""
    until = time.time_ns()
    _, operations = agent.summary(since_ns, until, ["group", "op"], {"job_id": job_id})
    _, by_rank = agent.summary(since_ns, until, ["rank"], {"job_id": job_id})
    return operations, by_rank


def count_last(agent: QueryService, job_id: str, last_s: float | None) -> Counts:
    """The same of its last so many seconds, up to its last step, or of all of it where these are too few; ``None``: of all of it.

    A run before under the same name is left out.
    """
    now_ns = time.time_ns()
    begun_ns, _ = slot_of(agent.begun_at(job_id), now_ns)
    latest = agent.steps(0, now_ns, job_id, None, 1)
    if last_s is not None and latest:
        since_ns, _ = slot_of(latest[0].end_at - last_s, now_ns)
        counts = count(agent, job_id, max(begun_ns, since_ns))
        if counts.enough:
            return counts
    return count(agent, job_id, begun_ns)


def slot_of(at: float, now_ns: int) -> tuple[int, int]:
    """Where the slot of the history that a moment is in begins and ends, in ns of Unix time.

    Args:
        at: Unix time in seconds.
        now_ns: Unix time in ns. The history may have put slots older than an hour together.
    """
    length_ns = COARSE_NS if at * 1e9 < now_ns - COARSEN_AFTER_NS else SLOT_NS
    begin_ns = max(0, int(at * 1e9)) // length_ns * length_ns
    return begin_ns, begin_ns + length_ns


def usual_steps(steps: list[StepView]) -> list[StepView]:
    """The steps of a rank that say something about training: those that were not long, if there are enough."""
    usual = [step for step in steps if not step.long]
    return usual if len(usual) >= LEAST_STEPS else []


def _group_shares(steps: list[StepView]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for step in steps:
        for label, share in step.group_shares.items():
            sums[label] = sums.get(label, 0.0) + share * step.duration_s
    duration = sum(step.duration_s for step in steps)
    return {label: part / duration for label, part in sorted(sums.items(), key=lambda item: -item[1])}


def facts(
    agent: QueryService,
    job: JobView,
    counts: Counts,
    findings: Iterable[Finding],
    host: HostView | None = None,
    gpus: Mapping[int, str] | None = None,
    late: Mapping[int, float] | None = None,
) -> Facts | None:
    """What is known of a job; ``None`` where no rank has made 20 steps or 30 s of them.

    Args:
        host: the node, if somebody watches it right now.
        gpus: PCI addresses of the GPUs of the ranks of this node, as far as they are known.
        late: the stragglers right now, by rank, with the part of the time that the others wait for each.
    """
    if not counts.enough:
        return None
    steps = counts.usual
    total = sum(step.duration_s for step in steps)
    of_ranks = [of_rank for of_rank in counts.usual_of.values() if of_rank]
    bubble = [step.p2p_wait_s for step in steps if step.p2p_wait_s is not None]
    return Facts(
        step_s=total / len(steps),
        # Where it is not known nothing is to follow from it.
        comm=of_known(of_ranks, comm_share)[0] or 0.0,
        exposed=of_known(of_ranks, exposed_share)[0],
        kinds=_kinds(agent, job.job_id, counts),
        waits=_waits(counts),
        bubble=sum(bubble) / total if bubble else None,
        findings=list(findings),
        network=Network() if host is None else Network(places(gpus or {}, host), host.complaints),
        late=late or {},
    )


def _waits(counts: Counts) -> dict[int, float]:
    """The part of its usual steps that each rank waited for late ranks and for messages.

    Left out are ranks of too few steps, those of whose long steps the communication is not known, and those that waited longer than their
    usual steps took: then waiting outside of them is in it.
    """
    waits = {}
    for row in counts.by_rank:
        rank = int(row.by["rank"] or 0)
        usual, waited_s = counts.usual_of[rank], (row.wait_s or 0.0) + (row.p2p_wait_s or 0.0)
        long = [step.comm_s for step in counts.steps_of[rank] if step.long]
        more_s = _longer(long, [step.comm_s for step in usual])
        if len(usual) < LEAST_STEPS or (row.wait_s is None and row.p2p_wait_s is None) or more_s is None:
            continue
        steps_s = sum(step.duration_s for step in usual)
        if waited_s - more_s <= steps_s:
            waits[rank] = max(0.0, waited_s - more_s) / steps_s
    return waits


def _longer(long: Collection[float | None], usual: Collection[float | None]) -> float | None:
    """By how much communication in long steps is longer than usual: waiting, while a rank writes a checkpoint. ``None``: not known."""
    if not long:
        return 0.0
    known = [comm for comm in usual if comm is not None]
    if None in long or not known:
        return None
    return sum(max(0.0, comm - median(known)) for comm in long if comm is not None)


def _longer_of_groups(counts: Counts) -> dict[str, float]:
    """The same by label of the group, in all ranks; as far as it is known."""
    more: dict[str, float] = {}
    for rank, usual in counts.usual_of.items():
        long = [step for step in counts.steps_of[rank] if step.long]
        for label in counts.group_shares if long and usual else ():
            of_steps = (
                [step.group_shares.get(label, 0.0) * step.duration_s for step in each] for each in (long, usual)
            )
            more[label] = more.get(label, 0.0) + (_longer(*of_steps) or 0.0)
    return more


def _is_sharded(operations: Iterable[Row]) -> bool:
    """Whether a data parallel group both gathers and scatters."""
    ops: dict[str, set[str]] = {}
    for row in operations:
        ops.setdefault(str(row.by["group"]), set()).add(str(row.by["op"]))
    return any({"all_gather", "reduce_scatter"} <= each and not is_model(group) for group, each in ops.items())


def _kinds(agent: QueryService, job_id: str, counts: Counts) -> list[Kind]:
    steps = counts.usual
    curves = agent.curves(job_id)
    groups: dict[str, GroupView] = {view.group: view for view in agent.groups(job_id)}
    latest = agent.operations(0, 1 << 62, None, lambda _: True, _MOST_OPERATIONS, job_id)
    dtypes = {(operation.group, operation.op): operation.dtype for operation in latest}
    total, ranks = sum(step.duration_s for step in steps), len({step.rank for step in steps})
    per_rank = sum(map(len, counts.steps_of.values())) / ranks + (
        not counts.since_ns
    )  # with the step before the first mark
    more, sharded, kinds = _longer_of_groups(counts), _is_sharded(counts.operations), []
    for row in counts.operations:
        group, op = str(row.by["group"]), str(row.by["op"])
        share = counts.group_shares.get(group, 0.0)
        of_group = sum(other.seconds for other in counts.operations if other.by["group"] == group)
        if not share or not row.seconds or row.group_size is None or row.group_size < 2:
            continue
        seconds = share * row.seconds / of_group * total / len(steps)
        more_s = more.get(group, 0.0) * row.seconds / of_group
        waiting_s = max(0.0, (row.wait_s or 0.0) - more_s) / max(row.seconds - more_s, 1e-9)
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
                waiting_s=seconds * min(1.0, waiting_s),
                sharded=sharded,
            )
        )
    return kinds
