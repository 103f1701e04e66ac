"""The communicators of an account: their ranks, where they run and how they are connected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.lives import Member, Seen

_F = TypeVar("_F", bound=f.Fact)


class Link(NamedTuple):
    """How one rank reaches another."""

    src: int
    dst: int
    #: ``P2P/IPC``, ``SHM``, ``NET/IB``, ...
    transport: str
    device: str | None
    gdr: bool


@dataclass(eq=False)
class Communicator:
    """The ranks of one communicator that the log shows.

    Before NCCL 2.16 messages do not name their communicator: all of one size are then one entry (``pooled``), and values
    that would need separate ones are not known.
    """

    comm_id: str | None
    nranks: int
    pooled: bool
    parent: Communicator | None = None
    color: int | None = None
    members: list[Member] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name for people, as the log shows it."""
        if self.comm_id is not None:
            return f"communicator {self.comm_id} ({self.nranks} ranks)"
        if self.parent is not None:
            return f"split of {self.parent.comm_id or self.parent.name}, color {self.color} ({self.nranks} ranks)"
        return f"communicators of {self.nranks} rank{'s' * (self.nranks != 1)}"

    @property
    def ranks(self) -> set[int]:
        """Ranks that the log shows."""
        return {member.init.rank for member in self.members if member.init.rank is not None}

    @property
    def processes(self) -> set[tuple[str, int]]:
        """Host and pid of its ranks."""
        return {(member.process.host, member.process.pid) for member in self.members}

    @property
    def complete(self) -> bool:
        """Whether its init is complete: once one rank is done, all ranks have passed the last barrier."""
        return any(member.complete for member in self.members)

    @property
    def hosts(self) -> dict[str, list[int]]:
        """Ranks by host; empty if communicators are pooled and a rank was seen on several hosts."""
        of: dict[int, str] = {}
        for member in self.members:
            if (
                member.init.rank is not None
                and of.setdefault(member.init.rank, member.process.host) != member.process.host
            ):
                return {}
        by_host: dict[str, list[int]] = {}
        for rank in sorted(of):
            by_host.setdefault(of[rank], []).append(rank)
        return by_host

    def of(self, kind: type[_F]) -> Iterator[tuple[Member, _F, Seen]]:
        """Yield the facts of one type, with member and place."""
        for member in self.members:
            for fact, seen in member.facts.of(kind).items():
                yield member, fact, seen

    @property
    def layout(self) -> f.Layout | None:
        """Numbers of ranks and nodes, as NCCL printed them."""
        return next((layout for _, layout, _ in self.of(f.Layout)), None)

    @property
    def nodes(self) -> int:
        """Number of nodes that it spans, as far as the log shows; 0 if not known."""
        return self.layout.nnodes if self.layout is not None else len(self.hosts)

    @property
    def channels(self) -> f.Channels | None:
        """Channel counts."""
        return next((channels for _, channels, _ in self.of(f.Channels)), None)

    def links(self) -> dict[Link, int]:
        """Return the number of channels by connection. Both ends print network connections: the sender counts."""
        links: Counter[Link] = Counter()
        receiving: Counter[Link] = Counter()
        for _, via, seen in self.of(f.Via):
            link = Link(via.src, via.dst, via.kind, via.device, via.gdr)
            (receiving if via.direction == "receive" else links)[link] += seen.lines
        # If only the receiver is in the log, its lines count.
        sending = {link[:3] for link in links}
        return {**links, **{link: lines for link, lines in receiving.items() if link[:3] not in sending}}

    def transports(self) -> dict[str, int]:
        """Channel connections by transport."""
        found: Counter[str] = Counter()
        for link, lines in self.links().items():
            found[link.transport] += lines
        for _, via, seen in self.of(f.CollNetVia):
            if via.direction == "send":
                found[f"COLLNET/{via.net}"] += seen.lines
        if any(True for _ in self.of(f.NvlsUsed)):
            counts = self.channels
            found["NVLS"] = (counts.nvls or 0) * len(self.ranks) if counts is not None else 0
        return {transport: lines for transport, lines in found.items() if lines}

    def rings(self) -> dict[int, tuple[int, ...]]:
        """Return the order of the ranks by channel, as rank 0 printed it."""
        return {ring.channel: ring.order for _, ring, _ in self.of(f.Ring)}


def communicators(account: Account) -> list[Communicator]:
    """Return all communicators of the log, in the order in which they began."""
    found: dict[tuple[object, ...], Communicator] = {}
    of: dict[int, Communicator] = {}
    for life in account.lives.values():
        at: dict[str, Member] = {}
        splits: Counter[tuple[object, ...]] = Counter()
        for member in life.members:
            parent = at.get(member.init.parent or "")
            # All ranks of a colour take part in each split: where the child's number is not printed, the order identifies it.
            split = (id(parent), member.init.color, member.init.nranks)
            splits[split] += 1
            of[id(member)] = _join(found, member, None if parent is None else of[id(parent)], splits[split])
            at[member.init.comm or ""] = member
    return list(found.values())


def _join(
    found: dict[tuple[object, ...], Communicator], member: Member, parent: Communicator | None, nth: int
) -> Communicator:
    init = member.init
    assert init.nranks is not None  # a member has a rank and a size
    if init.comm_id is not None:
        key: tuple[object, ...] = (init.comm_id, init.nranks)
    elif parent is not None:
        key = (id(parent), nth if init.child is None else init.child, init.color, init.nranks, init.child is None)
    else:
        key = (init.nranks,)
    if key not in found:
        found[key] = Communicator(init.comm_id, init.nranks, len(key) == 1, parent, init.color)
    found[key].members.append(member)
    return found[key]
