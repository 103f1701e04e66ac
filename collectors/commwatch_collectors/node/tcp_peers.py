"""What the TCP connections of a process did between two samples, by address of the other side. Pure.

A connection is busy while it has data that is not sent or not acknowledged. In a ring only the sender before a slow link is busy nearly all of
the time; the others wait for data, and are idle.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from commwatch_collectors.node.tcp_connections import Sockets
from commwatch_collectors.node.tcp_info import Connection

#: Most addresses that are kept: those that most is sent to.
_MOST_PEERS = 128


@dataclass(frozen=True)
class TcpPeer:
    """The connections of a process from one local address to one other. ``None``: the kernel does not say."""

    local: str
    remote: str
    #: Network device that has the local address; empty: not known.
    device: str
    #: Time between the samples.
    seconds: float
    #: Bytes that the other side has acknowledged meanwhile.
    sent_bytes: int
    #: Part of the time (0 to 1) in which the busiest connection was busy, and in which the other side's window held one up.
    busy: float
    window_limited: float
    #: Part of the sent bytes (0 to 1) that was sent again.
    retransmitted: float | None
    #: Round trip now, and the shortest one of the last minutes, in s: of the connection that sent most.
    rtt_s: float | None
    min_rtt_s: float | None


def peers(before: Sockets, after: Sockets, seconds: float) -> list[TcpPeer]:
    """Return what the connections did that both samples of one process have, without those within the node."""
    earlier = {(each.inode, each.local_port, each.remote_port): each for each in before.connections}
    pairs: dict[tuple[str, str], list[tuple[Connection, Connection]]] = {}
    for each in after.connections:
        was = earlier.get((each.inode, each.local_port, each.remote_port))
        is_known = was is not None and _grown(was, each) and each.busy_us is not None
        if is_known and was is not None and not _is_local(each):
            pairs.setdefault((each.local, each.remote), []).append((was, each))
    found = [_peer(of_pair, after.devices.get(local, ""), seconds) for (local, _), of_pair in pairs.items()]
    return sorted(found, key=lambda peer: (-peer.sent_bytes, peer.remote))[:_MOST_PEERS]


def _is_local(connection: Connection) -> bool:
    return connection.local == connection.remote or ipaddress.ip_address(connection.remote).is_loopback


def _grown(was: Connection, now: Connection) -> bool:
    """Return whether this is one connection, whose counters never fall."""
    same = (was.local, was.remote) == (now.local, now.remote)
    return same and (now.busy_us or 0) >= (was.busy_us or 0) and (now.bytes_acked or 0) >= (was.bytes_acked or 0)


def _peer(pairs: Sequence[tuple[Connection, Connection]], device: str, seconds: float) -> TcpPeer:
    sent = [(now.bytes_acked or 0) - (was.bytes_acked or 0) for was, now in pairs]
    most = pairs[max(range(len(pairs)), key=sent.__getitem__)][1]
    out = _added((was.bytes_sent, now.bytes_sent) for was, now in pairs)
    again = _added((was.bytes_retrans, now.bytes_retrans) for was, now in pairs)
    return TcpPeer(
        most.local,
        most.remote,
        device,
        seconds,
        sum(sent),
        _part(((was.busy_us, now.busy_us) for was, now in pairs), seconds),
        _part(((was.rwnd_limited_us, now.rwnd_limited_us) for was, now in pairs), seconds),
        again / out if again is not None and out else None,
        _in_s(most.rtt_us),
        _in_s(most.min_rtt_us),
    )


def _added(pairs: Iterable[tuple[int | None, int | None]]) -> int | None:
    known = [now - was for was, now in pairs if was is not None and now is not None]
    return sum(known) if known else None


def _part(pairs: Iterable[tuple[int | None, int | None]], seconds: float) -> float:
    """Return the largest part of the time (0 to 1) of times in µs."""
    return min(1.0, max(((now or 0) - (was or 0)) / 1e6 for was, now in pairs) / seconds)


def _in_s(value_us: int | None) -> float | None:
    return None if value_us is None else value_us / 1e6
