"""What the ranks of a group pass to one collective, and what differs that must be equal: operation, root, size, dtype. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from commwatch.wire import events as ev
from commwatch.wire.numbers import in_order
from commwatch_agent.analysis.waits.wait_graph import RECENT_S, raised_in
from commwatch_agent.core.views import Ended, Failed, GroupView, RankView
from commwatch_collectors.spans import ranks as named

#: Even certain faults are reported only after this time, because a table may have been read halfway.
CERTAIN_S = 2.0


class Call(NamedTuple):
    """What a rank passes to a collective."""

    op: str
    size_bytes: int | None
    dtype: str | None
    #: Global rank of the root; ``None``: there is none, or it is not known.
    root: int | None = None


class Difference(NamedTuple):
    """What differs between ranks."""

    #: ``ops``, ``root`` or ``sizes``.
    cause: str
    #: The most frequent operation.
    op: str
    #: The ranks without the most frequent value; all ranks if two values are equally frequent.
    odd: list[int]
    says: str


def difference(calls: Mapping[int, Call]) -> Difference | None:
    """Return what differs in the calls of ranks at one sequence number; ``None``: nothing that must be equal, or not known."""
    ops = {rank: call.op for rank, call in calls.items()}
    most = Counter(ops.values()).most_common(1)[0][0]
    if len(set(ops.values())) > 1:
        return Difference("ops", most, _odd(ops), f"ranks in different ops: {_parts(ops)}")
    roots = {rank: f"root {call.root}" for rank, call in calls.items() if call.root is not None}
    if most in ev.TO_ROOT | ev.FROM_ROOT and len(set(roots.values())) > 1:
        return Difference("root", most, _odd(roots), f"roots differ: {_parts(roots)}")
    known = (each for each in calls.items() if each[1].size_bytes is not None and each[1].dtype is not None)
    data = {rank: f"{call.size_bytes} bytes of {call.dtype}" for rank, call in known}
    if most in ev.SAME_SIZE and len(set(data.values())) > 1:
        return Difference("sizes", most, _odd(data), f"sizes or dtypes differ: {_parts(data)}")
    return None


def calls_in(group: GroupView, here: Collection[RankView]) -> Iterator[tuple[int, dict[int, Call], float]]:
    """Yield sequence number, calls by rank, and age in s, of the collectives of a group that ranks are inside, or that raised lately.

    To a collective that ranks are still inside belong also the calls that have ended or raised on other ranks, however long ago.

    Args:
        here: the ranks that used the group, each in its latest life.
    """
    at: dict[int, dict[int, tuple[Call, float]]] = {}
    for view in here:
        for op in view.in_flight:
            if op.group_id == group.group_id and op.op not in ev.P2P and op.age_s > CERTAIN_S:
                at.setdefault(op.seq, {})[view.rank] = Call(op.op, op.size_bytes, op.dtype, op.peer), op.age_s
    inside = frozenset(at)
    for view in here:
        over: list[Failed | Ended] = [
            *(each for each in raised_in(view, group) if each.seq in inside or each.ago_s < RECENT_S),
            *(each for each in view.ended if each.group_id == group.group_id and each.seq in inside),
        ]
        for each in over:
            call = Call(each.op, each.size_bytes, each.dtype, each.root)
            at.setdefault(each.seq, {}).setdefault(view.rank, (call, each.ago_s))
    for seq in in_order(at):
        yield seq, {rank: call for rank, (call, _) in at[seq].items()}, max(age_s for _, age_s in at[seq].values())


def _parts(what: Mapping[int, str]) -> str:
    """Return as text which ranks have which value, the most frequent first, then by rank."""
    names = [name for name, _ in Counter(what[rank] for rank in sorted(what)).most_common()]
    return "; ".join(f"{named([rank for rank in what if what[rank] == name])}: {name}" for name in names)


def _odd(what: Mapping[int, str]) -> list[int]:
    counts = Counter(what.values()).most_common()
    tie = counts[0][1] == counts[1][1]
    return sorted(rank for rank in what if tie or what[rank] != counts[0][0])
