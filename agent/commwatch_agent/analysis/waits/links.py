"""The links between the nodes of a job, by the TCP connections of its ranks: how fast each is, and how busy they are. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from commwatch_agent.model.views import RankView
from commwatch_collectors.node.tcp_peers import TcpPeer

#: Links that send less than this part of what the one sends that sends most have another role.
_ALIKE = 0.25
#: Part of its busy time, by samples, in which a link has data to send: others are busy while they wait for acknowledgements, which may be delayed by 40 ms.
_UNSENT = 0.33
#: Part of the busy time from which on the receiver, and not the link, is slow.
_BY_RECEIVER = 0.5


@dataclass(frozen=True)
class Link(TcpPeer):
    """What all connections of a job from one address to one other do; the parts of time are the largest of a rank."""

    #: Names of the nodes of both addresses.
    nodes: tuple[str, str]
    #: Bytes per second over all of the time.
    sent: float

    @property
    def speed(self) -> float:
        """Bytes per second while it is busy."""
        return self.sent / self.busy if self.busy else 0.0

    @property
    def by_receiver(self) -> bool:
        """Whether the receiver holds it up."""
        return self.busy > 0 and self.window_limited >= _BY_RECEIVER * self.busy

    @property
    def is_full(self) -> bool:
        """Whether data waits to be sent while it is busy, and not for the receiver."""
        return self.unsent >= _UNSENT * self.busy and not self.by_receiver


class Sending(NamedTuple):
    """The busiest links of the nodes."""

    #: Part of the time (0 to 1) in which they have data to send, and bytes per second meanwhile: medians over the nodes.
    busy: float
    speed: float


def links(views: Iterable[RankView]) -> list[Link]:
    """Return the links between nodes of a job: other addresses may be those of a file system."""
    known = [(view.host, peer) for view in views if view.traffic is not None for peer in view.traffic.peers]
    hosts = {peer.local: host for host, peer in known}
    of_link: dict[tuple[str, str], list[TcpPeer]] = {}
    for _, peer in known:
        if peer.remote in hosts:
            of_link.setdefault((peer.local, peer.remote), []).append(peer)
    return [_link(peers, (hosts[local], hosts[remote])) for (local, remote), peers in of_link.items()]


def of_role(found: Collection[Link]) -> list[Link]:
    """Return the links that send about as much as the one that sends most."""
    most = max((link.sent for link in found), default=0.0)
    return [link for link in found if link.sent >= _ALIKE * most]


def sending(found: Collection[Link]) -> Sending | None:
    """Return how busy the busiest links of the nodes are; ``None``: not known, or data does not wait for most of them."""
    busiest: dict[str, Link] = {}
    for link in of_role(found):
        known = busiest.setdefault(link.local, link)
        busiest[link.local] = max(known, link, key=lambda each: each.busy)
    of_nodes = [link for link in busiest.values() if not link.by_receiver]
    busy = sum(link.busy for link in of_nodes)
    if 2 * len(of_nodes) <= len(busiest) or sum(link.unsent for link in of_nodes) < _UNSENT * busy:
        return None
    return Sending(median(link.busy for link in busiest.values()), median(link.speed for link in of_nodes))


def _link(peers: Sequence[TcpPeer], nodes: tuple[str, str]) -> Link:
    most = max(peers, key=lambda peer: peer.sent_bytes)
    known = [(peer.sent_bytes, peer.retransmitted) for peer in peers if peer.retransmitted is not None]
    total = sum(sent for sent, _ in known)
    together = replace(
        most,
        seconds=max(peer.seconds for peer in peers),
        sent_bytes=sum(peer.sent_bytes for peer in peers),
        busy=max(peer.busy for peer in peers),
        window_limited=max(peer.window_limited for peer in peers),
        unsent=max(peer.unsent for peer in peers),
        retransmitted=sum(sent * part for sent, part in known) / total if total else None,
    )
    return Link(**vars(together), nodes=nodes, sent=sum(peer.sent_bytes / peer.seconds for peer in peers))
