"""Pipeline parallelism: which stages wait for messages, in which direction, and the resulting bubble. Pure.

A stage receives activations from the stage before it and gradients from the stage after it. Its waits to receive or send
activations are *forward*, those for gradients are *backward*. The **bubble** is the share of a step that a stage spends in
such waits. With m micro-batches and p equal stages, 1F1B and GPipe have a bubble of at least (p−1)/(m+p−1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import NamedTuple, TypeVar

from commwatch.wire import events as ev
from commwatch_agent.analysis.framework_settings import is_model, is_pipeline
from commwatch_agent.analysis.live_ranks import of_this_run
from commwatch_agent.ingest.jobs import Job
from commwatch_agent.ingest.rank_totals import RankTotals
from commwatch_agent.model.cells import GroupInfo, Messages

_T = TypeVar("_T")
DIRECTIONS = ("forward", "backward")
#: Most peers of a stage, and fewest messages of a first stage.
_MOST_PEERS, _LEAST_SENT = 2, 3


@dataclass(frozen=True)
class Stage:
    """One rank of a pipeline; counts begin when the agent opened its ring."""

    rank: int
    #: Number of messages, and seconds that a thread waited for them.
    forward: int
    forward_wait_s: float
    backward: int
    backward_wait_s: float
    #: Share of its latest steps spent in waits; ``None``: not known, as without steps.
    bubble_share: float | None
    #: The ranks that it exchanges messages with.
    peers: list[int]


@dataclass(frozen=True)
class Pipeline:
    """Ranks that send messages to one another within one process group, as far as this node sees them."""

    job_id: str
    group_id: str
    group: str
    #: In the order of the group.
    stages: list[Stage]
    #: Whether all of its ranks are in ``stages``.
    complete: bool
    #: Messages per step that a stage receives from the stage before it.
    micro_batches: int | None
    #: Mean over the stages.
    bubble_share: float | None
    #: Least bubble of 1F1B with equal stages; ``None``: not complete, or without steps.
    least_bubble_share: float | None


def is_forward(op: str, me: int, peer: int, size: int) -> bool:
    """Return whether a message between places ``me`` and ``peer`` of a group of ``size`` goes forward.

    The shorter way round the group counts, because interleaved schedules send from the last stage to the first.
    """
    ahead = (peer - me) % size
    to_next = peer > me if 2 * ahead == size else 2 * ahead < size
    return to_next == (op == "send")


def directions(totals: RankTotals) -> dict[tuple[str, str], Messages]:
    """Return the messages of a rank by group label and direction."""
    sums: dict[tuple[str, str], Messages] = {}
    places = {
        small_id: _places(totals.group(small_id), totals.rank) for small_id in {key[0] for key in totals.messages}
    }
    for (small_id, code, peer), messages in totals.messages.items():
        group = totals.group(small_id)
        me, other, size = places[small_id](peer)
        if other is not None:
            forward = is_forward(totals.op_name(code), me, other, size)
            into = sums.setdefault((group.label, DIRECTIONS[0 if forward else 1]), Messages())
            into.count, into.bytes = into.count + messages.count, into.bytes + messages.bytes
            into.waited_us += messages.waited_us
    return sums


def pipelines(jobs: Iterable[Job]) -> list[Pipeline]:
    """Return every pipeline of the jobs, of their latest lives."""
    found = []
    for job in jobs:
        by_group: dict[str, list[tuple[RankTotals, int]]] = {}
        for totals in of_this_run(job):
            for small_id in {small_id for small_id, _, _ in totals.messages}:
                by_group.setdefault(totals.group(small_id).group_id, []).append((totals, small_id))
        for members in by_group.values():
            parts = _connected(members, lambda member: {member[0].rank} | _peers(*member))
            found += [_pipeline(job.id, part) for part in parts]
    return found


class Message(NamedTuple):
    """What counts of a message: who recorded it, as ``send`` or ``recv``, and with which peer."""

    rank: int
    op: str
    peer: int


def are_pipeline(label: str, size: int, counts: Mapping[Message, int], members: Sequence[int] | None) -> bool:
    """Return whether the messages of a group are those of a pipeline.

    Its label names a pipeline. Or it names no other model parallelism, no rank has more than two peers, and one is the first in a direction: it
    sends, but receives nothing. So a ring is no pipeline, as that of context parallelism or of an interleaved schedule.

    Args:
        label, size: of the group.
        counts: how many messages there were; those of a rank may be missing.
        members: the ranks of the group; ``None``: not known.
    """
    if is_model(label):
        return is_pipeline(label)
    at = {rank: place for place, rank in enumerate(members or ())}
    peers: dict[int, set[int]] = {}
    sent, received = Counter[tuple[int, bool]](), Counter[tuple[int, bool]]()
    for one, count in counts.items():
        peers.setdefault(one.rank, set()).add(one.peer)
        me, peer = at.get(one.rank, one.rank), at.get(one.peer, one.peer)
        forward = is_forward(one.op, me, peer, max(size, me + 1, peer + 1))
        (sent if one.op == "send" else received)[one.rank, forward] += count
    chain = all(len(of_rank) <= _MOST_PEERS for of_rank in peers.values())
    return chain and any(count >= _LEAST_SENT and not received[first] for first, count in sent.items())


def have_pipeline(ranks: Iterable[RankTotals]) -> bool:
    """Return whether the messages that ranks of a job have sent in a group are those of a pipeline."""
    groups: dict[str, GroupInfo] = {}
    counts: dict[str, Counter[Message]] = {}
    for totals in ranks:
        for (small_id, code, peer), messages in totals.messages.items():
            group = totals.group(small_id)
            groups[group.group_id] = group
            of_group = counts.setdefault(group.group_id, Counter())
            if peer >= 0:
                of_group[Message(totals.rank, totals.op_name(code), peer)] += messages.count
    return any(are_pipeline(each.label, each.size, counts[at], each.ranks) for at, each in groups.items())


def over_nodes(found: Iterable[Pipeline]) -> list[Pipeline]:
    """Return the pipelines of which each of ``found`` is the part on one node."""
    by_group: dict[tuple[str, str], list[Pipeline]] = {}
    for each in found:
        by_group.setdefault((each.job_id, each.group_id), []).append(each)
    return [
        _assembled(
            part[0],
            list({stage.rank: stage for each in part for stage in each.stages}.values()),
            max((each.micro_batches for each in part if each.micro_batches is not None), default=None),
        )
        for members in by_group.values()
        for part in _connected(members, lambda one: {each for at in one.stages for each in (at.rank, *at.peers)})
    ]


def _places(group: GroupInfo, rank: int) -> Callable[[int], tuple[int, int | None, int]]:
    """Return a function from a peer to (place of the rank, place of the peer or ``None`` if not known, size of the group)."""
    # A dict, because there may be ten thousand peers and as many members.
    at = {member: place for place, member in enumerate(group.ranks or ())}
    if rank not in at:
        return lambda peer: (rank, peer if peer >= 0 else None, max(group.size, rank + 1, peer + 1))
    return lambda peer: (at[rank], at.get(peer), len(at))


def _connected(members: Iterable[_T], ranks_of: Callable[[_T], set[int]]) -> list[list[_T]]:
    """Split the members of a group into sets that exchange messages; ``ranks_of``: the ranks of a member and its peers."""
    parts: list[tuple[set[int], list[_T]]] = []
    for member in members:
        ranks, joined = ranks_of(member), [member]
        for part in [part for part in parts if part[0] & ranks]:
            parts.remove(part)
            ranks, joined = ranks | part[0], part[1] + joined
        parts.append((ranks, joined))
    return [part for _, part in parts]


def _peers(totals: RankTotals, small_id: int) -> set[int]:
    return {peer for group, _, peer in totals.messages if group == small_id and peer >= 0}


def _pipeline(job_id: str, members: list[tuple[RankTotals, int]]) -> Pipeline:
    group = members[0][0].group(members[0][1])
    stages = [_stage(totals, small_id) for totals, small_id in members]
    # Iterations begin some turns after the messages.
    counts = [totals.steps.totals.count if totals.marked else 0 for totals, _ in members]
    received = [_received(*member) / (count + 1) for member, count in zip(members, counts, strict=True)]
    batches = round(max(received)) if any(counts) else 0
    about = Pipeline(job_id, group.group_id, group.label, [], False, None, None, None)
    return _assembled(about, stages, batches or None)


def _assembled(about: Pipeline, stages: list[Stage], batches: int | None) -> Pipeline:
    """Return the pipeline with these stages; its job and group are those of ``about``."""
    here = {stage.rank for stage in stages}
    ranks = here.union(*(stage.peers for stage in stages))
    shares = [stage.bubble_share for stage in stages if stage.bubble_share is not None]
    complete = here == ranks
    return replace(
        about,
        stages=sorted(stages, key=lambda stage: stage.rank),
        complete=complete,
        micro_batches=batches,
        bubble_share=mean(shares) if shares else None,
        least_bubble_share=(len(ranks) - 1) / (batches + len(ranks) - 1) if complete and batches else None,
    )


def _stage(totals: RankTotals, small_id: int) -> Stage:
    sums = directions(totals)
    label = totals.group(small_id).label
    forward, backward = (sums.get((label, direction), Messages()) for direction in DIRECTIONS)
    return Stage(
        rank=totals.rank,
        forward=forward.count,
        forward_wait_s=forward.waited_us / 1e6,
        backward=backward.count,
        backward_wait_s=backward.waited_us / 1e6,
        bubble_share=totals.steps.totals.p2p_wait_share(),
        peers=sorted(_peers(totals, small_id)),
    )


def _received(totals: RankTotals, small_id: int) -> int:
    """Return the number of messages received from the stage before."""
    recv, group, count = ev.OP_CODE["recv"], totals.group(small_id), 0
    places = _places(group, totals.rank)
    for (of, code, peer), messages in totals.messages.items():
        me, other, size = places(peer)
        if of == small_id and code == recv and other is not None and is_forward("recv", me, other, size):
            count += messages.count
    return count
