"""Checks for differences between ranks: settings, networks, devices, graphs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.checks.evidence import Hit, Log, who
from commwatch_collectors.nccl.communicators import Communicator
from commwatch_collectors.nccl.lives import Seen
from commwatch_collectors.nccl.text import Process
from commwatch_collectors.spans import ranks

_NOT_SET = "not set"
#: Settings that may differ between ranks, or that only rank 0 has.
_MAY_DIFFER = re.compile(
    r".*_(?:FILE|DIR|VISIBLE_DEVICES)$|NCCL_(?:HOSTID|COMM_ID|DEBUG\w*|RAS_\w+|PROFIL\w+|GRAPH_DUMP\w*|TOPO_DUMP\w*)$"
)
#: Settings that each process reads in its first init, with a fact that is printed after that.
_READ_BY_ALL: dict[str, type[f.Fact]] = {
    "NCCL_SOCKET_IFNAME": f.Interfaces,
    "NCCL_IB_DISABLE": f.Network,
    "NCCL_NET": f.Network,
}
_PATTERNS = {1: "balanced tree", 2: "split tree", 3: "tree", 4: "ring", 5: "NVLS", 6: "CollNet"}


def settings_differ(log: Log) -> Iterator[Hit]:
    """A setting has several values, or only some ranks have it."""
    for name, values in log.env.items():
        if _MAY_DIFFER.match(name):
            continue
        lacking = _lacking(log, name, values)
        for groups in log.disagreements({**values, **({_NOT_SET: lacking} if lacking else {})}):
            parts = (f"{value or '(empty)'} ({who(by)})" for value, by in sorted(groups.items()))
            yield Hit(f"{name}: {'; '.join(parts)}{log.doubt}", [next(iter(by.values())) for by in groups.values()])


def _lacking(log: Log, name: str, values: dict[str, dict[Process | None, Seen]]) -> dict[Process | None, Seen]:
    """Return the processes that printed settings and facts of a later stage, but not this setting."""
    account = log.account
    if name not in _READ_BY_ALL or account.torn or account.overflow:
        return {}  # the line may be lost
    reported = {process for _, by in values.items() for process in by}
    talkative = {process for by_value in log.env.values() for by in by_value.values() for process in by}
    past = {process: seen for process, _, seen in account.of(_READ_BY_ALL[name])}
    return {process: seen for process, seen in past.items() if process in talkative - reported}


def networks_differ(log: Log) -> Iterator[Hit]:
    """Ranks chose different networks."""
    for users in log.disagreements(log.networks):
        text = "; ".join(f"{name} ({who(by)})" for name, by in sorted(users.items()))
        yield Hit(f"{text}{log.doubt}", [next(iter(by.values())) for by in users.values()])


def devices_differ(log: Log) -> Iterator[Hit]:
    """Ranks see different HCAs, or bootstrap on interfaces of different networks."""
    by_devices: dict[tuple[str, ...], dict[Process | None, Seen]] = {}
    for process, hcas, seen in log.account.of(f.Hcas):
        # Names differ between nodes; how many there are and of what kind should not.
        by_devices.setdefault(tuple(sorted(hca.link for hca in hcas.devices)), {})[process] = seen
    none = {process: seen for process, _, seen in log.account.of(f.NoHca)}
    for users in log.disagreements({**by_devices, **({(): none} if by_devices and none else {})}):
        parts = (f"{_counted(links)} ({who(by)})" for links, by in sorted(users.items()))
        yield Hit(f"{'; '.join(parts)}{log.doubt}", [next(iter(by.values())) for by in users.values()])
    yield from _bootstraps(log, same_network=False)


def interfaces_differ(log: Log) -> Iterator[Hit]:
    """Ranks bootstrap on interfaces of different names in one network."""
    yield from _bootstraps(log, same_network=True)


def _counted(links: tuple[str, ...]) -> str:
    return " and ".join(f"{number} {kind}" for kind, number in Counter(links).items()) or "none"


def _bootstraps(log: Log, same_network: bool) -> Iterator[Hit]:
    by_interface: dict[str, dict[Process | None, Seen]] = {}
    for process, interfaces, seen in log.account.of(f.Interfaces):
        if interfaces.use == "Bootstrap":
            by_interface.setdefault(interfaces.names[0], {}).setdefault(process, seen)
    for users in log.disagreements(by_interface):
        networks = {_network(name, seen) for name, by in users.items() for seen in by.values()}
        if (len(networks) == 1 and None not in networks) is same_network:
            parts = (f"{name} ({who(by)})" for name, by in sorted(users.items()))
            yield Hit(f"bootstrap on {'; '.join(parts)}{log.doubt}", [next(iter(by.values())) for by in users.values()])


def _network(name: str, seen: Seen) -> str | None:
    """Return the first three parts of an interface's IPv4 address: enough to recognise one network."""
    address = re.search(rf"{re.escape(name)}:(\d+\.\d+\.\d+)\.\d+", seen.line)
    return address[1] if address else None


def uneven_ranks(log: Log) -> Iterator[Hit]:
    """One rank of a communicator found fewer channels or slower graphs than the others."""
    for comm in log.communicators:
        if not comm.pooled:
            yield from _uneven(comm)


def _uneven(comm: Communicator) -> Iterator[Hit]:
    bandwidth: dict[int, dict[float, dict[int, Seen]]] = {}
    for member, pattern, seen in comm.of(f.Pattern):
        total = pattern.nchannels * min(pattern.bw_intra, pattern.bw_inter)
        bandwidth.setdefault(pattern.pattern, {}).setdefault(total, {}).setdefault(member.init.rank or 0, seen)
    for number, by in bandwidth.items():
        lowest = by[min(by)]
        best = max(by)
        slow = {rank: seen for rank, seen in lowest.items() if rank not in by[best]}
        if slow and min(by) < best:
            yield Hit(
                f"{comm.name}: {ranks(slow)} found {_PATTERNS.get(number, number)} graphs of {min(by):g} GB/s, others of {best:g}",
                list(slow.values()),
            )
    channels: dict[int, dict[int, Seen]] = {}
    for member, counts, seen in comm.of(f.Channels):
        channels.setdefault(counts.coll, {})[member.init.rank or 0] = seen
    fewest = (
        {rank: seen for rank, seen in channels[min(channels)].items() if rank not in channels[max(channels)]}
        if channels
        else {}
    )
    if len(channels) > 1 and fewest:
        yield Hit(
            f"{comm.name}: {ranks(fewest)} {'have' if len(fewest) > 1 else 'has'} {min(channels)} channels, others {max(channels)}",
            list(fewest.values()),
        )
