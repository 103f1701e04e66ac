"""Collects the facts for advice from a job's steps, its operations and their references."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean
from typing import NamedTuple

from commwatch.wire import events as ev
from commwatch_agent.analysis.advice_facts import NO_WHYS, Facts, Kind, Whys
from commwatch_agent.analysis.framework_settings import in_use, is_model
from commwatch_agent.analysis.gpu_nic_affinity import places
from commwatch_agent.analysis.headline import mean_core_wait
from commwatch_agent.analysis.nccl_operations import nccl_operations_of
from commwatch_agent.analysis.network_advice import Network
from commwatch_agent.analysis.pipelines import Message, are_pipeline
from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.analysis.waits.after_steps import after_steps, rows_without
from commwatch_agent.analysis.waits.links import links, sending
from commwatch_agent.analysis.waits.pauses import pauses_of
from commwatch_agent.analysis.waits.uneven_work import (
    ENOUGH_S,
    ENOUGH_STEPS,
    Beyond,
    Comm,
    beyond_usual,
    waited_share,
)
from commwatch_agent.history.operations import Operation
from commwatch_agent.history.rows import COARSE_NS, COARSEN_AFTER_NS
from commwatch_agent.ingest.step_accounting import LEAST_STEPS, comm_share, exposed_share, of_known
from commwatch_agent.model.api_views import Row
from commwatch_agent.model.cells import SLOT_NS
from commwatch_agent.model.durations import LAST, parse_age
from commwatch_agent.model.host_views import HostView
from commwatch_agent.model.model_parts.repeats import Repeat
from commwatch_agent.model.nccl_views import NcclOperations
from commwatch_agent.model.views import ITERATIONS, GroupView, JobView, RankView, StepView
from commwatch_collectors.nccl.views import Finding
from commwatch_collectors.node.cores import Cores

#: Most steps of a job that are read.
MOST_STEPS = 100_000
#: ``LAST`` in seconds.
LAST_S = parse_age(LAST)
#: Most operations (the latest) that are read for their dtypes; of those that NCCL timed, for what it chose; and after the last steps of their ranks.
_MOST_OPERATIONS, MOST_TIMED, _MOST_AFTER = 1_000, 10_000, 10_000


@dataclass(frozen=True)
class JobSteps:
    """The steps in a part of a job's history."""

    #: Begin of that part in ns of Unix time; 0: begin of the job.
    since_ns: int
    #: By rank of this run: all its steps, and its usual steps (see ``usual_steps``).
    steps_of: Mapping[int, list[StepView]]
    usual_of: Mapping[int, list[StepView]]
    #: They are all within one slot of the history, which also has earlier ones: no sums of operations cover the same time.
    within_slot: bool = field(default=False, kw_only=True)

    @cached_property
    def beyond(self) -> dict[int, Beyond | None]:
        """What each rank communicated in its long steps beyond the usual (``beyond_usual``), in s."""
        return beyond_usual(
            {rank: [Comm(step.seq, step.comm_s, step.long) for step in steps] for rank, steps in self.steps_of.items()}
        )

    @property
    def steps(self) -> list[StepView]:
        """All steps of all ranks."""
        return [step for of_rank in self.steps_of.values() for step in of_rank]

    @property
    def usual(self) -> list[StepView]:
        """The usual steps of all ranks."""
        return [step for of_rank in self.usual_of.values() for step in of_rank]

    @property
    def enough(self) -> bool:
        """Whether a rank has 20 usual steps, or the ranks have 30 s of them on average; and sums of operations can cover the same time."""
        made = [of_rank for of_rank in self.usual_of.values() if of_rank]
        total_s = sum(step.duration_s for of_rank in made for step in of_rank)
        return (
            bool(total_s)
            and not self.within_slot
            and (max(map(len, made)) >= ENOUGH_STEPS or total_s / len(made) >= ENOUGH_S)
        )


class Sums(NamedTuple):
    """Sums of operations: one row per group and op; one row per rank."""

    operations: list[Row]
    by_rank: list[Row]


@dataclass(frozen=True)
class Counts(JobSteps):
    """Steps and sums of operations over a part of a job's history."""

    #: Of all operations; and of those between the first step mark and the end of the last step of their rank.
    every: Sums
    in_steps: Sums
    #: Share of the usual steps that operations of a group took, by its label, the largest first.
    group_shares: Mapping[str, float]


def count(agent: QueryService, job_id: str) -> Counts:
    """Read a job's history; if there are too many steps, only the time of the latest."""
    return _with_sums(agent, job_id, steps_since(agent, job_id))


def count_last(agent: QueryService, job_id: str, last_s: float | None) -> Counts:
    """Read the steps of ``last_steps``, and the operations of that time."""
    return _with_sums(agent, job_id, last_steps(agent, job_id, last_s))


def steps_since(agent: QueryService, job_id: str, since_ns: int = 0) -> JobSteps:
    """Read a job's steps from ``since_ns`` on; if they are too many, only the latest."""
    steps, more = agent.latest_steps(since_ns, job_id, MOST_STEPS)
    within_slot = False
    if more and steps:  # sums and steps must cover equal times
        begin_ns, since_ns = slot_of(steps[-1].end_at, time.time_ns())
        within_slot = steps[0].end_at * 1e9 < since_ns
        since_ns = begin_ns if within_slot else since_ns
    steps_of: dict[int, list[StepView]] = {view.rank: [] for view in agent.ranks(job_id)}
    for step in steps:
        if step.rank in steps_of and step.end_at * 1e9 >= since_ns:
            steps_of[step.rank].append(step)
    usual_of = {rank: usual_steps(of_rank) for rank, of_rank in steps_of.items()}
    return JobSteps(since_ns, steps_of, usual_of, within_slot=within_slot)


def last_steps(agent: QueryService, job_id: str, last_s: float | None) -> JobSteps:
    """Read the ``last_s`` seconds up to the job's last step; read the whole job if that is too little, or with ``None``.

    An earlier run of that name is left out.
    """
    now_ns = time.time_ns()
    begun_ns, _ = slot_of(agent.begun_at(job_id), now_ns)
    latest, _ = agent.latest_steps(0, job_id, 1)
    if last_s is not None and latest:
        since_ns, _ = slot_of(latest[0].end_at - last_s, now_ns)
        steps = steps_since(agent, job_id, max(begun_ns, since_ns))
        if steps.enough:
            return steps
    return steps_since(agent, job_id, begun_ns)


def _with_sums(agent: QueryService, job_id: str, steps: JobSteps) -> Counts:
    every, begun = sums(agent, job_id, steps.since_ns)
    in_steps = _until_last(agent, job_id, steps, begun)
    known = [step for of_rank in steps.usual_of.values() for step in of_rank if step.comm_s is not None]
    return Counts(
        steps.since_ns,
        steps.steps_of,
        steps.usual_of,
        every,
        in_steps._replace(by_rank=[row for row in in_steps.by_rank if row.by["rank"] in steps.steps_of]),
        group_shares=_group_shares(known),
        within_slot=steps.within_slot,
    )


def _until_last(agent: QueryService, job_id: str, steps: JobSteps, begun: Sums) -> Sums:
    """Return the sums without the operations after the last step of their rank; of very many, only the latest are known."""
    ended_at = {rank: max(step.end_at for step in of_rank) for rank, of_rank in steps.steps_of.items() if of_rank}
    if not ended_at:
        return begun
    # A rank that made its last step long ago must not have the whole history read.
    since_s = max(min(ended_at.values()), max(ended_at.values()) - LAST_S)

    def is_after(each: Operation) -> bool:
        return each.end_at > ended_at.get(each.rank, each.end_at)

    found = agent.operations(int(since_s * 1e9), 1 << 62, None, is_after, _MOST_AFTER, job=job_id)
    after = after_steps(found, ended_at)
    return Sums(*(rows_without(rows, after) for rows in begun))


def sums(agent: QueryService, job_id: str, since_ns: int = 0) -> tuple[Sums, Sums]:
    """Return the sums of a job's operations from ``since_ns`` on: of all, and of those after the first step mark of their rank."""
    by = [["group", "op"], ["rank"]]
    apart = [[*each, "startup"] for each in by]
    _, found = agent.summaries(since_ns, ev.MAX_PLAUSIBLE, [*by, *apart], {"job_id": job_id})
    in_steps = [[row for row in rows if not row.by["startup"]] for rows in found[len(by) :]]
    return Sums(*found[: len(by)]), Sums(*in_steps)


def slot_of(at: float, now_ns: int) -> tuple[int, int]:
    """Return begin and end of the history slot that contains a time, in ns of Unix time.

    Args:
        at: the time, in Unix seconds.
        now_ns: Unix time in ns. The history may have merged slots older than an hour.
    """
    length_ns = COARSE_NS if at * 1e9 < now_ns - COARSEN_AFTER_NS else SLOT_NS
    begin_ns = max(0, int(at * 1e9)) // length_ns * length_ns
    return begin_ns, begin_ns + length_ns


def usual_steps(steps: list[StepView]) -> list[StepView]:
    """Return the steps of a rank that were not long; none if they are too few."""
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
    *,
    network: Network | None = None,
    late: Mapping[int, float] | None = None,
    whys: Whys = NO_WHYS,
) -> Facts | None:
    """Return the facts about a job; ``None`` if there are too few steps (see ``Counts.enough``).

    Args:
        network: the state of the nodes' networks, if agents watch them right now.
        late: the stragglers by rank, with the share of time (0 to 1) that the others wait for each; the recorded steps show how long one was late
            before that was known. ``None``: no agent watches the job now, and those of the recorded steps count.
        whys: why ranks wait, or did.
    """
    if not counts.enough:
        return None
    steps = counts.usual
    total = sum(step.duration_s for step in steps)
    of_ranks = [of_rank for of_rank in counts.usual_of.values() if of_rank]
    bubble = [step.p2p_wait_s for step in steps if step.p2p_wait_s is not None]
    latest, trains, ranks = _latest(agent, job.job_id), job.step_source != ITERATIONS, agent.ranks(job.job_id)
    return Facts(
        step_s=total / len(steps),
        # 0 if not known, so that no advice follows from it.
        comm=of_known(of_ranks, comm_share)[0] or 0.0,
        exposed=of_known(of_ranks, exposed_share)[0],
        kinds=_kinds(agent, job.job_id, counts, latest),
        # A server's ranks wait for its next request.
        waits=_waits(counts) if trains else {},
        bubble=sum(bubble) / total if bubble else None,
        findings=list(findings),
        network=network or Network(),
        late=_with_recorded(late, _late(counts, messages=bool(bubble)) if trains else {}),
        whys=whys,
        choices=_choices(agent, job.job_id, counts.since_ns, latest),
        pipeline=bool(bubble) and _has_pipeline(agent, job.job_id, counts.since_ns),
        for_cores=mean_core_wait(ranks),
        pauses=pauses_of(counts.steps_of, counts.beyond) if trains else None,
        sending=sending(links(ranks)),
        trains=trains,
        ranks=len(ranks),
        cores=_cores(ranks),
    )


def _cores(ranks: Iterable[RankView]) -> dict[str, list[Cores]]:
    found: dict[str, list[Cores]] = {}
    for rank in ranks:
        if rank.cores is not None:
            found.setdefault(rank.host, []).append(rank.cores)
    return found


def waiting_share(agent: QueryService, job_id: str, counts: Counts) -> float | None:
    """Return ``Facts.waiting``, also of few steps; ``None``: there are no usual ones, or no sums of the same time."""
    steps = counts.usual
    if not steps or counts.within_slot:
        return None
    comm = of_known([of_rank for of_rank in counts.usual_of.values() if of_rank], comm_share)[0] or 0.0
    mean_s = sum(step.duration_s for step in steps) / len(steps)
    return min(comm, sum(kind.waiting_s for kind in _kinds(agent, job_id, counts, [])) / mean_s)


def _with_recorded(late: Mapping[int, float] | None, recorded: Mapping[int, float]) -> dict[int, float]:
    """Return the known stragglers, with the share of the recorded steps where that is larger; ``None``: those of the recorded steps."""
    known = recorded if late is None else late
    return {rank: max(share, recorded.get(rank, 0.0)) for rank, share in known.items()}


def _has_pipeline(agent: QueryService, job_id: str, since_ns: int) -> bool:
    """Return whether the latest messages of a group are those of a pipeline."""
    messages = agent.operations(since_ns, 1 << 62, None, lambda each: each.op in ev.P2P, _MOST_OPERATIONS, job=job_id)
    groups: dict[str, tuple[str, int]] = {}
    counts: dict[str, Counter[Message]] = {}
    for each in messages:
        groups[each.group_id] = each.group, each.group_size
        of_group = counts.setdefault(each.group_id, Counter())
        if each.peer is not None:
            of_group[Message(each.rank, each.op, each.peer)] += 1
    members = {view.group_id: view.members for view in agent.groups(job_id)}
    return any(are_pipeline(*group, counts[at], members.get(at)) for at, group in groups.items())


def network_of(host: HostView, ranks: Iterable[RankView]) -> Network:
    """Return the facts about the network of a node and its ``ranks``."""
    gpus = {rank.rank: rank.gpu_bus_id for rank in ranks if rank.gpu_bus_id is not None}
    return Network(places(gpus, host), host.complaints)


def nccl_choices(agent: QueryService, job_id: str) -> list[NcclOperations]:
    """Return the latest ``MOST_TIMED`` operations of a job that NCCL timed, by what it chose for them."""
    return _choices(agent, job_id, 0, _latest(agent, job_id))


def _choices(agent: QueryService, job_id: str, since_ns: int, latest: list[Operation]) -> list[NcclOperations]:
    if not any(operation.timing == "nccl" for operation in latest):
        return []  # without NCCL's times, the whole history would be searched for them
    return nccl_operations_of(
        agent.operations(since_ns, 1 << 62, None, lambda each: each.timing == "nccl", MOST_TIMED, job=job_id)
    )


def _latest(agent: QueryService, job_id: str) -> list[Operation]:
    return agent.operations(0, 1 << 62, None, lambda _: True, _MOST_OPERATIONS, job=job_id)


def _waits(counts: Counts, *, messages: bool = True) -> dict[int, float]:
    """Return the share of its usual steps that each rank waited for late ranks, and for ``messages``.

    Left out are ranks with too few steps, ranks with long steps of unknown communication, and ranks that waited longer
    than their usual steps took, because part of that waiting was outside these steps.
    """
    waits = {}
    for row in counts.in_steps.by_rank:
        rank = int(row.by["rank"] or 0)
        usual, for_messages = counts.usual_of[rank], row.p2p_wait_s if messages else None
        if row.wait_s is None and for_messages is None:
            continue
        waited_s = (row.wait_s or 0.0) + (for_messages or 0.0)
        share = waited_share(waited_s, [step.duration_s for step in usual], counts.beyond[rank], comm_share(usual))
        if share is not None:
            waits[rank] = share
    return waits


def _late(counts: Counts, *, messages: bool) -> dict[int, float]:
    """Return the stragglers of the usual steps, as ``late_in_steps``; ``messages``: there are some."""
    from commwatch_agent.analysis.straggler_search import late_in_steps  # brings in numpy

    every = _waits_by_step(counts, messages=True)
    late = late_in_steps(*every, messages=messages)
    if messages:
        # Stages of a pipeline are never quite even, but who is late to collectives, too, is late by any lead.
        known = late_in_steps(*_waits_by_step(counts, messages=False), messages=False)
        late |= {rank: cost for rank, cost in late_in_steps(*every, messages=False).items() if rank in known}
    return late


def _waits_by_step(counts: Counts, *, messages: bool) -> tuple[dict[int, list[float]], list[float]]:
    """Return by rank what it waited in each usual step that all ranks have, in s; and how long these steps took.

    In a step a rank waits for as much of its communication as it does not need on average, and for no longer than compute waits, where that is known.

    Args:
        messages: as for ``_waits``.
    """

    def comm_s(step: StepView) -> float:
        return (step.comm_s or 0.0) - (0.0 if messages else step.p2p_wait_s or 0.0)

    waits = _waits(counts, messages=messages)
    of_ranks = {rank: {step.seq: step for step in counts.usual_of[rank] if step.comm_s is not None} for rank in waits}
    common = [seq for seq in next(iter(of_ranks.values()), {}) if all(seq in steps for steps in of_ranks.values())]
    waited_s = {}
    for rank, steps in of_ranks.items() if common else ():
        needed_s = mean(map(comm_s, steps.values())) - waits[rank] * mean(step.duration_s for step in steps.values())
        waited_s[rank] = [_at_most(comm_s(steps[seq]) - needed_s, steps[seq].exposed_s) for seq in common]
    return waited_s, [mean(steps[seq].duration_s for steps in of_ranks.values()) for seq in common]


def _at_most(waited_s: float, exposed_s: float | None) -> float:
    return waited_s if exposed_s is None else min(waited_s, exposed_s)


def beyond_of_groups(counts: Counts) -> dict[str, Beyond]:
    """Return ``beyond_usual`` by group label in s, summed over all ranks and as far as it is known; empty: no step was long.

    A rank cannot have waited longer in its long steps than in the whole time.
    """
    waited_s = {row.by["rank"]: row.wait_s or 0.0 for row in counts.in_steps.by_rank}
    if not any(step.long for step in counts.steps):
        return {}
    more = {}
    for label in counts.group_shares:
        ranks = {rank: [_comm(step, label) for step in steps] for rank, steps in counts.steps_of.items()}
        of_ranks = [(rank, beyond) for rank, beyond in beyond_usual(ranks).items() if beyond is not None]
        more[label] = Beyond(
            sum(beyond.longer for _, beyond in of_ranks),
            sum(min(beyond.waited, waited_s.get(rank, 0.0)) for rank, beyond in of_ranks),
        )
    return more


def _comm(step: StepView, label: str) -> Comm:
    """Return the communication of a step in groups of one label, in s."""
    known_s = None if step.comm_s is None else step.group_shares.get(label, 0.0) * step.duration_s
    return Comm(step.seq, known_s, step.long)


def _is_sharded(operations: Iterable[Row]) -> bool:
    """Return whether a data parallel group has both all_gathers and reduce_scatters."""
    ops: dict[str, set[str]] = {}
    for row in operations:
        ops.setdefault(str(row.by["group"]), set()).add(str(row.by["op"]))
    return any({"all_gather", "reduce_scatter"} <= each and not is_model(group) for group, each in ops.items())


def most_on_a_host(groups: Iterable[GroupView], hosts: Mapping[int, str]) -> dict[str, int]:
    """Return by label how many ranks of a group are on one host at most; of several groups with that label, for the one with the fewest.

    Args:
        hosts: the host of each known rank.
    """
    found: dict[str, int] = {}
    for group in groups:
        most = max(Counter(hosts[rank] for rank in group.ranks if rank in hosts).values(), default=0)
        found[group.group] = min(most, found.get(group.group, most))
    return found


def _waiting_parts(counts: Counts) -> dict[tuple[str, str], float]:
    """Return which part (0 to 1) of the operations of each group and op in the usual steps was waiting for late ranks, as far as it is known.

    Steps know their communication by group only. So the part of a group counts, and each op has as much of it as it waited in all, if it was that long.
    """
    groups: dict[str, list[Row]] = {}
    for row in counts.in_steps.operations:
        groups.setdefault(str(row.by["group"]), []).append(row)
    beyond, parts = beyond_of_groups(counts), {}
    for group, rows in groups.items():
        more = beyond.get(group, Beyond(0.0, 0.0))
        lasted_s, waited_s = sum(row.seconds for row in rows), sum(row.wait_s or 0.0 for row in rows)
        part = min(1.0, max(0.0, waited_s - more.waited) / max(lasted_s - more.longer, 1e-9))
        own_s = [min(row.seconds, part * lasted_s * (row.wait_s or 0.0) / (waited_s or 1.0)) for row in rows]
        # What is more than some of them lasted is of the others.
        rest = (part * lasted_s - sum(own_s)) / max(lasted_s - sum(own_s), 1e-9)
        for row, own in zip(rows, own_s, strict=True):
            parts[group, str(row.by["op"])] = (own + rest * (row.seconds - own)) / row.seconds if row.seconds else 0.0
    return parts


def _kinds(agent: QueryService, job_id: str, counts: Counts, latest: list[Operation]) -> list[Kind]:
    steps = counts.usual
    curves = agent.curves(job_id)
    groups, views = agent.groups(job_id), agent.ranks(job_id)
    local = most_on_a_host(groups, {view.rank: view.host for view in views})
    backends, frameworks = {group.group: group.backend for group in groups}, in_use(view.frameworks for view in views)
    dtypes = {(operation.group, operation.op): operation.dtype for operation in latest}
    repeats = agent.repeats(job_id) if latest else {}
    total, ranks = sum(step.duration_s for step in steps), len({step.rank for step in steps})
    per_rank = sum(map(len, counts.steps_of.values())) / ranks
    waiting, sharded, kinds = _waiting_parts(counts), _is_sharded(counts.in_steps.operations), []
    for row in counts.in_steps.operations:
        group, op = str(row.by["group"]), str(row.by["op"])
        share = counts.group_shares.get(group, 0.0)
        of_group = sum(other.seconds for other in counts.in_steps.operations if other.by["group"] == group)
        if not share or not row.seconds or row.group_size is None or row.group_size < 2:
            continue
        seconds = share * row.seconds / of_group * total / len(steps)
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
                local=local.get(group, 0),
                dtype=dtypes.get((group, op)),
                waiting_s=seconds * waiting[group, op],
                sharded=sharded,
                frameworks=frameworks,
                backend=backends.get(group),
                repeat=repeats.get((group, op), Repeat()),
            )
        )
    return kinds
