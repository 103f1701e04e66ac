"""Compares the checksums of collectives over the ranks of this node: which rank has other data than it should have, and where from. Pure.

Where the rank that gave the data has a checksum of it, as in a broadcast and in an all_gather, that is what all others must have received. The
result of an all_reduce must be equal on all ranks: most of them are taken to be right. In an all_to_all each slice has one receiver: of a slice that
has become wrong, neither rank is known to be right, unless one of them has wrong slices with several ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from commwatch.wire import events as ev
from commwatch.wire.numbers import latest

if TYPE_CHECKING:
    from commwatch_agent.model.corruption.replicas import Rank

#: Most checks of a group that some ranks have not made yet; most checks of a rank of which records are missing.
_MOST_PENDING, _MOST_FILLING = 256, 16
#: Most outputs of a collective: the hook leaves out larger groups.
_MOST_OUTPUTS = 64
#: The rings of this node's ranks are found within this time after the first check.
_SETTLED_NS = 10_000_000_000
#: Most groups of a job that are compared, and most kinds of faults of a group.
MOST_GROUPS, _MOST_EPISODES = 256, 16
#: Both sums of a tensor.
Sums = tuple[int, int]
#: ``received``: these ranks have other data than was given to them. ``sent``: all others have other data than this rank gave. ``result``: these ranks
#: have another result than the others, or this rank has other data than it gave. ``one_of``: one of these ranks, or what lies between them.
#: ``diverged``: no two ranks of three or more have the same.
Cause = Literal["received", "sent", "result", "one_of", "diverged"]


class Check(NamedTuple):
    """The checksums of one collective on one rank."""

    op: str
    #: By place: in an all_gather and in an all_to_all by rank in the group, else there is one.
    outputs: tuple[Sums, ...]
    #: Of what this rank gave to others: in an all_to_all by rank in the group, else to all the same. Empty: nothing that they receive as it is.
    given: tuple[Sums, ...]
    #: By the rank's clock, in ns.
    taken_ns: int


class Fault(NamedTuple):
    """Ranks that have wrong data."""

    op: str
    cause: Cause
    ranks: tuple[int, ...]
    #: The rank that gave the data; ``None``: each has a part in it.
    source: int | None


def faults(checks: Mapping[int, Check], members: tuple[int, ...]) -> Iterator[Fault]:
    """Yield what is wrong in one collective, each fault once.

    Args:
        checks: by rank; two or more.
        members: the ranks of the group, in its order.
    """
    first = next(iter(checks.values()))
    if any((each.op, len(each.outputs)) != (first.op, len(first.outputs)) for each in checks.values()):
        return  # ranks that call different operations have a verdict of their own
    if first.op == "all_to_all":
        yield from dict.fromkeys(_exchanged(checks, members))
        return
    found: dict[Fault, None] = {}
    for place in range(len(first.outputs)):
        values = {rank: check.outputs[place] for rank, check in checks.items()}
        source = _source(checks, members, first.op, place)
        given = () if source is None else checks[source].given
        fault = _among(values) if source is None or not given else _against(given[0], source, values)
        if fault is not None:
            cause, ranks = fault
            found[Fault(first.op, cause, tuple(sorted(ranks)), source)] = None
    yield from found


def _source(checks: Mapping[int, Check], members: tuple[int, ...], op: str, place: int) -> int | None:
    """Return the rank that gave what is at this place; ``None`` if it is not among these, or there is none."""
    if op == "all_gather":
        return members[place] if place < len(members) and members[place] in checks else None
    return next((rank for rank, check in checks.items() if check.given), None)


def _exchanged(checks: Mapping[int, Check], members: tuple[int, ...]) -> Iterator[Fault]:
    """Yield what is wrong in an all_to_all: each slice has one giver and one receiver."""
    if any((len(each.given), len(each.outputs)) != (len(members), len(members)) for each in checks.values()):
        return
    here = [(at, rank) for at, rank in enumerate(members) if rank in checks]
    wrong = [
        (source, rank)
        for of, source in here
        for to, rank in here
        if checks[source].given[to] != checks[rank].outputs[of]
    ]
    peers = defaultdict[int, set[int]](set)
    for source, rank in wrong:
        peers[source].add(rank)
        peers[rank].add(source)
    for pair in wrong:
        source, rank = pair
        # What is wrong with several ranks is at fault, and so is one whose own slice is wrong.
        suspects = {each for each in pair if len(peers[each]) > 1} or set(pair)
        if suspects == {rank}:
            yield Fault("all_to_all", "received", (rank,), source)
        elif suspects == {source}:
            yield Fault("all_to_all", "sent", (source,), source)
        else:
            yield Fault("all_to_all", "one_of", tuple(sorted(pair)), source)


def _against(given: Sums, source: int, values: Mapping[int, Sums]) -> tuple[Cause, Iterable[int]] | None:
    """Return what is wrong with what ranks have of the data that one of them gave."""
    wrong = {rank for rank, value in values.items() if value != given}
    wrong_receivers, receivers = wrong - {source}, values.keys() - {source}
    if not wrong:
        return None
    if wrong_receivers < receivers:
        return "received" if wrong_receivers else "result", wrong
    if len(receivers) == 1:
        return "one_of", values
    return ("sent", (source,)) if len({values[rank] for rank in receivers}) == 1 else ("diverged", values)


def _among(values: Mapping[int, Sums]) -> tuple[Cause, Iterable[int]] | None:
    """Return what is wrong with values that must be equal."""
    most, *rest = Counter(values.values()).most_common()
    if not rest:
        return None
    if most[1] == 1 and len(values) > 2:
        return "diverged", values
    if most[1] == rest[0][1]:
        return "one_of", values
    return "result", (rank for rank, value in values.items() if value != most[0])


@dataclass
class Episode:
    """Faults of one kind."""

    fault: Fault
    #: Number in the group of the first collective that had it, and of the latest one before that was checked; ``None``: there was none.
    first: int
    right: int | None
    #: Monotonic times of the first and of the latest check that found it, in ns.
    since_ns: int
    latest_ns: int
    #: How many collectives had it.
    number: int = 1


class GroupChecks:
    """The checks of one group.

    Args:
        group_id: of the group.
        members: its ranks, on all nodes, in its order.
    """

    def __init__(self, group_id: str, members: tuple[int, ...]) -> None:
        self.group_id, self.members = group_id, members
        #: The ranks of this node that have checked a collective.
        self.ranks: dict[int, Rank] = {}
        self.episodes: list[Episode] = []
        #: Collectives that were compared.
        self.compared = 0
        self._began_ns: int | None = None
        self._latest: int | None = None
        #: By number of the collective: the checks that have been read.
        self._pending: dict[int, dict[int, Check]] = {}
        #: By rank and number of the collective: the sums by place of a check of which some records are still in the ring.
        self._filling: dict[int, dict[int, dict[int, Sums]]] = {}
        #: About how many bytes the largest check takes.
        self._each_bytes = 300

    def add(self, totals: Rank, op: str, records: Iterable[ev.Checksum]) -> None:
        """Add checksums of one rank, all of one collective; ``number`` of each counts those of the whole check."""
        self.ranks[totals.rank] = totals
        filling = self._filling.setdefault(totals.rank, {})
        for record in records:
            if not -_MOST_OUTPUTS <= record.place < _MOST_OUTPUTS:
                continue
            sums = filling.setdefault(record.step, {})
            sums[record.place] = record.plain, record.weighted
            if len(sums) == record.number:
                del filling[record.step]
                given = tuple(sums[place] for place in sorted(sums, reverse=True) if place <= ev.INPUT)
                outputs = tuple(sums[place] for place in sorted(sums) if place > ev.INPUT)
                self._each_bytes = max(self._each_bytes, 300 + 140 * len(sums))
                self._complete(totals.rank, record.step, Check(op, outputs, given, record.taken_ns))
        while len(filling) > _MOST_FILLING:
            del filling[next(iter(filling))]  # the ring was overwritten before all of it was read

    @property
    def bytes(self) -> int:
        """About how many bytes the tables take."""
        return 1000 + len(self.ranks) * (1000 + self._each_bytes * (len(self._pending) + _MOST_FILLING // 2))

    def halve(self) -> None:
        """Drop the older half of the checks that a rank has not made yet."""
        for _ in range(-(-len(self._pending) // 2)):
            del self._pending[next(iter(self._pending))]

    def _complete(self, rank: int, number: int, check: Check) -> None:
        self._began_ns = check.taken_ns if self._began_ns is None else min(self._began_ns, check.taken_ns)
        self._pending.setdefault(number, {})[rank] = check
        here = {rank for rank, totals in self.ranks.items() if totals.alive}
        if len(here) > 1 and (len(here) == len(self.members) or check.taken_ns - self._began_ns > _SETTLED_NS):
            for ready in [at for at, of in self._pending.items() if of.keys() >= here]:
                self._judge(ready, self._pending.pop(ready))
        while len(self._pending) > _MOST_PENDING:
            del self._pending[next(iter(self._pending))]  # a rank has left it out: its checks cost too much

    def _judge(self, number: int, checks: Mapping[int, Check]) -> None:
        now_ns = max(check.taken_ns for check in checks.values())
        for fault in faults(checks, self.members):
            known = next((each for each in self.episodes if each.fault == fault), None)
            if known is not None:
                known.number += 1
                known.latest_ns = max(known.latest_ns, now_ns)
            elif len(self.episodes) < _MOST_EPISODES:
                self.episodes.append(Episode(fault, number, self._latest, now_ns, now_ns))
        self.compared += 1
        self._latest = latest((number, number if self._latest is None else self._latest))
