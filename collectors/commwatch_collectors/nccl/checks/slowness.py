"""Checks for what is slower than necessary, or requested and not used."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from commwatch_collectors.nccl import facts as f
from commwatch_collectors.nccl.checks.evidence import Hit, Log, by_job, many, some, who
from commwatch_collectors.nccl.checks.failures import cut_in_init
from commwatch_collectors.nccl.communicators import Communicator
from commwatch_collectors.nccl.lives import Seen
from commwatch_collectors.spans import ranks

#: Networks that are slow but always available.
_SOCKETS = ("Socket", "NET/Socket")
_SLOW_INIT_S = 30.0
#: A complete connection line without ``/GDRDMA``: cut lines may have lost it.
_STAGED = re.compile(r" via NET/[^/]+/\d+(?:\(\d+\))?(?:/Shared)?(?:\s|$)")
_LAST = 3
_RING = 4
_NVLINK = ("NVL", "NVB", "C2C", "XGMI")
_FAR = ("PHB", "SYS")
_GDR_OF_PLUGIN = (
    "The network plug-in decides this, not NCCL: see its own lines (NCCL_DEBUG_SUBSYS=INIT,NET). With EFA (aws-ofi-nccl), it needs an instance "
    "type whose EFA has RDMA, a libfabric that was built for CUDA (fi_info -p efa -c FI_HMEM lists a provider), and versions of driver, "
    "libfabric and plug-in that belong together."
)
_TIMING = re.compile(r"(\w+) (\d+(?:\.\d+)?)(?=[,)])")


@by_job
def sockets(log: Log) -> Iterator[Hit]:
    """Nodes communicate over TCP although there is InfiniBand or RoCE, or because none was found."""
    links = [(process, seen) for process, via, seen in log.net_links() if via.kind == "NET/Socket"]
    users = log.networks.get("Socket", {})
    if not links and not (users and log.crosses_nodes):
        return
    seen = [seen for _, seen in links[:3]] + list(users.values())[:3]
    whose = f"{who([*users] or [process for process, _ in links])} on TCP sockets"
    devices = {hca.device for hcas, _ in log.hcas.values() for hca in hcas.devices}
    fast = sorted(name for name in log.networks if name != "Socket")
    cause = log.setting("NCCL_IB_DISABLE", "1") + log.setting("NCCL_NET", "Socket", "socket")
    nothing = [seen for _, _, seen in log.account.of(f.NoHca)]
    if cause:
        yield Hit(f"{whose}; {_text(cause[0])}", cause[:2] + seen)
    elif devices or fast:
        why = f"the node has {some(sorted(devices))}" if devices else f"others use {', '.join(fast)}"
        yield Hit(f"{whose}; {why}", seen + [seen for _, seen in list(log.hcas.values())[:1]])
    else:
        why = "no InfiniBand or RoCE device was found" if nothing else "the log names no other network"
        yield Hit(f"{whose}; {why}", nothing[:3] + seen)


def _text(seen: Seen) -> str:
    """Return a message without its head."""
    return seen.line.rpartition("NCCL INFO ")[2].strip().removesuffix(".")


@by_job
def gdr_off(log: Log) -> Iterator[Hit]:
    """Data for the network goes through host memory."""
    with_gdr = without = receives = 0
    by_verbs = False
    staged: list[Seen] = []
    for _, via, seen in log.net_links():
        if via.kind in _SOCKETS:
            continue
        with_gdr += seen.lines * via.gdr
        if not via.gdr and _STAGED.search(seen.line):
            without += seen.lines
            by_verbs |= via.kind.startswith("NET/IB")
            staged.append(seen)
            receives += seen.lines * (via.direction == "receive")
    refused = [(fact, seen) for _, fact, seen in log.account.of(f.GdrGpu) if not fact.enabled]
    unable = [(fact, seen) for _, fact, seen in log.account.of(f.GdrHca) if not fact.enabled]
    if without:
        part = f"{without} of {with_gdr + without} connections" if with_gdr else "all connections"
        if with_gdr and not receives:
            part += " (only sends)"
        plugin = list(log.account.of(f.GdrPlugin))
        why = f"; {plugin[0][1].why}" if plugin else _why_no_gdr(refused, unable)
        yield Hit(
            f"{part} over the network are staged through host memory{why}",
            [s for _, _, s in plugin[:2]] + [s for _, s in unable[:2] + refused[:2]] + staged,
            do="" if by_verbs else _GDR_OF_PLUGIN,
        )
    elif unable and not with_gdr and log.crosses_nodes:
        yield Hit(
            f"no GPUDirect RDMA with {', '.join(sorted({fact.hca for fact, _ in unable}))}", [s for _, s in unable]
        )


def _why_no_gdr(refused: list[tuple[f.GdrGpu, Seen]], unable: list[tuple[f.GdrHca, Seen]]) -> str:
    if unable:
        return f"; not available with {', '.join(sorted({fact.hca for fact, _ in unable})[:4])}"
    return f"; refused for {refused[0][0].why}" if refused and refused[0][0].why else ""


def shared_memory(log: Log) -> Iterator[Hit]:
    """GPUs of one node exchange data through host memory instead of directly."""
    found = [(via, seen) for _, via, seen in log.account.of(f.Via) if via.kind == "SHM"]
    if not found:
        return
    pairs = {(via.src, via.dst) for via, _ in found}
    cause = log.setting("NCCL_P2P_DISABLE", "1") + log.setting("NCCL_P2P_LEVEL")
    why = f"; {_text(cause[0])}" if cause else ""
    yield Hit(f"{many(len(pairs), 'pair')} of ranks{why}", cause[:2] + [seen for _, seen in found])


def network_inside_node(log: Log) -> Iterator[Hit]:
    """Ranks of one node communicate over the network."""
    for comm in log.communicators:
        if not _names_are_nodes(comm):
            continue
        host_of = {rank: host for host, ranks in comm.hosts.items() for rank in ranks}
        found: list[Seen] = []
        pairs = set()
        for _, via, seen in comm.of(f.Via):
            host = host_of.get(via.src)
            if via.kind.startswith("NET/") and host is not None and host == host_of.get(via.dst):
                pairs.add((via.src, via.dst))
                found.append(seen)
        if pairs:
            cause = [
                seen
                for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_P2P_LEVEL")
                for seen in log.setting(name, "1", "LOC")
            ]
            why = f"; {_text(cause[0])}" if cause else ""
            yield Hit(f"{comm.name}: {many(len(pairs), 'pair')} of ranks on the same node{why}", cause[:2] + found)


def _names_are_nodes(comm: Communicator) -> bool:
    """Return whether each host name is one node: containers may all be called ``localhost``."""
    gpus = Counter((member.process.host, member.init.bus_id) for member in comm.members if member.init.bus_id)
    nodes = comm.layout.nnodes if comm.layout is not None else 0
    return nodes <= len(comm.hosts) if nodes else all(number == 1 for number in gpus.values())


def disabled(log: Log) -> Iterator[Hit]:
    """A transport is switched off by a setting."""
    for name, values in (
        ("NCCL_P2P_DISABLE", ("1",)),
        ("NCCL_SHM_DISABLE", ("1",)),
        ("NCCL_IB_DISABLE", ("1",)),
        ("NCCL_P2P_LEVEL", ("LOC", "0")),
        ("NCCL_NET_GDR_LEVEL", ("LOC", "0")),
        ("NCCL_NVLS_ENABLE", ("0",)),
    ):
        seen = log.setting(name, *values)
        if seen:
            value = next(value for value in values if log.setting(name, value))
            yield Hit(f"{name}={value} in {len(seen)} process{'es' * (len(seen) > 1)}", seen)


def slow_paths(log: Log) -> Iterator[Hit]:
    """Some GPUs of a node reach each other over NVLink, others only between CPUs; or all only between CPUs."""
    kinds: dict[str, list[Seen]] = {}
    for _, paths, seen in log.account.of(f.Paths):
        for other, kind in paths.to:
            if other != paths.gpu:
                kinds.setdefault(kind, []).append(seen)
    rings = [(pattern, seen) for _, pattern, seen in log.account.of(f.Pattern) if pattern.pattern == _RING]
    nvlink = any(kind in kinds for kind in _NVLINK) or any(pattern.type_intra in _NVLINK for pattern, _ in rings)
    far = [kind for kind in _FAR if kind in kinds]
    if nvlink and far:
        yield Hit(f"some GPUs are linked by NVLink, others only by {', '.join(far)} paths", kinds[far[-1]])
    for kind in _FAR:
        found = [(pattern, seen) for pattern, seen in rings if pattern.type_intra == kind and pattern.nchannels]
        # Without NVLink, most machines have no shorter paths than over one CPU.
        if found and (nvlink or kind == "SYS"):
            slowest = min(pattern.bw_intra for pattern, _ in found)
            expected = ", although the node has NVLink" if nvlink else ""
            says = f"rings inside the node take {kind} paths at {slowest:g} GB/s per channel{expected}"
            yield Hit(says, [seen for _, seen in found])


def hcas_unused(log: Log) -> Iterator[Hit]:
    """An HCA that no rank of its node uses for a connection."""
    used: dict[str, set[str]] = {}
    for process, via, _ in log.net_links():
        if process is not None and via.device is not None:
            used.setdefault(process.host, set()).add(via.device)
    alike: dict[tuple[str, ...], dict[str, list[Seen]]] = {}
    for host, numbers in sorted(used.items()):
        mine = [hcas_and_seen for process, hcas_and_seen in log.hcas.items() if process.host == host]
        listed = {hca.number: (hca.device, seen) for hcas, seen in mine for hca in hcas.devices}
        if not numbers <= {str(number) for number in listed}:
            continue  # merged cards, or those of a second plug-in, have numbers of their own
        idle = [listed[number] for number in sorted(listed) if str(number) not in numbers]
        if idle and _all_logged(log, host):
            alike.setdefault(tuple(device for device, _ in idle), {})[host] = [seen for _, seen in idle[:1]]
    for devices, hosts in alike.items():
        where = next(iter(hosts)) if len(hosts) == 1 else f"{len(hosts)} hosts"
        yield Hit(f"{some(devices, 8)} on {where}", [seen for found in hosts.values() for seen in found])


def _all_logged(log: Log, host: str) -> bool:
    """Return whether the log has all ranks of a node, in some communicator that spans nodes."""
    for comm in log.communicators:
        here = comm.hosts.get(host, [])
        if len(here) in (0, comm.nranks):
            continue
        if len(comm.ranks) == comm.nranks or (comm.layout is not None and comm.layout.local_ranks == len(here)):
            return True
    return False


def _names_nvls(algorithms: str) -> bool:
    """Return whether a value of ``NCCL_ALGO`` requests NVLS: a list, perhaps for each function; ``^`` before one excludes its entries."""
    lists = (part.rpartition(":")[2].strip().lower() for part in algorithms.split(";"))
    return any("nvls" in names and not names.startswith("^") for names in lists)


@by_job
def nvls_unused(log: Log) -> Iterator[Hit]:
    """NVLink SHARP was requested and is not used."""
    requested = log.setting("NCCL_NVLS_ENABLE", "1") + [
        seen for value, by in log.env.get("NCCL_ALGO", {}).items() if _names_nvls(value) for seen in by.values()
    ]
    if not requested or any(True for _ in log.account.of(f.NvlsUsed)):
        return
    reports = [(nvls, seen) for _, nvls, seen in log.account.of(f.Nvls)]
    unable = [seen for nvls, seen in reports if not nvls.available]
    # At INIT only the number of channels shows its use. Two ranks do not use it.
    without = [
        (counts.nvls, seen) for comm in log.communicators if comm.nranks > 2 for _, counts, seen in comm.of(f.Channels)
    ]
    if unable and len(unable) == len(reports):
        yield Hit(
            f"not available to {who(process for process, _, _ in log.account.of(f.Nvls))}", requested[:1] + unable
        )
    elif without and all(nvls == 0 for nvls, _ in without):
        yield Hit("no communicator has NVLS channels", requested[:1] + [seen for _, seen in without])


@by_job
def sharp_unused(log: Log) -> Iterator[Hit]:
    """CollNet (SHARP) was requested or tried, and is not used."""
    requested = log.setting("NCCL_COLLNET_ENABLE", "1")
    failed = [w for w in log.warnings if "SHARP coll init error" in w.text or "Cannot initialize CollNet" in w.text]
    # It applies only between nodes, to communicators that are connected.
    between = any(
        comm.nodes > 1 and any(name.startswith("NET/") for name in comm.transports()) for comm in log.communicators
    )
    connected = any(True for _ in log.account.of(f.CollNetVia)) or any(
        fact.what == "CollNet" for _, fact, _ in log.account.of(f.Connected)
    )
    if failed:
        yield Hit(failed[0].text, [warned.seen for warned in failed] + requested[:1])
    elif requested and between and not connected:
        yield Hit("NCCL_COLLNET_ENABLE=1, but no rank is connected to the CollNet", requested)


def slow_inits(log: Log) -> Iterator[Hit]:
    """An init took very long."""
    slow = [(time, seen) for _, time, seen in log.account.of(f.InitTime) if time.total_s > _SLOW_INIT_S]
    if slow:
        worst, longest = max(slow, key=lambda found: found[0].total_s)
        parts = {name: float(took) for name, took in _TIMING.findall(longest.line.partition(" total ")[2])}
        most = max(parts, key=lambda name: parts[name], default="")
        spent = f", of which {parts[most]:.0f} s in {most}" if most else ""
        yield Hit(
            f"{worst.total_s:.0f} s{spent}, on {ranks({time.rank for time, _ in slow})}",
            [longest] + [seen for _, seen in slow],
        )


def retries(log: Log) -> Iterator[Hit]:
    """Connections had to be tried again."""
    found = [(retry, seen) for _, retry, seen in log.account.of(f.Retry)]
    if found:
        yield Hit(f"{sum(seen.lines for _, seen in found)} times: {found[0][0].error}", [seen for _, seen in found])


def mixed_output(log: Log) -> Iterator[Hit]:
    """Several writers have cut each other's lines."""
    torn = log.account.torn
    if torn:
        whose = f"{many(torn, 'message')} {'is' if torn == 1 else 'are'}"
        yield Hit(f"{whose} merged with others or without a head", log.account.torn_samples)


def cut_output(log: Log) -> Iterator[Hit]:
    """The log's beginning or end is missing, or it has more facts than are kept."""
    account = log.account
    cut = cut_in_init(log)
    if cut:
        last = [seen for comm in cut for _, _, seen in comm.of(f.Via)][-_LAST:]
        yield Hit(f"it ends while connecting {many(len(cut), 'communicator')} (no rank is missing)", last)
    headless = [
        (life.process, next(iter(found[f.Via].values())))
        for life in account.lives.values()
        for found in [next((of for of in (life.facts, *life.pending.values()) if f.Via in of), None)]
        if not life.members and found is not None and not account.torn  # a torn head may hide the init
    ]
    if headless:
        yield Hit(
            f"connections of {who(process for process, _ in headless)}, but not their init",
            [seen for _, seen in headless],
        )
    if account.overflow:
        yield Hit(
            f"{many(account.overflow, 'further distinct fact')} not kept: the findings cover only the first part", []
        )
