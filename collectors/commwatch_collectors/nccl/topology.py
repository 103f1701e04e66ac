"""The topology in a log as plain values, for ``commwatch explain`` and the API."""

from __future__ import annotations

from itertools import chain, islice

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.communicators import Communicator, communicators
from commwatch_collectors.nccl.views import MOST_ENTRIES, ChoiceView, CommunicatorView, HostView, LinkView
from commwatch_collectors.spans import gaps, spans

_ALGO = {"0": "Tree", "1": "Ring", "2": "CollNetDirect", "3": "CollNetChain", "4": "NVLS", "5": "NVLSTree", "6": "PAT"}
_PROTO = {"0": "LL", "1": "LL128", "2": "Simple"}


def view(comm: Communicator) -> CommunicatorView:
    """Return one communicator as plain values."""
    channels, layout = comm.channels, comm.layout
    links = [
        LinkView(*link[:4], link.gdr if link.transport.startswith("NET/") else None, lines)
        for link, lines in sorted(comm.links().items(), key=lambda item: item[0][:2])[:MOST_ENTRIES]
    ]
    return CommunicatorView(
        comm_id=comm.comm_id,
        name=comm.name,
        nranks=comm.nranks,
        pooled=comm.pooled,
        parent_comm_id=None if comm.parent is None else comm.parent.comm_id,
        color=comm.color,
        hosts=comm.hosts,
        nnodes=layout.nnodes if layout is not None else None,
        complete=comm.complete,
        in_sight=spans(comm.ranks),
        missing_ranks=list(islice(chain.from_iterable(gaps(comm.ranks, comm.nranks)), MOST_ENTRIES)),
        coll_channels=None if channels is None else channels.coll,
        nvls_channels=None if channels is None else channels.nvls,
        p2p_channels=None if channels is None else channels.p2p,
        transports=comm.transports(),
        links=links,
        rings={channel: list(order) for channel, order in sorted(comm.rings().items())},
    )


def views(account: Account) -> list[CommunicatorView]:
    """Return all communicators as plain values."""
    return [view(comm) for comm in communicators(account)]


def hosts(account: Account) -> list[HostView]:
    """Return the hosts, sorted by name."""
    found: dict[str, tuple[set[int], dict[str, None], set[str], set[str]]] = {}
    for process in account.processes:
        found.setdefault(process.host, (set(), {}, set(), set()))[0].add(process.pid)
    for who, hcas, _ in account.of(f.Hcas):
        if who is not None and who.host in found:
            found[who.host][1].update({f"{hca.device}:{hca.port}/{hca.link}": None for hca in hcas.devices})
    for who, network, _ in account.of(f.Network):
        if who is not None and who.host in found:
            found[who.host][2].add(network.name)
    for who, interfaces, _ in account.of(f.Interfaces):
        if who is not None and who.host in found and interfaces.use == "Bootstrap":
            found[who.host][3].update(interfaces.names)
    return [
        HostView(host, len(pids), list(hcas), sorted(networks), sorted(bootstrap))
        for host, (pids, hcas, networks, bootstrap) in sorted(found.items())
    ]


def choices(account: Account) -> list[ChoiceView]:
    """Return the tuner's choices, by collective and size."""
    counted: dict[tuple[str | None, int, str, str], int] = {}
    for _, algo, seen in account.of(f.Algo):
        names = _ALGO.get(algo.algo, algo.algo), _PROTO.get(algo.proto, algo.proto)
        key = (algo.collective, algo.bytes, *names)
        counted[key] = counted.get(key, 0) + seen.lines
    ranges: list[ChoiceView] = []
    for (collective, size, name, proto), lines in sorted(
        counted.items(), key=lambda item: (item[0][0] or "", item[0][1:])
    ):
        last = ranges[-1] if ranges else None
        if last is not None and (last.collective, last.algo, last.proto) == (collective, name, proto):
            ranges[-1] = ChoiceView(collective, name, proto, last.min_bytes, size, last.lines + lines)
        else:
            ranges.append(ChoiceView(collective, name, proto, size, size, lines))
    return ranges
