"""Finds which ranks of a job wait for which, from operations in flight; compares ages, never clocks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from commwatch.wire import events as ev
from commwatch.wire.numbers import ahead, in_order
from commwatch_agent.model.views import Failed, GroupView, InFlight, RankView

#: An operation hangs when it is older than this, and older than this many times its usual duration.
HANG_S, USUAL_TIMES = 10.0, 5.0
#: Disagreements and errors are reported for this time.
RECENT_S = 60.0
#: A rank whose probe has sent no heartbeat for this time does not run Python.
SILENT_S = 5.0
#: Why a rank is absent that will not come any more.
LOST = frozenset({"dead", "gone", "destroyed"})


class Wait(NamedTuple):
    """Ranks inside an operation, and the members of the group that are missing."""

    group: GroupView
    inside: Mapping[int, InFlight | Failed]
    missing: list[int]
    #: The operation raised, so no rank is inside any more.
    raised: bool = False

    @property
    def since_s(self) -> float:
        """Seconds since the first rank entered, or since the operation raised."""
        return max(age(op) for op in self.inside.values())

    @property
    def limit_s(self) -> float:
        """Seconds that the operation may take before it is judged: by its place where that is known (``patience``), else by its usual duration."""
        if any(isinstance(op, InFlight) and op.place is not None for op in self.inside.values()):
            return HANG_S
        usual = [op.usual_s for op in self.inside.values() if isinstance(op, InFlight) and op.usual_s is not None]
        return max(HANG_S, USUAL_TIMES * max(usual, default=0.0))

    @property
    def is_first(self) -> bool:
        """Whether no rank inside has completed such an operation of the group before."""
        return all(isinstance(op, InFlight) and op.usual_s is None for op in self.inside.values())


def age(op: InFlight | Failed) -> float:
    """Return the age of an operation in seconds.

    A failed one counts from its exception, a send or recv from the begin of the wait for it, one on a GPU from when the GPU reached it,
    and any other one from its launch.
    """
    if isinstance(op, Failed):
        return op.ago_s
    return op.age_s if op.waited_s is None else op.waited_s


def waits(group: GroupView, here: list[RankView], known: dict[tuple[str, int], RankView]) -> Iterator[Wait]:
    """Yield the waits of one group.

    Args:
        here: the ranks that used the group, each in its latest life.
        known: the ranks of all jobs, by job and rank.
    """
    collectives: dict[int, InFlight] = {}
    for view in here:
        if view.state != "running":
            continue
        mine = [op for op in view.in_flight if _is_entered(op, group)]
        here_in = [op for op in mine if op.op not in ev.P2P]
        oldest = min(here_in, key=lambda op: ahead(op.seq, here_in[0].seq), default=None)
        # If a later operation has ended, the group is not stuck: backends run several at once.
        if oldest is not None and ahead(oldest.seq, view.last_seq.get(group.group_id, oldest.seq - 1)) > 0:
            collectives[view.rank] = oldest
        yield from _after_lost_messages(group, view, known)
        yield from (
            wait
            for op in mine
            if op.op in ev.P2P and op.waited_s is not None
            for wait in _message(group, view, op, known)
        )
    if not collectives:
        yield from _after_errors(group, here, known)
        return
    seq = in_order([op.seq for op in collectives.values()])[0]
    inside = {rank: op for rank, op in collectives.items() if op.seq == seq}
    others = [rank for rank in group.members or group.ranks if rank not in inside]
    missing = [rank for rank in others if not _has_entered(known.get((group.job_id, rank)), group, seq)]
    wait = Wait(group, inside, missing)
    # A rank may be inside although its table of operations in flight had no room for that.
    if not any(_is_unsure(known.get((group.job_id, rank)), wait.since_s) for rank in missing):
        yield wait


def _has_entered(view: RankView | None, group: GroupView, seq: int) -> bool:
    """Return whether a rank is known to have entered a collective of a group, or a later one."""
    if view is None:
        return False
    numbers = [view.last_seq[group.group_id]] if group.group_id in view.last_seq else []
    if view.state == "running":
        numbers += [op.seq for op in view.in_flight if _is_entered(op, group) and op.op not in ev.P2P]
        # The number of one that raised long ago, before others ended, may be too far behind to be compared.
        raised = raised_in(view, group)
        numbers += [each.seq for each in raised if each.seq == seq or each.is_latest or each.ago_s < RECENT_S]
    return any(ahead(number, seq) >= 0 for number in numbers)


def _is_entered(op: InFlight, group: GroupView) -> bool:
    return op.group_id == group.group_id and not op.queued


def _is_unsure(view: RankView | None, since_s: float) -> bool:
    return view is not None and view.overflow_s is not None and view.overflow_s < since_s + RECENT_S


def _after_errors(group: GroupView, here: list[RankView], known: Mapping[tuple[str, int], RankView]) -> Iterator[Wait]:
    """Yield the ranks whose collective raised because others have ended or died."""
    failed = {
        view.rank: each
        for view in here
        for each in raised_in(view, group)
        if view.state == "running" and each.ago_s < RECENT_S
    }
    absent = {rank for seq in {each.seq for each in failed.values()} for rank in _lost_members(group, seq, known)}
    if absent:
        yield Wait(group, failed, sorted(absent), raised=True)


def _after_lost_messages(group: GroupView, view: RankView, known: Mapping[tuple[str, int], RankView]) -> Iterator[Wait]:
    """Yield the latest messages of a rank if they raised because the other rank has ended or died; one for each such rank."""
    raised = {each.peer: each for each in view.failed if each.group_id == group.group_id and each.is_latest}
    for peer, each in raised.items():
        if peer is not None and each.ago_s < RECENT_S and _is_lost(known.get((group.job_id, peer)), group.group_id):
            yield Wait(group, {view.rank: each}, [peer], raised=True)


class Absent(NamedTuple):
    """A rank that does not come to a group."""

    rank: int
    group_id: str


def at_fault(
    absent: Absent, job_id: str, groups: Mapping[tuple[str, str], GroupView], known: Mapping[tuple[str, int], RankView]
) -> set[Absent]:
    """Return what is at fault if a rank is absent: that it has lost others, which are absent elsewhere, or else the rank itself.

    A rank has lost another one if its latest operation raised and the other one has ended or died, or has destroyed the group. That one
    may have done so because it had lost a third.

    Args:
        groups: by job and ``group_id``.
        known: the ranks of all jobs, by job and rank.
    """
    losses: dict[int, set[Absent]] = {}
    todo = [absent]
    where: dict[int, Absent] = {}
    while todo:
        each = todo.pop()
        if each.rank not in losses:
            where[each.rank] = each
            losses[each.rank] = _lost_by(known.get((job_id, each.rank)), each.group_id, groups, known)
            todo += losses[each.rank]
    first = {where[rank] for rank, lost in losses.items() if not lost}
    if first:
        return first
    if any(each.rank == absent.rank for lost in losses.values() for each in lost):  # they have lost each other
        return {absent}
    return losses[absent.rank]


def _lost_by(
    view: RankView | None,
    group_id: str,
    groups: Mapping[tuple[str, str], GroupView],
    known: Mapping[tuple[str, int], RankView],
) -> set[Absent]:
    """Return which ranks a rank has lost that does not come to a group."""
    lost = set[Absent]()
    if view is None or absence(view, group_id) not in ("not_joined", "gone", "destroyed"):
        return lost
    for each in view.failed:
        group = groups.get((view.job_id, each.group_id))
        if each.is_latest and each.op not in ev.P2P and group is not None:
            lost.update(Absent(rank, each.group_id) for rank in _lost_members(group, each.seq, known))
        elif each.is_latest and each.peer is not None and _is_lost(known.get((view.job_id, each.peer)), each.group_id):
            lost.add(Absent(each.peer, each.group_id))
    return lost


def _lost_members(group: GroupView, seq: int, known: Mapping[tuple[str, int], RankView]) -> list[int]:
    """Return the members that will not come any more, and are not known to have entered a collective that raised."""
    lost = []
    for rank in group.members or group.ranks:
        view = known.get((group.job_id, rank))
        # What a killed rank had in flight counts as raised, too.
        entered = view is not None and view.state != "gone" and any(each.seq == seq for each in raised_in(view, group))
        if _is_lost(view, group.group_id) and not entered:
            lost.append(rank)
    return lost


def _is_lost(view: RankView | None, group_id: str) -> bool:
    return absence(view, group_id) in LOST


def _message(group: GroupView, view: RankView, op: InFlight, known: dict[tuple[str, int], RankView]) -> Iterator[Wait]:
    """Yield the wait of a rank for a message; no rank is missing if its peer has the message of that number in flight."""
    if op.peer is None:
        return
    other = known.get((group.job_id, op.peer))
    answers = "recv" if op.op == "send" else "send"
    met = other is not None and any(
        (theirs.op, theirs.group_id, theirs.peer, theirs.tag, theirs.seq)
        == (answers, op.group_id, view.rank, op.tag, op.seq)
        and not theirs.queued
        for theirs in other.in_flight
    )
    yield Wait(group, {view.rank: op}, [] if met else [op.peer])


def absence(view: RankView | None, group_id: str) -> str:
    """Return why a rank may not have come to a group: one of the causes of ``Verdict``."""
    if view is None:
        return "unseen"
    if view.state == "left" or (view.state == "running" and group_id in view.destroyed):
        return "destroyed"
    if view.state != "running":
        return "gone" if view.state == "ended" else "dead"
    if view.process == "stopped":
        return "stopped"
    return "silent" if (view.heartbeat_age_s or 0) > SILENT_S else "not_joined"


def raised_in(view: RankView, group: GroupView) -> list[Failed]:
    """Return the latest collectives of a group that raised on a rank."""
    return [failed for failed in view.failed if failed.group_id == group.group_id and failed.op not in ev.P2P]
