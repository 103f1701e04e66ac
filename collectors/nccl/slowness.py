"""Checks for what is slower than it need be, or not as it was asked for."""

from __future__ import annotations

from collections.abc import Iterator

from commwatch.collectors.nccl import facts as f
from commwatch.collectors.nccl.account import Seen
from commwatch.collectors.nccl.communicators import Communicator, spans
from commwatch.collectors.nccl.evidence import Hit, Log, who
from commwatch.collectors.nccl.text import Process

#: Networks that are slow but always there.
_SOCKETS = ("Socket", "NET/Socket")
#: Path types, near to far.
_PATHS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS", "NET", "DIS")
#: Settings that are each process's own.
_OWN = ("_FILE", "_DIR", "NCCL_HOSTID", "NCCL_COMM_ID")
_SLOW_INIT_S = 30.0


def sockets(log: Log) -> Iterator[Hit]:
    """Nodes talk over TCP though there is InfiniBand or RoCE, or though nobody has found any."""
    links = [(process, seen) for process, via, seen in log.net_links() if via.kind == "NET/Socket"]
    users = log.networks.get("Socket", {})
    if not links and not (users and log.crosses_nodes):
        return
    seen = [seen for _, seen in links[:3]] + list(users.values())[:3]
    devices = {hca.device for hcas, _ in log.hcas.values() for hca in hcas.devices}
    fast = sorted(name for name in log.networks if name != "Socket")
    if devices or fast:
        why = f"{', '.join(sorted(devices)[:4])} would be there" if devices else f"others use {', '.join(fast)}"
        yield Hit(f"{who([*users] or [process for process, _ in links])} on TCP sockets; {why}", seen)
        return
    nothing = [seen for _, _, seen in log.account.of(f.NoHca)]
    why = "no InfiniBand or RoCE device was found" if nothing else "the log names no other network"
    yield Hit(f"{who([*users] or [process for process, _ in links])} on TCP sockets; {why}", nothing[:3] + seen)


def gdr_off(log: Log) -> Iterator[Hit]:
    """Data for the network goes through host memory."""
    with_gdr = without = 0
    staged: list[Seen] = []
    for _, via, seen in log.net_links():
        if via.kind in _SOCKETS:
            continue
        with_gdr += seen.lines * via.gdr
        without += seen.lines * (not via.gdr)
        if not via.gdr:
            staged.append(seen)
    refused = [(fact, seen) for _, fact, seen in log.account.of(f.GdrGpu) if not fact.enabled]
    unable = [(fact, seen) for _, fact, seen in log.account.of(f.GdrHca) if not fact.enabled]
    if without:
        part = f"{without} of {with_gdr + without} connections" if with_gdr else "all connections"
        why = _why_no_gdr(refused, unable)
        yield Hit(
            f"{part} over the network are staged through host memory{why}",
            [s for _, s in unable[:2] + refused[:2]] + staged,
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
    """GPUs of one node meet in host memory instead of reaching each other."""
    found = [(via, seen) for _, via, seen in log.account.of(f.Via) if via.kind == "SHM"]
    if not found:
        return
    pairs = {(via.src, via.dst) for via, _ in found}
    cause = log.setting("NCCL_P2P_DISABLE", "1") + log.setting("NCCL_P2P_LEVEL")
    why = f"; {cause[0].line.rpartition('NCCL INFO ')[2]}" if cause else ""
    yield Hit(f"{len(pairs)} pairs of ranks{why}", cause[:2] + [seen for _, seen in found])


def network_inside_node(log: Log) -> Iterator[Hit]:
    """Ranks of one node talk over the network."""
    for comm in log.communicators:
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
            yield Hit(f"{comm.name}: {len(pairs)} pairs of ranks on the same node", cause[:2] + found)


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
    """Some GPUs of a node reach each other over NVLink, others only over PCIe or between CPUs."""
    kinds: dict[str, list[Seen]] = {}
    for _, paths, seen in log.account.of(f.Paths):
        for other, kind in paths.to:
            if other != paths.gpu:
                kinds.setdefault(kind, []).append(seen)
    far = [kind for kind in kinds if kind not in ("NVL", "NVB", "C2C")]
    if "NVL" in kinds and far:
        yield Hit(f"paths between GPUs: {', '.join(sorted(kinds, key=_PATHS.index))}", kinds[far[0]])
    nvlink = "NVL" in kinds or any(pattern.type_intra == "NVL" for _, pattern, _ in log.account.of(f.Pattern))
    for _, pattern, seen in log.account.of(f.Pattern):
        if pattern.pattern == 4 and pattern.nchannels and pattern.type_intra in ("PHB", "SYS"):
            expected = " though there is NVLink" if nvlink else ""
            yield Hit(
                f"rings inside the node take {pattern.type_intra} paths at {pattern.bw_intra:g} GB/s{expected}", [seen]
            )


def settings_differ(log: Log) -> Iterator[Hit]:
    """A setting has several values."""
    for name, values in log.env.items():
        if len(values) > 1 and not name.endswith(_OWN[:2]) and name not in _OWN:
            parts = (f"{value or '(empty)'} ({who(by)})" for value, by in sorted(values.items()))
            yield Hit(f"{name}: {'; '.join(parts)}", [next(iter(by.values())) for by in values.values()])


def networks_differ(log: Log) -> Iterator[Hit]:
    """Ranks chose different networks."""
    by_host: dict[str, set[str]] = {}
    for name, users in log.networks.items():
        for process in users:
            if process is not None:
                by_host.setdefault(name, set()).add(f"{process.host}:{process.pid}")
    only = {name: users for name, users in by_host.items() if not all(users <= other for other in by_host.values())}
    if len(only) > 1:
        said = "; ".join(f"{name} ({who(log.networks[name])})" for name in sorted(only))
        yield Hit(said, [next(iter(log.networks[name].values())) for name in sorted(only)])


def devices_differ(log: Log) -> Iterator[Hit]:
    """Ranks see different HCAs, or begin on different interfaces."""
    by_count: dict[tuple[str, ...], dict[Process, Seen]] = {}
    for process, (hcas, seen) in log.hcas.items():
        # Names differ between nodes; how many there are and of what kind should not.
        by_count.setdefault(tuple(sorted(hca.link for hca in hcas.devices)), {})[process] = seen
    if len(by_count) > 1:
        said = "; ".join(f"{len(links)} HCAs ({who(users)})" for links, users in by_count.items())
        yield Hit(said, [next(iter(users.values())) for users in by_count.values()])
    by_name: dict[str, dict[Process | None, Seen]] = {}
    for user, interfaces, seen in log.account.of(f.Interfaces):
        if interfaces.use == "Bootstrap":
            by_name.setdefault(interfaces.names[0], {}).setdefault(user, seen)
    if len(by_name) > 1:
        said = "; ".join(f"{name} ({who(users)})" for name, users in sorted(by_name.items()))
        yield Hit(f"bootstrap on {said}", [next(iter(users.values())) for users in by_name.values()])


def hcas_unused(log: Log) -> Iterator[Hit]:
    """An HCA of a node that none of its ranks sends over."""
    used: dict[str, set[str]] = {}
    for process, via, _ in log.net_links():
        if process is not None and via.device is not None:
            used.setdefault(process.host, set()).add(via.device)
    alike: dict[tuple[str, ...], dict[str, list[Seen]]] = {}
    for host, numbers in sorted(used.items()):
        mine = [hcas_and_seen for process, hcas_and_seen in log.hcas.items() if process.host == host]
        listed = {hca.number: (hca.device, seen) for hcas, seen in mine for hca in hcas.devices}
        idle = [listed[number] for number in sorted(listed) if str(number) not in numbers]
        if idle and _all_in_sight(log, host):
            alike.setdefault(tuple(device for device, _ in idle), {})[host] = [seen for _, seen in idle[:1]]
    for devices, hosts in alike.items():
        where = next(iter(hosts)) if len(hosts) == 1 else f"{len(hosts)} hosts"
        yield Hit(f"{', '.join(devices)} on {where}", [seen for found in hosts.values() for seen in found])


def _all_in_sight(log: Log, host: str) -> bool:
    """Whether the log holds all ranks of a node, in some communicator that spans nodes."""
    for comm in log.communicators:
        here = comm.hosts.get(host, [])
        if len(here) in (0, comm.nranks):
            continue
        if len(comm.ranks) == comm.nranks or (comm.layout is not None and comm.layout.local_ranks == len(here)):
            return True
    return False


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
                f"{comm.name}: rank {spans(slow)} found pattern {number} at {min(by):g} GB/s, others at {best:g}",
                list(slow.values()),
            )
    channels: dict[int, dict[int, Seen]] = {}
    for member, counts, seen in comm.of(f.Channels):
        channels.setdefault(counts.coll, {})[member.init.rank or 0] = seen
    if len(channels) > 1:
        fewest = channels[min(channels)]
        yield Hit(
            f"{comm.name}: rank {spans(fewest)} has {min(channels)} channels, others {max(channels)}",
            list(fewest.values()),
        )


def nvls_unused(log: Log) -> Iterator[Hit]:
    """NVLink SHARP was asked for and is not used."""
    asked = log.setting("NCCL_NVLS_ENABLE", "1", "2")
    if asked and not any(True for _ in log.account.of(f.NvlsUsed)):
        unable = [seen for _, nvls, seen in log.account.of(f.Nvls) if not nvls.available]
        yield Hit("not available on this node" if unable else "no communicator has NVLS buffers", asked + unable)


def sharp_unused(log: Log) -> Iterator[Hit]:
    """CollNet (SHARP) was asked for or tried, and is not used."""
    asked = log.setting("NCCL_COLLNET_ENABLE", "1")
    failed = [
        w
        for w in log.account.warnings.values()
        if "SHARP coll init error" in w.text or "Cannot initialize CollNet" in w.text
    ]
    connected = any(True for _ in log.account.of(f.CollNetVia))
    if failed:
        yield Hit(failed[0].text, [warned.seen for warned in failed] + asked[:1])
    elif asked and not connected and any(comm.transports() for comm in log.communicators):
        yield Hit("NCCL_COLLNET_ENABLE=1, but no rank is connected to the CollNet", asked)


def slow_inits(log: Log) -> Iterator[Hit]:
    """An init took very long."""
    slow = [(time, seen) for _, time, seen in log.account.of(f.InitTime) if time.total_s > _SLOW_INIT_S]
    if slow:
        worst = max(time.total_s for time, _ in slow)
        yield Hit(f"{worst:.0f} s on rank {spans(time.rank for time, _ in slow)}", [seen for _, seen in slow])


def retries(log: Log) -> Iterator[Hit]:
    """Connections had to be tried again."""
    found = [(retry, seen) for _, retry, seen in log.account.of(f.Retry)]
    if found:
        yield Hit(f"{sum(seen.lines for _, seen in found)} times: {found[0][0].error}", [seen for _, seen in found])


def mixed_output(log: Log) -> Iterator[Hit]:
    """Several writers have cut each other's lines, or there was more than we keep."""
    account = log.account
    if account.torn:
        yield Hit(f"{account.torn} messages are glued to others or have lost their head", account.torn_samples)
    if account.overflow:
        yield Hit(
            f"{account.overflow} further distinct facts were not kept: what is said here is of the first part", []
        )
