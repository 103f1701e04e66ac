"""What the TCP connections of a process did between two samples, by address of the other side. Pure.

A connection is busy while it has data that is not sent or not acknowledged. In a ring only the sender before a slow link is busy nearly all of
the time; the others wait for data, and are idle.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_low

from commwatch_collectors.node.tcp_connections import Sockets
from commwatch_collectors.node.tcp_info import Connection

#: Most addresses that are kept: those that most is sent to.
_MOST_PEERS = 32
#: Least number of times between samples from which a loss is known: new connections lose data until they have found their speed.
_LEAST_TIMES = 4


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
    #: Part of the samples (0 to 1) in which data was not sent yet: a link that only waits for acknowledgements has sent all.
    unsent: float
    #: Part of the sent bytes (0 to 1) that was sent again: the median over the samples; ``None`` also with too few of them.
    retransmitted: float | None
    #: Round trip now, and the shortest one of the last minutes, in s: of the connection that sent most.
    rtt_s: float | None
    min_rtt_s: float | None


def peers(samples: Sequence[Sockets], seconds: float) -> list[TcpPeer]:
    """Return what the connections did that the first and the last sample of one process have, without those within the node.

    Args:
        samples: two or more, the latest last.
        seconds: between the first and the last one.
    """
    last, sent_again, unsent = samples[-1], _sent_again(samples), _unsent(samples)
    found = [
        _peer(pairs, last.devices.get(at[0], ""), seconds, unsent[at] / len(samples), sent_again.get(at))
        for at, pairs in _pairs(samples[0], last).items()
    ]
    return sorted(found, key=lambda peer: (-peer.sent_bytes, peer.remote))[:_MOST_PEERS]


def _pairs(before: Sockets, after: Sockets) -> dict[tuple[str, str], list[tuple[Connection, Connection]]]:
    """Return the connections that two samples have, by their addresses."""
    earlier = {(each.inode, each.local_port, each.remote_port): each for each in before.connections}
    pairs: dict[tuple[str, str], list[tuple[Connection, Connection]]] = {}
    for each in after.connections:
        was = earlier.get((each.inode, each.local_port, each.remote_port))
        if was is not None and _grown(was, each) and each.busy_us is not None and not is_local(each, after.devices):
            pairs.setdefault((each.local, each.remote), []).append((was, each))
    return pairs


def _unsent(samples: Sequence[Sockets]) -> Counter[tuple[str, str]]:
    """Return the number of samples in which data was not sent yet, by addresses."""
    return Counter(
        at for sample in samples for at in {(each.local, each.remote) for each in sample.connections if each.unsent}
    )


def _sent_again(samples: Sequence[Sockets]) -> dict[tuple[str, str], float]:
    """Return the part of the sent bytes that was sent again, by addresses: the median over the samples.

    A queue that overflows now and then, as any link's does, is no loss.
    """
    parts: dict[tuple[str, str], list[float]] = {}
    for before, after in pairwise(samples):
        for at, pairs in _pairs(before, after).items():
            out = _added((was.bytes_sent, now.bytes_sent) for was, now in pairs)
            again = _added((was.bytes_retrans, now.bytes_retrans) for was, now in pairs)
            if out and again is not None:
                parts.setdefault(at, []).append(again / out)
    return {at: median_low(each) for at, each in parts.items() if len(each) >= _LEAST_TIMES}


def is_local(connection: Connection, devices: Mapping[str, str]) -> bool:
    """Return whether both ends are on one node; ``devices``: those of the addresses that it has."""
    same = connection.remote in devices or connection.remote == connection.local
    return same or ipaddress.ip_address(connection.remote).is_loopback


def _grown(was: Connection, now: Connection) -> bool:
    """Return whether this is one connection, whose counters never fall."""
    same = (was.local, was.remote) == (now.local, now.remote)
    return same and (now.busy_us or 0) >= (was.busy_us or 0) and (now.bytes_acked or 0) >= (was.bytes_acked or 0)


def _peer(
    pairs: Sequence[tuple[Connection, Connection]],
    device: str,
    seconds: float,
    unsent: float,
    retransmitted: float | None,
) -> TcpPeer:
    sent = [(now.bytes_acked or 0) - (was.bytes_acked or 0) for was, now in pairs]
    most = pairs[max(range(len(pairs)), key=sent.__getitem__)][1]
    return TcpPeer(
        most.local,
        most.remote,
        device,
        seconds,
        sum(sent),
        _part(((was.busy_us, now.busy_us) for was, now in pairs), seconds),
        _part(((was.rwnd_limited_us, now.rwnd_limited_us) for was, now in pairs), seconds),
        unsent,
        retransmitted,
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
