"""What the ranks of a group pass to one collective, and what differs that must be equal: operation, root, size, dtype, split sizes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from commwatch.wire import events as ev
from commwatch.wire.numbers import in_order
from commwatch_agent.analysis.waits.wait_graph import RECENT_S, raised_in
from commwatch_agent.model.views import Ended, Failed, GroupView, InFlight, RankView
from commwatch_collectors.spans import ranks as named

#: Even certain faults are reported only after this time, because a table may have been read halfway.
CERTAIN_S = 2.0
#: Most pairs of ranks with different split sizes that a text has.
_MOST_PAIRS = 3


class Call(NamedTuple):
    """What a rank passes to a collective."""

    op: str
    size_bytes: int | None
    dtype: str | None
    #: Global rank of the root; ``None``: there is none, or it is not known.
    root: int | None = None
    #: What the rank sends to each rank of the group in an all_to_all, by the order of its members, and expects from each, in bytes; ``None``: not
    #: known.
    sends: Sequence[int] | None = None
    expects: Sequence[int] | None = None


class Difference(NamedTuple):
    """What differs between ranks."""

    #: ``ops``, ``root``, ``sizes`` or ``splits``.
    cause: str
    #: The most frequent operation.
    op: str
    #: The ranks without the most frequent value; all ranks if two values are equally frequent. Of split sizes those that explain all differences.
    odd: list[int]
    says: str
    #: The ranks by what they have, the most frequent first; of split sizes those that explain all differences, and the others.
    sides: list[list[int]]


def difference(calls: Mapping[int, Call], members: Sequence[int] = ()) -> Difference | None:
    """Return what differs in the calls of ranks at one sequence number; ``None``: nothing that must be equal, or not known.

    Args:
        members: of the group, in its order; empty: not known, and split sizes are not compared.
    """
    ops = {rank: call.op for rank, call in sorted(calls.items())}
    most = Counter(ops.values()).most_common(1)[0][0]
    if len(set(ops.values())) > 1:
        return _of_values("ops", most, ops, "ranks in different ops")
    roots = {rank: f"root {call.root}" for rank, call in calls.items() if call.root is not None}
    if most in ev.TO_ROOT | ev.FROM_ROOT and len(set(roots.values())) > 1:
        return _of_values("root", most, roots, "roots differ")
    known = (each for each in calls.items() if each[1].size_bytes is not None and each[1].dtype is not None)
    data = {rank: f"{call.size_bytes} bytes of {call.dtype}" for rank, call in known}
    if most in ev.SAME_SIZE and len(set(data.values())) > 1:
        return _of_values("sizes", most, data, "sizes or dtypes differ")
    wrong = list(_unequal_splits(calls, members))
    if wrong:
        parts = "; ".join(
            f"rank {one} sends {sent} bytes to rank {other}, which expects {wanted}"
            for one, other, sent, wanted in wrong[:_MOST_PAIRS]
        )
        more = f"; and {len(wrong) - _MOST_PAIRS} more pairs" if len(wrong) > _MOST_PAIRS else ""
        odd = _explaining(wrong)
        sides = [odd, sorted(calls.keys() - set(odd))]
        return Difference("splits", most, odd, f"split sizes differ: {parts}{more}", [each for each in sides if each])
    return None


def _of_values(cause: str, op: str, what: Mapping[int, str], says: str) -> Difference:
    """Return a difference in what ranks have, of which there are several."""
    names = [name for name, _ in Counter(what[rank] for rank in sorted(what)).most_common()]
    sides = [sorted(rank for rank in what if what[rank] == name) for name in names]
    parts = "; ".join(f"{named(ranks)}: {name}" for name, ranks in zip(names, sides, strict=True))
    return Difference(cause, op, _odd(what), f"{says}: {parts}", sides)


def _unequal_splits(calls: Mapping[int, Call], members: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield sender, receiver, the bytes that it sends, and those that are expected, of the pairs whose split sizes differ."""
    place = {rank: at for at, rank in enumerate(members)}
    known = {rank: call for rank, call in sorted(calls.items()) if rank in place}
    sending = [(rank, call.sends) for rank, call in known.items() if call.sends and len(call.sends) == len(place)]
    expecting = [
        (rank, call.expects) for rank, call in known.items() if call.expects and len(call.expects) == len(place)
    ]
    for rank, sends in sending:
        for other, expects in expecting:
            if sends[place[other]] != expects[place[rank]]:
                yield rank, other, sends[place[other]], expects[place[rank]]


def _explaining(wrong: Iterable[tuple[int, int, int, int]]) -> list[int]:
    """Return the ranks that explain the pairs that differ: the one in most of them, then the one in most others; all of them if several are."""
    pairs, odd = [(one, other) for one, other, _, _ in wrong], set[int]()
    while pairs:
        counts = Counter(rank for pair in pairs for rank in {*pair})
        most = max(counts.values())
        odd.update(rank for rank, count in counts.items() if count == most)
        pairs = [pair for pair in pairs if not odd.intersection(pair)]
    return sorted(odd)


def calls_in(group: GroupView, here: Collection[RankView]) -> Iterator[tuple[int, dict[int, Call], float]]:
    """Yield sequence number, calls by rank, and age in s, of the collectives of a group that ranks are inside, or that raised lately.

    To such a collective belong also the calls that have ended or raised on other ranks, however long ago.

    Args:
        here: the ranks that used the group, each in its latest life.
    """
    at: dict[int, dict[int, tuple[Call, float]]] = {}
    for view in here:
        for op in view.in_flight:
            if op.group_id == group.group_id and op.op not in ev.P2P and op.age_s > CERTAIN_S:
                at.setdefault(op.seq, {})[view.rank] = _call(op, op.peer), op.age_s
    raised = [(view.rank, each) for view in here for each in raised_in(view, group)]
    wanted = {*at, *(each.seq for _, each in raised if each.ago_s < RECENT_S)}
    ended = [(view.rank, each) for view in here for each in view.ended if each.group_id == group.group_id]
    over: list[tuple[int, Failed | Ended]] = [*raised, *ended]
    for rank, each in over:
        if each.seq in wanted:
            at.setdefault(each.seq, {}).setdefault(rank, (_call(each, each.root), each.ago_s))
    for seq in in_order(at):
        yield seq, {rank: call for rank, (call, _) in at[seq].items()}, max(age_s for _, age_s in at[seq].values())


def _call(each: InFlight | Failed | Ended, root: int | None) -> Call:
    return Call(each.op, each.size_bytes, each.dtype, root, each.sends, each.expects)


def _odd(what: Mapping[int, str]) -> list[int]:
    counts = Counter(what.values()).most_common()
    tie = counts[0][1] == counts[1][1]
    return sorted(rank for rank in what if tie or what[rank] != counts[0][0])
